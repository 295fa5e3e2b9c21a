"""The report on a prompt's phases; the command takes the phases from real workers."""

import pytest

from tandem_bench.client import Completion
from tandem_bench.transfer.clusters.overlap import Phases, exposed_rows, time_line


def phases(prefill_s: float, exposed_s: float) -> Phases:
    return Phases(prefill_s=prefill_s, exposed_s=exposed_s, first_token_s=prefill_s)


def test_overlap_share_is_exposed_time_over_prefill() -> None:
    meanwhile = [phases(2.0, 0.02), phases(1.0, 0.06), phases(4.0, 0.08)]
    rows = {row.name: row for row in exposed_rows(meanwhile, [phases(2.0, 0.5)], judged=True)}
    share = rows["overlap.meanwhile.share"]
    assert share.value == pytest.approx(2.0)
    assert share.met is True
    assert rows["overlap.after.share"].value == pytest.approx(25.0)
    assert rows["overlap.after.share"].met is None


@pytest.mark.parametrize(("exposed_s", "met"), [(0.05, True), (0.051, False)])
def test_overlap_goal_applies_only_at_full_length(exposed_s: float, met: bool) -> None:
    seen = [phases(1.0, exposed_s)]
    assert [row.met for row in exposed_rows(seen, seen, judged=True) if row.goal] == [met]
    assert [row for row in exposed_rows(seen, seen, judged=False) if row.goal] == []


def test_overlap_time_line_is_to_scale() -> None:
    bar = time_line(phases(0.75, 0.25)).split("|")[1]
    assert bar.count("=") == 3 * bar.count(">") > 0


def test_overlap_phases_come_from_workers() -> None:
    answer = Completion(
        request_id="cmpl-1",
        token_ids=(1,),
        cached_tokens=0,
        first_token_s=1.5,
        gaps_s=(),
        prefill_s=1.25,
        transfer_s=0.125,
    )
    assert Phases.from_answer(answer) == Phases(prefill_s=1.25, exposed_s=0.125, first_token_s=1.5)
