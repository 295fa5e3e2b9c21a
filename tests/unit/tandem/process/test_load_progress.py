"""Progress of loading weights: publishing, logging, and delivery to another process."""

import json
import os

import pytest

from tandem.model_path import model_directory
from tandem.process.lifetime import LOADING, load_progress
from tandem.process.load_progress import LoadProgress, LoadReport
from tests.support.engine.paged_harness import load_plain


class World:
    """A load on a virtual clock."""

    def __init__(self) -> None:
        self.now_s = 50.0
        self.reports: list[LoadReport] = []
        self.logged: list[LoadReport] = []
        self.progress = LoadProgress(clock=lambda: self.now_s, publish=self.reports.append, log=self.logged.append)

    def at(self, seconds: float, done: int) -> None:
        self.now_s = 50.0 + seconds
        self.progress(done, 100)


def test_load_progress_is_published_periodically_and_at_end() -> None:
    world = World()
    for step in range(1, 101):
        world.at(step * 0.01, step)
    assert [round(report.share, 2) for report in world.reports] == [0.01, 0.26, 0.51, 0.76, 1.0]
    assert world.logged == []


def test_load_progress_estimates_time_left() -> None:
    world = World()
    world.at(1.0, 1)
    world.at(2.0, 20)
    world.at(9.0, 90)
    assert [report.left_s for report in world.reports] == [None, pytest.approx(8.0), pytest.approx(1.0)]
    assert str(world.reports[1]) == "loading weights: 20%, 8 s left"
    assert str(LoadReport(share=0.1, left_s=600.0)) == "loading weights: 10%, 10 min left"
    assert str(LoadReport(share=1.0, left_s=0.0)) == "loading weights: 100%"


def test_load_progress_long_load_is_logged_every_ten_seconds() -> None:
    world = World()
    for second in range(1, 36):
        world.at(second, second)
    assert [round(report.share, 2) for report in world.logged] == [0.1, 0.2, 0.3]


def test_load_report_round_trips_and_invalid_value_is_refused() -> None:
    report = LoadReport(share=0.25, left_s=3.5)
    assert LoadReport.read(json.loads(json.dumps(report.as_json()))) == report
    for reports in ({}, {"share": 1.5, "left_s": 1}, {"share": "x", "left_s": 1}, [], 3):
        with pytest.raises((LookupError, TypeError, ValueError)):
            LoadReport.read(reports)


def test_load_progress_builtin_model_reaches_all_values() -> None:
    seen: list[tuple[int, int]] = []
    model = load_plain(model_directory("builtin"), progress=lambda done, total: seen.append((done, total)))
    assert model.weights_bytes > 0
    dones, totals = zip(*seen, strict=True)
    assert sorted(dones) == list(dones)
    assert set(totals) == {dones[-1]}


def test_load_progress_full_pipe_does_not_block() -> None:
    reader, writer = os.pipe()
    progress = load_progress(writer)
    progress(5, 10)
    assert json.loads(os.read(reader, 4096))[LOADING]["share"] == 0.5
    for _ in range(5000):
        progress(10, 10)
    assert os.get_blocking(writer)
    os.close(reader)
    progress(10, 10)
    os.close(writer)
    load_progress(None)(10, 10)
