"""How many prompt blocks each eviction policy spares, replaying who asked for which prefixes.

`python -m bench.eviction` replays the public Mooncake traces where they are found (one JSON object a line, whose
`hash_ids` name a prompt's blocks), and always a synthetic trace of conversations behind a few system prompts. The
engine's own block manager is replayed, one request after the other; a prompt longer than the pool is left out.
"""

import argparse
import json
import random
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from engine.block_manager import BlockManager
from engine.eviction import POLICIES, eviction_policy
from engine.kv_events import KVEventLog
from engine.request import Request
from tandem.block_hash import BlockHasher, root_hash
from tandem.ids import BlockHash, RequestId
from tandem.sampling import SamplingParams

TRACES = Path("/work/shared/data/traces")
FILES: Mapping[str, str] = {
    "conversation": "mooncake_conversation_dev_first20min.jsonl",
    "synthetic (Mooncake)": "mooncake_synthetic_trace.jsonl",
}
POOLS = (1_000, 3_000, 10_000, 30_000)
_BLOCK_TOKENS = 16
_SECRET = b"0123456789abcdef"

Trace = Sequence[Sequence[int]]
"""Per request, the ids of its blocks: equal ids mean equal prefixes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HitRate:
    """What one policy found again."""

    trace: str
    policy: str
    num_blocks: int
    rate: float
    """Blocks found of blocks asked for."""


def read_trace(path: Path) -> list[list[int]]:
    """A Mooncake trace's prompts. Raises OSError, ValueError."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line)["hash_ids"] for line in lines]


def conversations(
    *, num_requests: int = 3000, num_systems: int = 6, mean_turns: float = 4.0, seed: int = 7
) -> list[list[int]]:
    """Users talk in turns, each turn repeating the conversation so far behind one of a few system prompts.

    Popularity of the system prompts is uneven (Zipf); many conversations run at once, and a fifth of the requests are
    long one-time prompts that nobody repeats.
    """
    rng = random.Random(seed)
    systems = [[-(k + 1) * 1000 - i for i in range(rng.randint(4, 20))] for k in range(num_systems)]
    weights = [1.0 / (k + 1) for k in range(num_systems)]
    fresh = iter(range(1 << 40))
    open_talks: list[list[int]] = []
    trace: list[list[int]] = []
    while len(trace) < num_requests:
        if rng.random() < 0.2:
            trace.append([next(fresh) for _ in range(rng.randint(20, 80))])
            continue
        if not open_talks or rng.random() < 1.0 / mean_turns:
            open_talks.append(list(rng.choices(systems, weights)[0]))
        # Who has just spoken is likelier to speak again soon.
        index = max(0, len(open_talks) - 1 - int(rng.expovariate(1 / 40)))
        talk = open_talks[index]
        talk += [next(fresh) for _ in range(rng.randint(1, 8))]
        trace.append(list(talk))
        if rng.random() < 1.0 / mean_turns:
            del open_talks[index]
    return trace


def traces(folder: Path = TRACES) -> Iterator[tuple[str, Trace]]:
    """Every trace that is here, by name."""
    for name, file in FILES.items():
        if (folder / file).is_file():
            yield name, read_trace(folder / file)
    yield "conversations (built in)", conversations()


def replay(trace: Trace, *, policy: str, num_blocks: int) -> float:
    """Share of the trace's blocks that were found, of a pool of `num_blocks` under one policy."""
    blocks = BlockManager(
        num_blocks=num_blocks,
        block_size=_BLOCK_TOKENS,
        hasher=BlockHasher(_SECRET),
        events=KVEventLog(1),
        policy=eviction_policy(policy),
    )
    root = root_hash(secret=_SECRET, model_fingerprint="trace")
    asked = found = 0
    for number, ids in enumerate(trace):
        if not ids or len(ids) + 1 > num_blocks:
            continue
        request = _request(number, ids, root)
        match = blocks.match(request)
        asked += len(ids)
        found += match.num_blocks
        blocks.take_prefix(request, match)
        blocks.grow(request, blocks.allocate(match.num_missing))
        request.num_computed_tokens = request.num_tokens
        blocks.release(blocks.index_computed(request, match.num_blocks))
        blocks.release(request.block_table.clear())
    return found / asked if asked else 0.0


def _request(number: int, ids: Sequence[int], root: bytes) -> Request:
    """Sixteen tokens per block that say its id, and one token to compute."""
    tokens = array("i")
    for block in ids:
        tokens.extend(((block >> 24) & 0xFFFFFF, block & 0xFFFFFF))
        tokens.extend([0] * (_BLOCK_TOKENS - 2))
    tokens.append(1)
    return Request(
        request_id=RequestId(f"{number}"),
        token_ids=tokens,
        num_prompt_tokens=len(tokens),
        params=SamplingParams(),
        hash_root=BlockHash(root),
    )


def compare(trace: Trace, *, name: str, pools: Sequence[int] = POOLS) -> list[HitRate]:
    """Every policy at every size."""
    return [
        HitRate(trace=name, policy=policy, num_blocks=size, rate=replay(trace, policy=policy, num_blocks=size))
        for policy in POLICIES
        for size in pools
    ]


def main() -> None:
    """Print one table per trace."""
    parser = argparse.ArgumentParser(prog="python -m bench.eviction", description="Hit rates by eviction policy.")
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder with the Mooncake traces")
    options = parser.parse_args()
    console = Console(highlight=False, width=100)
    for name, trace in traces(options.traces):
        console.print(f"{name}: {len(trace)} requests, {sum(map(len, trace))} blocks", style="bold")
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("policy")
        for size in POOLS:
            table.add_column(f"{size} blocks", justify="right")
        rates = compare(trace, name=name)
        for policy in POLICIES:
            table.add_row(policy, *(f"{rate.rate:.3f}" for rate in rates if rate.policy == policy))
        console.print(table)


if __name__ == "__main__":
    main()
