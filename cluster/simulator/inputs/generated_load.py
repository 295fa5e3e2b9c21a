"""Load generated from a seed: conversations of several turns that begin with one of a few shared prefixes.

Conversations start as a Poisson process, or a gamma process that is more or less bursty; each turn's prompt is
everything before it and some new tokens. The loop is open: the next turn comes when the answer has probably been read,
whether or not the cluster was quick.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from math import log
from random import Random
from typing import NamedTuple

from cluster.simulator.inputs.block_names import trace_name
from cluster.simulator.inputs.trace import Trace, TraceRequest
from tandem.errors import ConfigError
from tandem.values.ids import BlockHash

_MAX_TURNS = 64
_SPREAD = 0.8
"""Standard deviation of the logarithm of lengths: the longest percent is about six times the median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSpec:
    requests: int = 1_000
    rate: float = 4.0
    """Requests per second over all conversations."""
    cv: float = 1.0
    """Coefficient of variation of the time between two conversations; 1 is Poisson."""
    prefixes: int = 8
    """Number of shared prefixes (system prompts); 0: none."""
    prefix: int = 1_024
    """Tokens of each shared prefix."""
    prompt: float = 512.0
    """Mean number of new tokens per turn."""
    output: float = 128.0
    """Mean number of tokens per answer."""
    turns: float = 3.0
    """Mean number of turns per conversation."""
    think: float = 20.0
    """Mean seconds from an answer to the next turn."""
    block: int = 64
    """Number of tokens of a named block."""

    @classmethod
    def parse(cls, text: str) -> "LoadSpec":
        """Parse `rate=8,requests=2000,…`. ConfigError names what is wrong."""
        kinds = {field.name: int if field.type is int or field.type == "int" else float for field in fields(cls)}
        values: dict[str, float] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            try:
                values[name] = kinds[name](value)
            except KeyError:
                raise ConfigError(f"--generate: {name!r} is unknown; expected one of {', '.join(kinds)}") from None
            except ValueError:
                raise ConfigError(f"--generate: {name} must be a number, not {value!r}") from None
        return cls(**values)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        for name in ("requests", "rate", "cv", "prompt", "output", "think"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"--generate: {name} must be above 0, not {getattr(self, name)}")
        if self.turns < 1 or self.prefixes < 0 or self.prefix < 0 or self.block < 16 or self.block % 16:
            raise ConfigError(
                "--generate: needs turns >= 1, prefixes >= 0, prefix >= 0 and a block that is a multiple of 16"
            )


class _Turn(NamedTuple):
    """A request before its blocks have names."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    conversation: int
    prefix: int


def generate(spec: LoadSpec, seed: int) -> Trace:
    """Generate the same requests for the same seed."""
    rng = Random(seed)
    turns: list[_Turn] = []
    # At first no conversation is at a later turn: requests are kept once the load has grown to its rate.
    grown_s = spec.turns * spec.think
    begun_s, number, enough_s = 0.0, 0, grown_s
    while True:
        turns += _conversation(spec, rng, begun_s, number)
        begun_s += rng.gammavariate(1.0 / spec.cv**2, spec.cv**2 * spec.turns / spec.rate)
        number += 1
        if begun_s >= enough_s:
            kept = sorted((turn for turn in turns if grown_s <= turn.arrival_s <= begun_s), key=_arrival_s)
            if len(kept) >= spec.requests:
                break
            enough_s = begun_s + (spec.requests - len(kept)) / spec.rate
    requests = tuple(_named(spec, kept[: spec.requests]))
    return Trace(name="generated", block_tokens=spec.block, requests=requests).stretched(1.0)


def _arrival_s(turn: _Turn) -> float:
    return turn.arrival_s


def _named(spec: LoadSpec, turns: Iterable[_Turn]) -> Iterator[TraceRequest]:
    """Name the blocks of turns, in the order of their arrival: only of those that are kept, which may be few."""
    num_shared = spec.prefix // spec.block if spec.prefixes else 0
    of_conversation: dict[int, list[BlockHash]] = {}
    for turn in turns:
        number = turn.conversation
        if (names := of_conversation.get(number)) is None:
            names = [trace_name(turn.prefix << 64 | index) for index in range(num_shared)]
            of_conversation[number] = names
        num_named = (turn.num_prompt_tokens + turn.num_output_tokens) // spec.block
        names += [trace_name(1 << 96 | number << 32 | index) for index in range(len(names), num_named)]
        yield TraceRequest(
            arrival_s=turn.arrival_s,
            num_prompt_tokens=turn.num_prompt_tokens,
            num_output_tokens=turn.num_output_tokens,
            names=tuple(names),
            tail=number % 2**31,
        )


def _conversation(spec: LoadSpec, rng: Random, begun_s: float, number: int) -> list[_Turn]:
    prefix = rng.randrange(spec.prefixes) if spec.prefixes else 0
    num_tokens = spec.prefix if spec.prefixes else 0
    turns: list[_Turn] = []
    arrival_s = begun_s
    while True:
        num_prompt = num_tokens + _length(rng, spec.prompt)
        num_output = _length(rng, spec.output)
        num_tokens = num_prompt + num_output
        turns.append(_Turn(arrival_s, num_prompt, num_output, number, prefix))
        if len(turns) == _MAX_TURNS or rng.random() < 1.0 / spec.turns:
            return turns
        arrival_s += rng.expovariate(1.0 / spec.think)


def _length(rng: Random, mean: float) -> int:
    """Draw a lognormal length of at least 1."""
    return max(1, round(rng.lognormvariate(log(mean) - _SPREAD**2 / 2, _SPREAD)))
