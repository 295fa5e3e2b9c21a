"""`tandem bench` told to stop by whoever runs it."""

import signal
import subprocess
import sys
from pathlib import Path

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


def test_sigterm_leaves_nothing_running() -> None:
    with subprocess.Popen([sys.executable, "-c", WAITING], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "measuring\n"
        process.send_signal(signal.SIGTERM)
        told, _ = process.communicate(timeout=60)
    assert told == "everything has been stopped\n"
    assert process.returncode == 130
