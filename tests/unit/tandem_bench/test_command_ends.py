"""`tandem bench` on interrupts, and without an optional package."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tandem_bench import __main__ as command
from tandem_bench.errors import ExtraMissing
from tandem_bench.transfer import contestants

ROOT = Path(__file__).resolve().parents[3]
WAITING = """
import asyncio, sys
from tandem_bench import __main__ as command

async def wait(*_):
    try:
        print("measuring", flush=True)
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)  # as whoever stops a cluster awaits its end
        print("everything has been stopped", flush=True)

command._SUBJECTS = {"spine": wait}
sys.argv = ["bench", "spine"]
sys.exit(command.main())
"""


def test_bench_sigterm_stops_everything() -> None:
    with subprocess.Popen([sys.executable, "-c", WAITING], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "measuring\n"
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60)
    assert output == "everything has been stopped\n"
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("arguments", "module"),
    [
        (["spine", "--quick"], "transformers"),
        (["telemetry"], "opentelemetry.proto"),
        (["engine", "--plot", "rates.png"], "matplotlib"),
        (["transfer", "--plot", "rates.png"], "matplotlib"),
    ],
)
def test_bench_missing_extra_is_reported_before_measuring(
    arguments: list[str], module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def measure(*_: object) -> None:
        raise AssertionError("nothing can be measured")

    monkeypatch.setattr(command, "_SUBJECTS", {arguments[0]: measure})
    monkeypatch.setattr(sys, "argv", ["tandem bench", *arguments])
    monkeypatch.setitem(sys.modules, module, None)
    assert command.main() == command.EXIT_CANNOT_MEASURE
    errors = capsys.readouterr().err
    assert f"needs {module}, which the extra `bench` installs: pip install '.[bench]'" in errors


def test_bench_contest_in_tls_names_missing_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trustme", None)
    with pytest.raises(ExtraMissing, match=r"trustme, which the extra `bench` installs: pip install '\.\[bench\]'"):
        contestants.tls(tmp_path)
