"""A pytest plugin: writes every test's outcome to the file that `--outcomes` names, one JSON object a line.

`tests.suite.run` reads it, to run what failed once more. With xdist only the controller writes: it sees every
report.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

_MAX_DETAILS = 8_000
"""Characters. A nightly's part may go on for an hour before pytest itself prints what failed."""


class OutcomeLog:
    """Appends one line for each test that has ended, and for each file that could not be collected."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._failed: dict[str, tuple[str, str]] = {}
        self._seconds: dict[str, float] = {}
        self._skipped: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = report.nodeid
        self._seconds[test] = self._seconds.get(test, 0.0) + report.duration
        if report.failed:
            summary, details = _failure(report)
            self._failed.setdefault(test, (f"{report.when}: {summary}", details))
        elif report.skipped:
            self._skipped.add(test)
        if report.when == "teardown" or report.when not in ("setup", "call"):  # xdist says "???" of a crash
            self._write(test)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._line(report.nodeid, "uncollected", 0.0, *_failure(report))

    def _write(self, test: str) -> None:
        failure = self._failed.pop(test, None)
        outcome = "failed" if failure is not None else "skipped" if test in self._skipped else "passed"
        self._line(test, outcome, self._seconds.pop(test, 0.0), *(failure or ()))

    def _line(self, test: str, outcome: str, seconds: float, reason: str = "", details: str = "") -> None:
        line = {"test": test, "outcome": outcome, "reason": reason, "seconds": round(seconds, 3), "details": details}
        self._stream.write(json.dumps(line) + "\n")
        self._stream.flush()


def _failure(report: pytest.TestReport | pytest.CollectReport) -> tuple[str, str]:
    """The line that says what was wrong, of a report of many, and what stands below it."""
    every = report.longreprtext.splitlines()
    lines = [line.removeprefix("E").strip() for line in every if line.startswith("E ")] or every
    return (lines[0].strip()[:300] if lines else "no reason given"), "\n".join(lines)[:_MAX_DETAILS]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, default=None, help="the file to which outcomes are appended")


@pytest.hookimpl(wrapper=True)
def pytest_sessionstart(session: pytest.Session) -> Iterator[None]:
    path = session.config.getoption("--outcomes")
    if path is not None and not hasattr(session.config, "workerinput"):
        stream = path.open("a", encoding="utf-8")
        session.config.add_cleanup(stream.close)
        session.config.pluginmanager.register(OutcomeLog(stream), "outcome-log")
    yield
