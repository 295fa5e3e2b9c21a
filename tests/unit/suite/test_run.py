"""How the suite handles failing tests: unsteady ones are recognised, listed and bounded."""

import os
from pathlib import Path

import pytest

from tests.suite import run, unsteady

FAILS_ONCE = """
from pathlib import Path

def test_fails_once():
    seen = Path(__file__).with_name("seen")
    if not seen.exists():
        seen.touch()
        raise AssertionError("the first time")

def test_passes():
    pass
"""
ONE_RUN = (run.Phase(name="only", args=("-p", "no:cacheprovider")),)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project of its own, whose tests can import the plugin."""
    (tmp_path / "tests").mkdir()
    (tmp_path / run.UNSTEADY_LIST).write_text("# none yet\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.setenv("PYTHONPATH", str(run.ROOT))
    return tmp_path


def listed(root: Path) -> list[unsteady.Unsteady]:
    return unsteady.parse((root / run.UNSTEADY_LIST).read_text())


def test_suite_flaky_test_is_green_and_listed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "test_it.py").write_text(FAILS_ONCE)
    assert run.main([], ONE_RUN, root) == 0
    printed = capsys.readouterr().out
    assert "FLAKY test_it.py::test_fails_once" in printed
    assert "the first time" in printed
    assert "2 passed, 0 failed, 0 skipped" in printed
    assert [(e.test, e.mended) for e in listed(root)] == [("test_it.py::test_fails_once", None)]
    assert "the first time" in listed(root)[0].failure


def test_suite_unmended_flaky_test_is_red(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "test_it.py").write_text(FAILS_ONCE)
    known = unsteady.Unsteady(test="test_it.py::test_fails_once", seen="2026-11-01", failure="x")
    (root / run.UNSTEADY_LIST).write_text(unsteady.render(known))
    assert run.main([], ONE_RUN, root) == 1
    assert "was not mended" in capsys.readouterr().out


def test_suite_flaky_test_since_mended_is_listed_again(root: Path) -> None:
    (root / "test_it.py").write_text(FAILS_ONCE)
    known = unsteady.Unsteady(
        test="test_it.py::test_fails_once", seen="2026-11-01", failure="x", mended="2026-11-02: waited for a time"
    )
    (root / run.UNSTEADY_LIST).write_text(unsteady.render(known))
    assert run.main([], ONE_RUN, root) == 0
    assert [e.mended for e in listed(root)] == ["2026-11-02: waited for a time", None]


def test_suite_test_failing_twice_is_red_and_not_listed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "test_it.py").write_text("def test_never_passes():\n    assert 1 == 2\n")
    assert run.main([], ONE_RUN, root) == 1
    assert "failed twice: call: assert 1 == 2" in capsys.readouterr().out
    assert listed(root) == []


def test_suite_many_failures_are_red_without_rerun(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    many = unsteady.MAX_A_RUN + 1
    (root / "test_it.py").write_text(
        f"import pytest\n@pytest.mark.parametrize('n', range({many}))\ndef test_it(n):\n    assert n > 9\n"
    )
    assert run.main([], ONE_RUN, root) == 1
    printed = capsys.readouterr().out
    assert f"{many} tests failed; at most {unsteady.MAX_A_RUN} are run again" in printed
    assert "twice" not in printed


def test_suite_collection_error_is_red(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "test_it.py").write_text("import no_such_module_anywhere\n")
    assert run.main([], ONE_RUN, root) == 1
    assert "pytest ended with" in capsys.readouterr().out


def test_suite_without_selected_tests_exits_with_5(root: Path) -> None:
    (root / "test_it.py").write_text("def test_it():\n    pass\n")
    assert run.main(["-k", "nothing_like_it"], ONE_RUN, root) == 5


def test_unsteady_list_unknown_field_names_the_entry() -> None:
    with pytest.raises(ValueError, match="entry 0"):
        unsteady.parse("- {test: a, seen: b, failure: c, colour: red}")


def test_unsteady_list_of_repository_is_valid() -> None:
    unsteady.parse((run.ROOT / run.UNSTEADY_LIST).read_text(encoding="utf-8"))


def test_suite_parallel_phase_is_counted_and_printed_last(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (root / "test_it.py").write_text("def test_first():\n    pass\n\n\ndef test_second():\n    assert 1 == 2\n")
    quiet = ("-p", "no:cacheprovider", "-k")
    phases = (
        run.Phase(name="low", args=(*quiet, "second"), parallel=True),
        run.Phase(name="high", args=(*quiet, "first")),
    )
    assert run.main([], phases, root) == 1
    printed = capfd.readouterr().out
    assert "failed twice: call: assert 1 == 2" in printed
    assert "1 passed, 1 failed, 0 skipped" in printed
    assert printed.index("1 passed, 1 deselected") < printed.index("1 failed, 1 deselected")


def test_suite_phase_beside_another_has_the_lowest_priority(root: Path) -> None:
    (root / "test_it.py").write_text(
        "import os\nfrom pathlib import Path\n\n"
        "def test_first():\n    pass\n\n"
        "def test_second():\n"
        "    assert os.nice(0) == 19\n"
        "    assert os.getsid(0) == os.getpid()\n"
        "    group = Path('/proc/self/autogroup')\n"
        "    assert not group.exists() or group.read_text().endswith(' nice 19\\n')\n"
    )
    phases = (
        run.Phase(name="low", args=("-p", "no:cacheprovider", "-k", "second"), parallel=True),
        run.Phase(name="high", args=("-p", "no:cacheprovider", "-k", "first")),
    )
    assert all(result.exit_code == 0 for result in run.run_phases(phases, [], root))


def test_suite_run_that_is_left_early_ends_its_processes(root: Path) -> None:
    """The pipe has its end once nobody holds it: neither pytest nor the process that the test started."""
    os.mkfifo(root / "alive")
    (root / "test_it.py").write_text(
        "import subprocess, sys\nfrom pathlib import Path\n\n"
        "def test_it():\n"
        "    with Path(__file__).with_name('alive').open('w') as held:\n"
        "        code = f'import os, signal; os.write({held.fileno()}, b\"1\"); signal.pause()'\n"
        "        subprocess.run([sys.executable, '-c', code], pass_fds=[held.fileno()])\n"
    )
    phase = run.Phase(name="only", args=("-p", "no:cacheprovider"))
    with run.PytestRun(phase, [], root, quietly=True), (root / "alive").open() as alive:
        assert alive.read(1) == "1"
        reader = os.dup(alive.fileno())
    with open(reader) as rest:
        assert rest.read() == ""
