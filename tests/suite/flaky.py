"""`python -m tests.suite.flaky FOLDER … [--times 20] [--load 2]`: runs tests again and again on a busy machine.

Tests that wait for times instead of states fail here. Prints each failure with its count; exits 1 if there was any.
"""

import argparse
import collections
import contextlib
import subprocess
import sys
from collections.abc import Iterator

from tests.suite import rotation
from tests.suite.run import QUICK, ROOT, Phase, PytestRun

_BUSY_LOOP = "while True: pass"


@contextlib.contextmanager
def busy_processors(count: int) -> Iterator[None]:
    """Keep processors busy with processes of our own while the block runs."""
    loops = [subprocess.Popen([sys.executable, "-c", _BUSY_LOOP]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main() -> int:
    """Run the tests; 1 when any failed in any round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tests", nargs="+")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--load", type=int, default=2, help="busy loops beside the tests")
    options = parser.parse_args()
    phase = Phase(name="flaky", args=(), env=((rotation.VARIABLE, "all"),))  # what takes turns would be skipped
    failures: collections.Counter[str] = collections.Counter()
    reasons: dict[str, str] = {}
    broken = 0
    with busy_processors(options.load):
        for _ in range(options.times):
            with PytestRun(phase, ["-m", QUICK, *options.tests], ROOT) as run:
                result = run.result()
            broken += result.is_broken()
            for outcome in result.failed():
                failures[outcome.test] += 1
                reasons[outcome.test] = outcome.reason
    for test, count in failures.most_common():
        print(f"{count} of {options.times} failed: {test}\n  {reasons[test]}")
    print(f"{options.times} rounds beside {options.load} busy loops: {len(failures)} unsteady, {broken} rounds broken")
    return 1 if failures or broken else 0


if __name__ == "__main__":
    sys.exit(main())
