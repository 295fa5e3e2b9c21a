"""The report on second turns; the command takes the turns from real workers."""

import pytest

from tandem_bench.errors import CannotMeasure
from tandem_bench.transfer.clusters.pull import Turn, pull_rows


def turn(turn_tokens: int, *, pulled_tokens: int, pulled_s: float, computed_s: float) -> Turn:
    return Turn(
        turn_tokens=turn_tokens,
        num_tokens=turn_tokens + 129,
        pulled_tokens=pulled_tokens,
        pulled_s=pulled_s,
        computed_s=computed_s,
    )


def test_pull_medians_are_compared_per_length() -> None:
    turns = [
        turn(512, pulled_tokens=576, pulled_s=0.1, computed_s=0.5),
        turn(1024, pulled_tokens=1088, pulled_s=0.2, computed_s=1.0),
        turn(512, pulled_tokens=576, pulled_s=0.3, computed_s=0.4),
        turn(512, pulled_tokens=560, pulled_s=0.2, computed_s=0.8),
    ]
    rows = {row.name: row.value for row in pull_rows("tcp", turns)}
    assert rows["pull.tcp.512.tokens"] == 576
    assert rows["pull.tcp.512.gain"] == pytest.approx(0.5 / 0.2)
    assert rows["pull.tcp.1024.ttft"] == pytest.approx(200)
    assert rows["pull.tcp.1024.computed"] == pytest.approx(1000)


def test_pull_without_fetched_tokens_is_refused() -> None:
    with pytest.raises(CannotMeasure, match="computed, not fetched"):
        pull_rows("shm", [turn(512, pulled_tokens=0, pulled_s=0.5, computed_s=0.5)])
