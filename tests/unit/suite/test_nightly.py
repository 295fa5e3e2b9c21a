"""The nightly's parts: every test is in one, failures and timeouts are red, and results are kept."""

from pathlib import Path

import pytest

from tests.suite import nightly
from tests.suite.run import ROOT
from tests.suite.unsteady import Unsteady, render

TESTS = ROOT / "tests"


def parts_of(path: Path) -> list[str]:
    return [
        part for part, folders in nightly.PARTS.items() if any(path.is_relative_to(ROOT / folder) for folder in folders)
    ]


def test_nightly_parts_cover_every_test_file_once() -> None:
    files = [path for path in TESTS.rglob("test_*.py") if not path.is_relative_to(TESTS / "gpu")]
    assert len(files) > 400
    assert {str(path): parts for path in files if len(parts := parts_of(path)) != 1} == {}


def test_nightly_parts_name_existing_folders() -> None:
    assert [folder for part in nightly.PARTS.values() for folder in part if not (ROOT / folder).exists()] == []


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow: long\n    gpu: none here\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/unsteady.yaml").touch()
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(nightly, "PARTS", {"one": ("test_one.py",), "two": ("test_two.py",)})
    return tmp_path


def write(path: Path, body: str) -> None:
    path.write_text(f"import threading\nimport pytest\n\n@pytest.mark.slow\ndef test_it():\n    {body}\n")


def test_nightly_passing_part_is_green_and_keeps_log(root: Path) -> None:
    write(root / "test_one.py", "pass")
    result = nightly.run_part("one", root, root=root)
    assert result.is_green()
    assert "1 passed" in (root / "one.log").read_text()
    lines, green = nightly.summary(root)
    assert "green" in lines[0]
    assert lines[1].split() == ["two", "not", "run"]
    assert not green


def test_nightly_part_with_all_tests_skipped_is_not_green(root: Path) -> None:
    write(root / "test_one.py", "pytest.skip('no engine here')")
    result = nightly.run_part("one", root, root=root)
    assert not result.is_green()
    assert "all skipped" in nightly.summary(root)[0][0]


def test_nightly_failing_part_is_red(root: Path) -> None:
    write(root / "test_one.py", "pass")
    write(root / "test_two.py", "raise AssertionError")
    assert nightly.run_part("one", root, root=root).is_green()
    result = nightly.run_part("two", root, root=root)
    assert not result.is_green()
    assert not result.flaky
    assert not nightly.summary(root)[1]


STEADY_THE_SECOND_TIME = """import pathlib
    seen = pathlib.Path(__file__).with_suffix(".seen")
    was_seen, _ = seen.exists(), seen.touch()
    assert was_seen"""


def test_nightly_part_with_flaky_test_is_green_and_names_it(root: Path) -> None:
    write(root / "test_one.py", STEADY_THE_SECOND_TIME)
    result = nightly.run_part("one", root, root=root)
    assert result.is_green()
    assert result.flaky == ["test_one.py::test_it"]
    assert "FLAKY test_one.py::test_it" in nightly.summary(root)[0][0]
    assert "1 failed" in (root / "one.log").read_text()


def test_nightly_part_with_unmended_flaky_test_is_red(root: Path) -> None:
    write(root / "test_one.py", STEADY_THE_SECOND_TIME)
    entry = Unsteady(test="test_one.py::test_it", seen="2026-11-24", failure="then as well")
    (root / "tests/unsteady.yaml").write_text(render(entry))
    assert not nightly.run_part("one", root, root=root).is_green()


def test_nightly_part_beyond_its_limit_is_red(root: Path) -> None:
    write(root / "test_one.py", "threading.Event().wait()  # for ever: it is the limit that ends it")
    result = nightly.run_part("one", root, limit_s=3, root=root)
    assert result.exit_code is None
    assert "out of time" in result.render()


def test_nightly_part_that_had_no_time_to_start_is_red(root: Path) -> None:
    write(root / "test_one.py", "pass")
    result = nightly.run_part("one", root, limit_s=0.05, root=root)
    assert (result.exit_code, result.num_passed) == (None, 0)


def test_nightly_unknown_part_is_refused_with_the_choices(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        nightly.main(["everything"])
    assert "unknown part 'everything': there are engine, " in capsys.readouterr().err
