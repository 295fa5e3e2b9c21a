"""Long tests rotate by the day, and each gets its turn."""

import datetime
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.config.cluster import load
from tests.suite import rotation
from tests.suite.run import ROOT

DAY = datetime.date(2026, 11, 23)


def test_rotation_consecutive_days_cover_all_turns() -> None:
    days = [DAY + datetime.timedelta(days=n) for n in range(rotation.TURNS)]
    assert frozenset.union(*(rotation.chosen_turns({}, day) for day in days)) == frozenset(range(rotation.TURNS))
    assert all(len(rotation.chosen_turns({}, day)) == 1 for day in days)


@pytest.mark.parametrize(("value", "turns"), [("1", {1}), ("all", set(range(rotation.TURNS))), ("none", set())])
def test_rotation_environment_chooses_the_turn(value: str, turns: set[int]) -> None:
    assert rotation.chosen_turns({rotation.VARIABLE: value}, DAY) == turns


@pytest.mark.parametrize("value", [str(rotation.TURNS), "-1", "first"])
def test_rotation_unknown_turn_is_refused(value: str) -> None:
    with pytest.raises(pytest.UsageError, match="TEST_TURN must be a turn from 0 to 3, all or none"):
        rotation.chosen_turns({rotation.VARIABLE: value}, DAY)


def test_rotation_variable_is_no_cluster_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(rotation.VARIABLE, raising=False)
    without = load(None)
    monkeypatch.setenv(rotation.VARIABLE, "none")
    assert load(None).model_dump(exclude={"secret"}) == without.model_dump(exclude={"secret"})


@pytest.mark.parametrize(
    ("turn", "chosen", "outcome"),
    [
        ("1", "not slow", "1 passed, 1 deselected"),
        ("0", "not slow", "2 deselected"),
        ("none", "slow", "1 passed, 1 deselected"),
        ("1", "slow", "2 deselected"),
    ],
)
def test_rotation_decides_between_daily_run_and_nightly(
    tmp_path: Path, turn: str, chosen: str, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(rotation.VARIABLE, turn)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nmarkers =\n    slow: long\n    turn: in turns\n    gpu: none here\n"
    )
    (tmp_path / "conftest.py").write_text(
        "import pytest\nfrom tests.suite import rotation\n\n@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_collection_modifyitems(items):\n    rotation.leave_to_nightly(items)\n"
    )
    (tmp_path / "test_it.py").write_text(
        "import pytest\n\n@pytest.mark.turn(1)\ndef test_long():\n    pass\n\n"
        "@pytest.mark.gpu\ndef test_elsewhere():\n    pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", f"{chosen} and not gpu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert outcome in done.stdout, done.stdout


@pytest.mark.parametrize("always", [0, 2])
def test_rotation_all_turns_run_each_case_once(tmp_path: Path, always: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the first ones, where so marked, which every run does, also one without turns."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow: long\n    in_turns: in turns\n")
    (tmp_path / "conftest.py").write_text(
        "import pytest\nfrom tests.suite import rotation\n\n@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_collection_modifyitems(items):\n    rotation.leave_to_nightly(items)\n"
    )
    (tmp_path / "test_it.py").write_text(
        f"import pytest\n\n@pytest.mark.in_turns(always={always})\n"
        "@pytest.mark.parametrize('n', [0, 1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])\n"
        "def test_long(n):\n    pass\n"
    )
    ran: list[str] = []
    for turn in (*map(str, range(rotation.TURNS)), "none"):
        monkeypatch.setenv(rotation.VARIABLE, turn)
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-m", "not slow"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        ran += [line.split()[0] for line in done.stdout.splitlines() if "PASSED" in line]
    times = [rotation.TURNS + 1 if n < always else 1 for n in range(4)]
    assert sorted(ran) == [f"test_it.py::test_long[{n}]" for n in range(4) for _ in range(times[n])]
