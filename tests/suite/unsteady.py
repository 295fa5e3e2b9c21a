"""Tests that fail and then pass: the list of them in `tests/unsteady.yaml`, and whether a run with such tests is red.

An entry without `mended` is a debt. The mend of a test adds there the date and what was wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import yaml

MAX_A_RUN = 3
"""Unsteady tests in one run; with more, something else is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsteady:
    """A test that failed once and passed when it was run again, alone."""

    test: str
    seen: str  # the date, YYYY-MM-DD
    failure: str
    mended: str | None = None  # the date and the cause; None while it is not


def parse(text: str) -> list[Unsteady]:
    """The entries of the list.

    Raises:
        ValueError: an entry lacks a field or has one too many; the message names the entry.
    """
    entries = []
    for i, fields in enumerate(yaml.safe_load(text) or []):
        if not isinstance(fields, dict) or not {"test", "seen", "failure"} <= set(fields) <= set(Unsteady.__slots__):
            raise ValueError(f"entry {i}: expected test, seen, failure and, once it is mended, mended; got {fields!r}")
        entries.append(Unsteady(**{key: None if value is None else str(value) for key, value in fields.items()}))
    return entries


def render(entry: Unsteady) -> str:
    """One entry as it is appended to the list."""
    fields = {"test": entry.test, "seen": entry.seen, "failure": entry.failure, "mended": entry.mended}
    return yaml.safe_dump([fields], sort_keys=False, allow_unicode=True, width=1000)


def too_many(failed: Sequence[str]) -> str | None:
    """Why failures are not worth a second run, or None."""
    if len(failed) > MAX_A_RUN:
        return f"{len(failed)} tests failed; at most {MAX_A_RUN} are run again"
    return None


def verdict(unsteady: Sequence[Unsteady], known: Sequence[Unsteady]) -> list[str]:
    """Why a run whose failures all passed the second time is red all the same; empty where it is not."""
    owed = debts(known)
    return [
        f"{entry.test} is on the list of unsteady tests and was not mended" for entry in unsteady if entry.test in owed
    ]


def debts(known: Sequence[Unsteady]) -> set[str]:
    """The tests on the list that were not mended."""
    return {entry.test for entry in known if entry.mended is None}
