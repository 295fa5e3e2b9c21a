"""`python -m tests.proofs.explore [nightly] [name ...]`: explore the worlds of `worlds.py` and print what was found."""

import sys

from tests.proofs.explore.explorer import explore
from tests.proofs.explore.worlds import DAILY, NIGHTLY


def main(arguments: list[str]) -> None:
    """Explore the named worlds, or all of them, and print what was found."""
    worlds = NIGHTLY if "nightly" in arguments else DAILY
    names = set(arguments) - {"nightly"}
    if unknown := names - {world.name for world in worlds}:
        raise SystemExit(f"no such world: {', '.join(sorted(unknown))}; there are {', '.join(map(str, worlds))}")
    num_states, seconds = 0, 0.0
    for world in worlds:
        if not names or world.name in names:
            explored = explore(world.scope, *world.meetings)
            num_states, seconds = num_states + explored.num_states, seconds + explored.seconds
            print(f"{world.name}: {explored}", flush=True)
    print(f"{num_states:,} states in {seconds:.1f} s; every property holds in each")


if __name__ == "__main__":
    main(sys.argv[1:])
