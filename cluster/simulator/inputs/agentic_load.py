"""Load of agents, generated from a seed: sessions whose prompts grow by what tools return, with pauses meanwhile.

Every call repeats the whole session so far: the agent's instructions, shared by all sessions of its kind, then the
task, then answers and tool results in turn. Lengths are lognormal; `calibrated` takes those of growth and answers from
a real trace, in which calls follow one another as they do here. Traces of tools' run times are not public: pauses are
the spec's own. The loop is open, as in `generated_load`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log
from random import Random
from statistics import fmean, pstdev

from cluster.simulator.inputs.block_names import trace_name
from cluster.simulator.inputs.trace import Trace, TraceRequest
from tandem.values.ids import BlockHash

_MAX_CALLS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthSpread:
    """A lognormal distribution of lengths or times."""

    median: float
    sigma: float
    """Standard deviation of the logarithm."""

    @classmethod
    def from_samples(cls, samples: Sequence[float]) -> "LengthSpread":
        logarithms = [log(max(1.0, sample)) for sample in samples]
        return cls(median=exp(fmean(logarithms)), sigma=pstdev(logarithms))

    def draw(self, rng: Random) -> float:
        return rng.lognormvariate(log(self.median), self.sigma)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgenticSpec:
    requests: int = 2_000
    sessions_per_s: float = 0.7
    kinds: int = 6
    """Kinds of agents; the sessions of one kind share their instructions."""
    instruction_tokens: int = 3_072
    calls: float = 12.0
    """Mean number of calls in a session."""
    task: LengthSpread = LengthSpread(median=800.0, sigma=1.0)
    """Tokens of the first call after the instructions."""
    growth: LengthSpread = LengthSpread(median=450.0, sigma=1.2)
    """Tokens that a tool's result adds."""
    output: LengthSpread = LengthSpread(median=120.0, sigma=0.8)
    pause_s: LengthSpread = LengthSpread(median=2.5, sigma=1.1)
    """Seconds that a tool takes."""
    token_s: float = 0.03
    """Seconds per answer token assumed between a call and the start of its tool."""
    max_tokens: int = 60_000
    """Tokens at which a session ends."""
    block: int = 64
    """Number of tokens of a named block."""


def calibrated(spec: AgenticSpec, trace: Trace) -> AgenticSpec:
    """Take the distributions of growth and answers from a trace; unchanged where it has too few sessions.

    A request continues the latest one whose blocks, all but the last, begin its own.
    """
    latest: dict[BlockHash, TraceRequest] = {}
    grown: list[float] = []
    outputs: list[float] = []
    for request in trace.requests:
        before = next((latest[name] for name in reversed(request.names) if name in latest), None)
        if before is not None:
            num_new = request.num_prompt_tokens - before.num_prompt_tokens - before.num_output_tokens
            if num_new > 0:
                grown.append(num_new)
                outputs.append(request.num_output_tokens)
        if len(request.names) > 1:
            latest[request.names[-1]] = request
    if len(grown) < 100:
        return spec
    return replace(spec, growth=LengthSpread.from_samples(grown), output=LengthSpread.from_samples(outputs))


def generate_agentic(spec: AgenticSpec, seed: int) -> Trace:
    """Generate the same requests for the same seed, starting when the number of sessions has settled."""
    rng = Random(f"agents {seed}")
    settled_s = spec.calls * (spec.pause_s.median * exp(spec.pause_s.sigma**2 / 2) + spec.output.median * spec.token_s)
    calls_per_s = spec.sessions_per_s * spec.calls
    end_s = settled_s + 1.5 * spec.requests / calls_per_s + 30.0
    requests: list[TraceRequest] = []
    begun_s, number = 0.0, 0
    while begun_s < end_s:
        requests += _session(spec, rng, begun_s, number)
        begun_s += rng.expovariate(spec.sessions_per_s)
        number += 1
    kept = sorted((r for r in requests if settled_s <= r.arrival_s < end_s), key=lambda request: request.arrival_s)
    return Trace(name="agentic", block_tokens=spec.block, requests=tuple(kept[: spec.requests])).stretched(1.0)


def _session(spec: AgenticSpec, rng: Random, begun_s: float, number: int) -> list[TraceRequest]:
    kind = rng.randrange(spec.kinds)
    names: list[BlockHash] = [trace_name(kind << 64 | i) for i in range(spec.instruction_tokens // spec.block)]
    num_tokens, added, arrival_s = spec.instruction_tokens, spec.task, begun_s
    calls: list[TraceRequest] = []
    while True:
        num_prompt = num_tokens + max(1, round(added.draw(rng)))
        num_output = max(1, round(spec.output.draw(rng)))
        num_tokens, added = num_prompt + num_output, spec.growth
        if num_tokens > spec.max_tokens:
            return calls
        names += [trace_name(1 << 96 | number << 32 | i) for i in range(len(names), num_tokens // spec.block)]
        calls.append(
            TraceRequest(
                arrival_s=arrival_s,
                num_prompt_tokens=num_prompt,
                num_output_tokens=num_output,
                names=tuple(names),
                tail=number % 2**31,
            )
        )
        if len(calls) == _MAX_CALLS or rng.random() < 1.0 / spec.calls:
            return calls
        arrival_s += num_output * spec.token_s + spec.pause_s.draw(rng)
