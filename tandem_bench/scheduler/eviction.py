"""Prompt blocks saved by each eviction policy, replaying which requests used which prefixes.

`python -m tandem_bench.scheduler.eviction` replays the public Mooncake traces where they exist (one JSON object per
line, whose `hash_ids` name a prompt's blocks), and always a generated mixture. The engine's own block manager is
replayed, one request after the other; prompts longer than the pool are skipped. The last line of each table is what a
policy that knew the future would find.
"""

import argparse
import heapq
import json
import random
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from engine.kv_cache.block_manager import BlockManager
from engine.kv_cache.eviction import POLICIES, IndexedBlock, eviction_policy
from engine.types.kv_events import KVEventLog
from engine.types.request import Request
from tandem.errors import InvariantError
from tandem.values.block_hash import BlockHasher, root_hash
from tandem.values.ids import BlockHash, RequestId
from tandem.values.sampling import SamplingParams
from tandem_bench.report import Row, figure

TRACES = Path(__file__).resolve().parents[3] / "shared" / "data" / "traces"
"""Folder next to the checkout, if the traces were placed there."""
FILES: Mapping[str, str] = {
    "conversation": "mooncake_conversation_dev_first20min.jsonl",
    "synthetic": "mooncake_synthetic_trace.jsonl",
}
BUILT_IN = "mixture"
BEST = "best possible"
POOLS = (1_000, 3_000, 10_000, 30_000)
_NEVER = 1 << 60
_BLOCK_TOKENS = 16
_SECRET = b"0123456789abcdef"

Trace = Sequence[Sequence[int]]
"""Block ids of each request: equal ids mean equal prefixes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HitRate:
    """Hit rate of one policy."""

    trace: str
    policy: str
    num_blocks: int
    rate: float
    """Share of the requested blocks that were found."""


def read_trace(path: Path) -> list[list[int]]:
    """Read a Mooncake trace's prompts. Raises OSError, ValueError."""
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line)["hash_ids"] for line in lines]


def mixture(*, num_requests: int = 4000, num_documents: int = 300, seed: int = 7) -> list[list[int]]:
    """Generate a mixture in which the most recent and the most frequent prefixes differ.

    Two in five requests are turns of conversations, each repeating everything before it (the last to speak is more
    likely to speak again); two in five are questions about a document, whose popularity is uneven (Zipf) and lasting;
    one in five is a long prompt that is never repeated, and evicts what is merely old. All begin with one of four
    system prompts.
    """
    rng = random.Random(seed)
    fresh = iter(range(1 << 40))

    def some(least: int, most: int) -> list[int]:
        return [next(fresh) for _ in range(rng.randint(least, most))]

    systems = [some(2, 10) for _ in range(4)]
    documents = [rng.choice(systems) + some(20, 60) for _ in range(num_documents)]
    popularity = [1.0 / (k + 1) for k in range(num_documents)]
    talks = [list(rng.choice(systems)) for _ in range(40)]
    trace: list[list[int]] = []
    for _ in range(num_requests):
        kind = rng.random()
        if kind < 0.4:
            index = len(talks) - 1 - min(len(talks) - 1, int(rng.expovariate(1 / 12)))
            talk = talks.pop(index)
            talk += some(1, 8)
            trace.append(list(talk))
            # The next turn of a conversation of four on average, or the first of another.
            talks.append(talk if rng.random() < 0.75 else list(rng.choice(systems)))
        elif kind < 0.8:
            trace.append(rng.choices(documents, popularity)[0] + some(1, 2))
        else:
            trace.append(rng.choice(systems) + some(20, 80))
    return trace


def traces(folder: Path = TRACES) -> Iterator[tuple[str, Trace]]:
    """Yield every trace that exists here, by name."""
    for name, file in FILES.items():
        if (folder / file).is_file():
            yield name, read_trace(folder / file)
    yield BUILT_IN, mixture()


class Clairvoyant:
    """Belady's rule (1966): evict what is needed again last. No policy without knowledge of the future finds more.

    Implements EvictionPolicy. A block is requested whenever one behind it is, so the last one needed is always a leaf.
    """

    def __init__(self, trace: Trace) -> None:
        self._uses: dict[int, deque[int]] = {}
        for number, ids in enumerate(trace):
            for block in ids:
                self._uses.setdefault(block, deque()).append(number)
        self._now = 0
        self._blocks: dict[BlockHash, int] = {}
        self._heap: list[tuple[int, int, BlockHash]] = []
        self._parked: dict[BlockHash, int] = {}

    def name(self, names: Sequence[BlockHash], ids: Sequence[int], number: int) -> None:
        """Record that request `number` of the trace, whose blocks `ids` have these names, has been computed."""
        self._now = number
        self._blocks.update(zip(names, ids, strict=True))

    def park(self, entry: IndexedBlock) -> None:
        uses = self._uses[self._blocks[entry.name]]
        while uses and uses[0] <= self._now:
            uses.popleft()
        again = uses[0] if uses else _NEVER
        self._parked[entry.name] = again
        heapq.heappush(self._heap, (-again, -entry.depth, entry.name))

    def unpark(self, entry: IndexedBlock) -> None:
        del self._parked[entry.name]

    def became_leaf(self, entry: IndexedBlock) -> None:
        """Do nothing, as the entry's place in the order is already right."""

    def next(self) -> BlockHash:
        while True:
            again, _, name = self._heap[0]
            if self._parked.get(name) == -again:
                return name
            heapq.heappop(self._heap)

    def evict(self) -> BlockHash:
        name = self.next()
        heapq.heappop(self._heap)
        del self._parked[name]
        return name

    def clear(self) -> None:
        self._heap.clear()
        self._parked.clear()

    def hottest_first(self) -> Iterable[BlockHash]:
        return sorted(self._parked, key=self._parked.__getitem__)

    def check(self, parked: Mapping[BlockHash, IndexedBlock]) -> None:
        if self._parked.keys() != parked.keys():
            raise InvariantError("the eviction order and the parked entries differ")


def replay(trace: Trace, *, policy: str, num_blocks: int) -> float:
    """Return the share of the trace's blocks that a pool of `num_blocks` finds under one policy."""
    seer = Clairvoyant(trace) if policy == BEST else None
    blocks = BlockManager(
        num_blocks=num_blocks,
        block_size=_BLOCK_TOKENS,
        hasher=BlockHasher(_SECRET),
        events=KVEventLog(1),
        policy=seer or eviction_policy(policy),
    )
    root = root_hash(secret=_SECRET, model_fingerprint="trace")
    requested = found = 0
    for number, ids in enumerate(trace):
        if not ids or len(ids) + 1 > num_blocks:
            continue
        request = _request(number, ids, root)
        match = blocks.match(request)
        requested += len(ids)
        found += match.num_blocks
        blocks.take_prefix(request, match)
        blocks.grow(request, blocks.allocate(match.num_missing))
        request.num_computed_tokens = request.num_tokens
        blocks.release(blocks.index_computed(request, match.num_blocks))
        if seer is not None:
            seer.name(request.block_hashes, ids, number)
        blocks.release(request.block_table.clear())
    return found / requested if requested else 0.0


def _request(number: int, ids: Sequence[int], root: bytes) -> Request:
    """Build a request of sixteen tokens per block that encode its id, and one token to compute."""
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


def compare(trace: Trace, *, name: str, pools: Sequence[int] | None = None) -> list[HitRate]:
    """Replay every policy at every size; POOLS when none are named."""
    return [
        HitRate(trace=name, policy=policy, num_blocks=size, rate=replay(trace, policy=policy, num_blocks=size))
        for policy in (*POLICIES, BEST)
        for size in pools or POOLS
    ]


def print_rates(console: Console, trace: Trace, rates: Sequence[HitRate]) -> None:
    console.print(f"{rates[0].trace}: {len(trace)} requests, {sum(map(len, trace))} blocks", style="bold")
    sizes = list(dict.fromkeys(rate.num_blocks for rate in rates))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("policy")
    for size in sizes:
        table.add_column(f"{size} blocks", justify="right")
    for policy in dict.fromkeys(rate.policy for rate in rates):
        table.add_row(policy, *(f"{rate.rate:.3f}" for rate in rates if rate.policy == policy))
    console.print(table)


def rows(console: Console, folder: Path = TRACES) -> list[Row]:
    """Print every trace's table, and return the same as figures."""
    found: list[Row] = []
    for name, trace in traces(folder):
        rates = compare(trace, name=name)
        print_rates(console, trace, rates)
        for rate in rates:
            label = f"eviction.{rate.trace}.{rate.policy}.{rate.num_blocks}".replace(" ", "_")
            found.append(figure(label, 100 * rate.rate, "% of blocks found"))
    return found


def main() -> None:
    """Print one table per trace."""
    parser = argparse.ArgumentParser(
        prog="python -m tandem_bench.scheduler.eviction", description="Hit rates by eviction policy."
    )
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder with the Mooncake traces")
    options = parser.parse_args()
    rows(Console(highlight=False, width=100), options.traces)


if __name__ == "__main__":
    main()
