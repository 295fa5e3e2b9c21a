"""Long tests take turns: what is marked `turn(n)` runs in one of `TURNS` runs of `make test`, and in every nightly.

A test with parameters that is marked `in_turns` has its cases dealt out among the turns, in their order;
`in_turns(always=n)`: but for the first n of them, which run every time.

The turn changes with the day, so that a run can be repeated; `TEST_TURN=n` chooses one, `TEST_TURN=all` runs all,
`TEST_TURN=none` leaves all of them to the nightly, which sets it. (Every cluster that a test starts reads
variables that begin with `TANDEM_` as settings: this one must not.)
"""

import collections
import datetime
import os
import zlib
from collections.abc import Iterable, Mapping

import pytest

TURNS = 4
VARIABLE = "TEST_TURN"


def chosen_turns(environ: Mapping[str, str], today: datetime.date) -> frozenset[int]:
    """The turns that run now.

    Raises:
        pytest.UsageError: TEST_TURN is neither a turn nor `all` nor `none`.
    """
    value = environ.get(VARIABLE, "")
    if value == "all":
        return frozenset(range(TURNS))
    if value == "none":
        return frozenset()
    if not value:
        return frozenset({today.toordinal() % TURNS})
    if not value.isdecimal() or int(value) >= TURNS:
        raise pytest.UsageError(f"{VARIABLE} must be a turn from 0 to {TURNS - 1}, all or none, got {value!r}")
    return frozenset({int(value)})


def leave_to_nightly(items: Iterable[pytest.Item]) -> None:
    """Mark as slow whatever has another turn than today's.

    Raises:
        pytest.UsageError: a test names a turn that there is not, or TEST_TURN does.
    """
    chosen = chosen_turns(os.environ, datetime.datetime.now(tz=datetime.UTC).date())
    num_cases: collections.Counter[str] = collections.Counter()
    for item in items:
        turn = _turn_of(item, num_cases)
        if turn is not None and turn not in chosen:
            item.add_marker(pytest.mark.slow)


def _turn_of(item: pytest.Item, num_cases: collections.Counter[str]) -> int | None:
    if (mark := item.get_closest_marker("turn")) is not None:
        if len(mark.args) != 1 or mark.args[0] not in range(TURNS):
            raise pytest.UsageError(f"{item.nodeid}: turn must be one of 0 to {TURNS - 1}, got {mark.args}")
        return int(mark.args[0])
    if (mark := item.get_closest_marker("in_turns")) is None or item.get_closest_marker("slow") is not None:
        return None
    function = item.nodeid.partition("[")[0]
    number = num_cases[function]
    num_cases[function] += 1
    return None if number < mark.kwargs.get("always", 0) else (zlib.crc32(function.encode()) + number) % TURNS
