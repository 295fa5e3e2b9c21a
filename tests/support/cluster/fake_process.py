"""A child that speaks the ready protocol: run as `python fake_process.py NAME READY_FD JOURNAL MODE CONFIG`.

A router tells that it reaches every worker that the configuration names, also when that is read again. Each writes
`NAME started PID`, `NAME term` … to the journal. Modes: ok; fail (exits 3 with a message before it is ready); stubborn
(ignores SIGTERM); slow (never ready); held (ready when somebody writes into the FIFO of its name beside the journal);
garbage (a bad ready line); once (fails on every start but the first); later (fails on its second start alone); gpu
(computes on a GPU and keeps 100 bytes there); http:ADDRESS (a router that says it serves there).
"""

import contextlib
import json
import os
import re
import signal
import sys
from pathlib import Path

name, ready_fd, journal, mode, config = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], Path(sys.argv[5])
is_router = name.startswith("router")


def record(text: str) -> None:
    """Append one line; short appends are atomic."""
    with journal.open("a") as file:
        file.write(f"{name} {text}\n")


def terminate(*_: object) -> None:
    """End as a drained process does."""
    record("term")
    if mode != "stubborn":
        sys.exit(0)


def stated() -> list[str]:
    """The workers that the configuration names."""
    return re.findall(r"^ *- (\S+:\d+)$", config.read_text(), re.MULTILINE)


def publish(reached: list[str]) -> None:
    """As a real router does."""
    os.write(ready_fd, b"\n" + json.dumps({"reaches": reached}).encode() + b"\n")


def read_again(*_: object) -> None:
    """Tell that it was asked to."""
    record("hup")
    if is_router:
        with contextlib.suppress(OSError):  # a real one keeps the workers that it knows
            publish(stated())
    level = re.findall(r"^log_level: (\w+)$", config.read_text(), re.MULTILINE) if config.exists() else []
    os.write(1, f"{name} reads again: {level}\n".encode())


signal.signal(signal.SIGTERM, terminate)
signal.signal(signal.SIGHUP, read_again)
starts = journal.read_text().count(f"{name} started") if journal.exists() else 0
record(f"started {os.getpid()}")
sys.stdout.write(f"{name} says hello\n")
sys.stdout.flush()
if mode == "fail" or (mode == "once" and starts) or (mode == "later" and starts == 1):
    sys.stderr.write("error: the model directory is empty\n")
    sys.exit(3)
if mode == "held":
    journal.with_name(name).read_bytes()
reached = stated() if is_router else []  # before it says that it serves: then the file may go
if mode == "garbage":
    os.write(ready_fd, b"not json\n")
elif mode != "slow":
    ready = {"worker_id": f"w-{name}", "num_blocks": 8, "block_size": 16, "model": "fake", "max_model_len": 128}
    if mode == "gpu":
        ready |= {"num_gpus": 1, "weights_bytes": 60, "kv_bytes": 40}
    if is_router:
        ready = {"http": mode} if mode.startswith("http:") else {}
    os.write(ready_fd, json.dumps(ready).encode() + b"\n")
if is_router and mode not in ("slow", "garbage"):
    publish(reached)
else:
    os.close(ready_fd)
while True:
    signal.pause()
