"""`python -m tests.explore [chunks [faults [attempts]]]`: explore on both kinds of transports and print the counts."""

import sys
import time

from tests.explore.explorer import SHARINGS, explore
from tests.explore.scope import Scope


def main(arguments: list[str]) -> None:
    """Explore and print."""
    given = [int(argument) for argument in arguments]
    num_chunks, max_faults, max_attempts = (*given, *(1, 2, 1)[len(given) :])
    for shared_memory in (True, False):
        scope = Scope(
            num_chunks=num_chunks, max_faults=max_faults, max_attempts=max_attempts, shared_memory=shared_memory
        )
        started = time.perf_counter()
        explored = explore(scope, *(SHARINGS if max_attempts == 1 else ()))
        seconds = time.perf_counter() - started
        print(f"{explored}; {explored.num_states / seconds:,.0f} states/s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
