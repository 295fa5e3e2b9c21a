"""`python -m tests.suite.run [PYTEST_ARGS]`: the whole test suite, as `make test` runs it.

Tests of one process share the processors, two at a time: with three, those whose limits are tenths of a second get
unsteady. Then those that start clusters run one after the other, and beside them, at the lowest priority, those that
only compute: clusters mostly wait. What failed, if it is little, is run once more by itself: what passes then is
printed as FLAKY with both outcomes and appended to `tests/unsteady.yaml`, to be committed with the cause once it is
mended.
"""

import collections
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests.suite import unsteady
from tests.suite.unsteady import Unsteady

ROOT = Path(__file__).parents[2]
UNSTEADY_LIST = "tests/unsteady.yaml"
QUICK = "not slow and not gpu"
SLOWEST_FILES = 15
_TESTS_FAILED, _NO_TESTS = 1, 5  # pytest's exit codes

_LOWEST_PRIORITY = ("sh", "-c", '{ echo 19 > /proc/self/autogroup; } 2>/dev/null; exec nice -n 19 "$@"', "sh")
"""In front of a command that has a session of its own. Where Linux divides the processors between sessions first
(autogroups), niceness counts within each alone, and every process of a cluster has a session to itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One run of pytest over a part of the suite."""

    name: str
    args: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()
    parallel: bool = False
    """Runs beside the next phase that does not, at the lowest priority; its output is printed after that one's."""


PHASES = (
    Phase(
        name="shared",
        args=("-n", "2", "--dist", "worksteal", "-m", f"{QUICK} and not alone and not compute"),
        env=(("OMP_NUM_THREADS", "1"),),
    ),
    Phase(
        name="compute",
        args=("-n", "2", "--dist", "worksteal", "-m", f"{QUICK} and compute and not alone"),
        env=(("OMP_NUM_THREADS", "1"),),
        parallel=True,
    ),
    Phase(name="alone", args=("-m", f"{QUICK} and alone")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one test came to in one run."""

    test: str
    outcome: str  # passed, skipped, failed, uncollected
    reason: str
    seconds: float
    details: str = ""
    """What the assertion showed, of a test that failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseResult:
    """What one run of pytest came to."""

    phase: Phase
    exit_code: int
    outcomes: Sequence[Outcome]

    def failed(self) -> list[Outcome]:
        """Tests that failed, in the order in which they ran."""
        return [o for o in self.outcomes if o.outcome == "failed"]

    def is_broken(self) -> bool:
        """Whether it failed otherwise than by tests: nothing that a second run could settle."""
        if any(o.outcome == "uncollected" for o in self.outcomes):
            return True
        return self.exit_code not in (0, _TESTS_FAILED, _NO_TESTS) or (self.exit_code == _TESTS_FAILED) != bool(
            self.failed()
        )


class PytestRun:
    """A run of pytest as a process of its own. As a context manager it ends with its block at the latest."""

    def __init__(self, phase: Phase, args: Sequence[str], root: Path, *, quietly: bool = False) -> None:
        """`quietly`: at the lowest priority, its output kept for `print_output`."""
        self._phase = phase
        self._quietly = quietly
        self._folder = tempfile.TemporaryDirectory()
        self._outcomes = Path(self._folder.name) / "outcomes.jsonl"
        self._outcomes.touch()
        self._output = Path(self._folder.name) / "output.txt"
        plugin = ("-p", "tests.suite.outcomes", f"--outcomes={self._outcomes}")
        command = [*(_LOWEST_PRIORITY if quietly else ()), sys.executable, "-m", "pytest", "-q", *plugin, *args]
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                cwd=root,
                env={**os.environ, **dict(phase.env)},
                stdout=output if quietly else None,
                stderr=subprocess.STDOUT if quietly else None,
                start_new_session=quietly,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._process.poll() is None:
            if self._quietly:
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def result(self) -> PhaseResult:
        """Wait for its end."""
        exit_code = self._process.wait()
        lines = self._outcomes.read_text(encoding="utf-8").splitlines()
        outcomes = [Outcome(**json.loads(line)) for line in lines]
        return PhaseResult(phase=self._phase, exit_code=exit_code, outcomes=outcomes)

    def print_output(self) -> None:
        """Print what it wrote, if it ran quietly."""
        print(self._output.read_text(encoding="utf-8", errors="replace"), end="", flush=True)


def run_phases(phases: Sequence[Phase], args: Sequence[str], root: Path) -> list[PhaseResult]:
    """Run all phases, in their order but for those that run beside the next one."""
    results: list[PhaseResult] = []
    with contextlib.ExitStack() as running:
        parallel: list[PytestRun] = []
        for phase in phases:
            run = running.enter_context(PytestRun(phase, [*phase.args, *args], root, quietly=phase.parallel))
            if phase.parallel:
                parallel.append(run)
                continue
            results.append(run.result())
            for quiet in parallel:
                results.append(quiet.result())
                quiet.print_output()
            parallel.clear()
    return results


def run_again(result: PhaseResult, root: Path) -> tuple[list[Unsteady], list[str]]:
    """Run a phase's failures once more, alone: those that passed now, and what is red for good."""
    failed = result.failed()
    if not failed:
        return [], []
    with PytestRun(result.phase, [o.test for o in failed], root) as run:
        again = run.result()
    passed = {o.test for o in again.outcomes if o.outcome == "passed"}
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    flaky = [Unsteady(test=o.test, seen=today, failure=o.reason) for o in failed if o.test in passed]
    return flaky, [f"{o.test} failed twice: {o.reason}" for o in failed if o.test not in passed]


def settle(results: Sequence[PhaseResult], root: Path) -> list[str]:
    """Why the suite is red; empty when it is green. Prints and lists what was unsteady."""
    broken = [f"pytest ended with {r.exit_code} in the {r.phase.name} part" for r in results if r.is_broken()]
    if broken:
        return broken
    failed = [o.test for r in results for o in r.failed()]
    if (reason := unsteady.too_many(failed)) is not None:
        return [reason, *failed]
    flaky: list[Unsteady] = []
    red: list[str] = []
    for result in results:
        passed_now, failed_twice = run_again(result, root)
        flaky += passed_now
        red += failed_twice
    for entry in flaky:
        print(f"FLAKY {entry.test}\n  first run:  failed, {entry.failure}\n  second run: passed, alone")
    listing = root / UNSTEADY_LIST
    red += unsteady.verdict(flaky, unsteady.parse(listing.read_text(encoding="utf-8")))
    with listing.open("a", encoding="utf-8") as listed:
        listed.writelines(map(unsteady.render, flaky))
    return red


def print_slowest(results: Iterable[PhaseResult]) -> None:
    """Print the files that took longest in each part: where to look when the suite outgrows its time."""
    for result in results:
        seconds: collections.Counter[str] = collections.Counter()
        for outcome in result.outcomes:
            seconds[outcome.test.partition("::")[0]] += outcome.seconds
        print(f"Slowest files of the {result.phase.name} part, of {sum(seconds.values()):.0f} s in all:")
        for file, taken in seconds.most_common(SLOWEST_FILES):
            print(f"  {taken:7.1f} s  {file}")


def main(args: Sequence[str], phases: Sequence[Phase] = PHASES, root: Path = ROOT) -> int:
    """Run the suite with further arguments for pytest; 0 when it is green, 5 when they chose no test."""
    results = run_phases(phases, args, root)
    if all(r.exit_code == _NO_TESTS for r in results):
        return _NO_TESTS
    outcomes = [o for r in results for o in r.outcomes]
    print_slowest(results)
    red = settle(results, root)
    count = collections.Counter(o.outcome for o in outcomes)
    for line in red:
        print(f"RED   {line}")
    failed = len(red)
    print(f"{sum(count.values()) - failed - count['skipped']} passed, {failed} failed, {count['skipped']} skipped")
    return 1 if red else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
