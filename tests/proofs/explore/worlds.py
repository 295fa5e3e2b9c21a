"""What is explored: every day in CI, within two faults and three chunks, and larger every night."""

from dataclasses import dataclass

from tests.proofs.explore.explorer import MEETINGS
from tests.proofs.explore.model.scope import Scope
from tests.proofs.explore.pairs import Meeting

SAME, OTHER_PREFILL, OTHER_DECODE, APART = MEETINGS
TCP = False


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A scope that is explored in full, and how its requests are placed."""

    name: str
    scope: Scope
    meetings: tuple[Meeting, ...] = ()
    """How two requests are placed; none: one request alone."""
    at_least: int
    """States that it must come to, lest it explore nothing unnoticed."""

    def __str__(self) -> str:
        return self.name


DAILY = (
    World(
        name="two-requests-two-faults",
        scope=Scope(num_layers=1, shared_memory=TCP),
        meetings=(SAME,),
        at_least=20_000_000,
    ),
    World(
        name="two-requests-by-layers",
        scope=Scope(max_faults=1, shared_memory=TCP),
        meetings=(OTHER_PREFILL,),
        at_least=1_000_000,
    ),
    World(
        name="two-requests-shm",
        scope=Scope(num_layers=1, max_faults=1),
        meetings=(SAME,),
        at_least=1_000_000,
    ),
    World(
        name="two-requests-on-two-decode-workers",
        scope=Scope(num_layers=1, max_faults=1, shared_memory=TCP),
        meetings=(OTHER_DECODE, APART),
        at_least=1_000_000,
    ),
    World(
        name="two-requests-beside-each-other",
        scope=Scope(num_layers=1, max_faults=1, shared_memory=TCP, spare_blocks=1),
        meetings=(SAME,),
        at_least=1_000_000,
    ),
    World(
        name="three-chunks",
        scope=Scope(steps=(1, 2), chunk_cells=2, max_faults=1, shared_memory=TCP),
        at_least=30_000,
    ),
    World(
        name="two-lanes",
        scope=Scope(num_layers=1, num_heads=2, max_faults=1, shared_memory=TCP),
        at_least=30_000,
    ),
    World(
        name="two-lanes-two-blocks",
        scope=Scope(steps=(2,), num_layers=1, num_heads=2, chunk_cells=2, max_faults=1, shared_memory=TCP),
        at_least=30_000,
    ),
    World(
        name="two-lanes-shm",
        scope=Scope(num_layers=1, num_heads=2, max_faults=1),
        at_least=60_000,
    ),
    World(
        name="two-lanes-forged-messages",
        scope=Scope(num_layers=1, num_heads=2, max_faults=1, bent=True, shared_memory=TCP, only=frozenset({"bend"})),
        at_least=20_000,
    ),
    World(
        name="windowed-layers",
        scope=Scope(steps=(2,), chunk_cells=2, windowed_layers=(0,), max_faults=1),
        at_least=60_000,
    ),
    World(
        name="windowed-layers-by-layers",
        scope=Scope(steps=(2,), num_layers=3, chunk_cells=2, windowed_layers=(0,), max_faults=0, shared_memory=TCP),
        at_least=1_000,
    ),
    World(
        name="windowed-layers-forged-messages",
        scope=Scope(steps=(2,), chunk_cells=2, windowed_layers=(0,), max_faults=1, bent=True, shared_memory=TCP),
        at_least=60_000,
    ),
    World(
        name="reroutes",
        scope=Scope(num_layers=1, max_faults=1, max_attempts=2, spare_blocks=1, shared_memory=TCP),
        at_least=30_000,
    ),
    World(
        name="late-proofs",
        scope=Scope(num_layers=1, max_faults=2, remote=True, only=frozenset({"cut", "crash", "hang", "cancel"})),
        at_least=2_000,
    ),
    World(
        name="forged-messages",
        scope=Scope(max_faults=1, bent=True, shared_memory=TCP),
        at_least=10_000,
    ),
    World(
        name="larger-blocks-here",
        scope=Scope(steps=(1, 1, 1), num_layers=1, units_per_block=2, max_faults=1, shared_memory=TCP),
        at_least=10_000,
    ),
    World(
        name="larger-blocks-there",
        scope=Scope(steps=(2,), chunk_cells=2, units_per_source=2, max_faults=1, shared_memory=TCP),
        at_least=10_000,
    ),
    World(
        name="fetched-prefixes",
        scope=Scope(steps=(1, 1), num_layers=1, fetch=True, shared_memory=TCP),
        at_least=5_000,
    ),
    World(
        name="preempted-prompts",
        scope=Scope(steps=(1, 2), chunk_cells=2, preempts=True, shared_memory=TCP, only=frozenset({"preempt", "cut"})),
        at_least=1_000,
    ),
)

NIGHTLY = (
    World(
        name="two-requests-two-faults-shm",
        scope=Scope(num_layers=1),
        meetings=(SAME,),
        at_least=60_000_000,
    ),
    World(
        name="two-requests-by-layers-shm",
        scope=Scope(max_faults=1),
        meetings=(OTHER_DECODE,),
        at_least=20_000_000,
    ),
    World(
        name="two-requests-by-layers-tcp",
        scope=Scope(max_faults=1, shared_memory=TCP),
        meetings=MEETINGS,
        at_least=40_000_000,
    ),
    World(
        name="two-requests-that-reroute",
        scope=Scope(num_layers=1, max_faults=1, max_attempts=2, shared_memory=TCP),
        meetings=(APART,),
        at_least=200_000_000,
    ),
    World(
        name="three-chunks-two-faults",
        scope=Scope(steps=(1, 2), chunk_cells=2, shared_memory=TCP),
        at_least=800_000,
    ),
    World(
        name="three-chunks-shm",
        scope=Scope(steps=(1, 2), chunk_cells=2, max_faults=1),
        at_least=350_000,
    ),
    World(
        name="two-chunks-two-faults-shm",
        scope=Scope(),
        at_least=100_000,
    ),
    World(
        name="two-lanes-block-by-block",
        scope=Scope(
            steps=(1, 1),
            num_layers=1,
            num_heads=2,
            max_faults=1,
            shared_memory=TCP,
            only=frozenset({"cut", "crash", "damage"}),
        ),
        at_least=2_000_000,
    ),
    World(
        name="windowed-layers-by-layers-tcp",
        scope=Scope(steps=(2,), num_layers=3, chunk_cells=2, windowed_layers=(0,), max_faults=1, shared_memory=TCP),
        at_least=500_000,
    ),
    World(
        name="windowed-layers-block-by-block",
        scope=Scope(steps=(1, 1), windowed_layers=(0,), max_faults=1, shared_memory=TCP),
        at_least=250_000,
    ),
    World(
        name="windowed-layers-that-reroute",
        scope=Scope(
            steps=(2,),
            chunk_cells=2,
            windowed_layers=(0,),
            max_faults=1,
            max_attempts=2,
            spare_blocks=1,
            shared_memory=TCP,
            only=frozenset({"cut"}),
        ),
        at_least=1_000_000,
    ),
    World(
        name="three-faults",
        scope=Scope(num_layers=1, max_faults=3, shared_memory=TCP),
        at_least=70_000,
    ),
    World(
        name="reroutes-shm",
        scope=Scope(num_layers=1, max_faults=1, max_attempts=2, spare_blocks=1),
        at_least=200_000,
    ),
    World(
        name="reroutes-that-go-on",
        scope=Scope(
            steps=(1, 1),
            num_layers=1,
            max_faults=1,
            max_attempts=2,
            spare_blocks=2,
            shared_memory=TCP,
            only=frozenset({"cut", "crash", "damage"}),
        ),
        at_least=500_000,
    ),
)
