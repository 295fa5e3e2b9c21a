"""One process per part: an invalid memory access ruins its own CUDA context, and a deadlock its own process only.

Processes are forked from a server that has imported torch and has never used a device, so that each starts within
moments and with a context of its own. They send results as lines of JSON through a pipe, at once, so that results
before a crash or a timeout are kept.
"""

import importlib
import json
import multiprocessing
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from tandem_bench.errors import CannotMeasure, ClusterFailed, RequestFailed
from tandem_bench.gpu.parts import Part
from tandem_bench.gpu.stage import Note, Stage
from tandem_bench.report import Row

_GRACE_S = 2.0
"""Time for a process to end after its last message."""
_END_S = 5.0
"""Time for a killed process to be gone. One that the driver blocks cannot be killed; the others continue without it."""
_LAST_LINES = 30


class Status(Enum):
    """Outcome of a part."""

    OK = "ok"
    LEFT_OUT = "left out"
    """A requirement is missing or not built; reported by the part itself."""
    NO_TIME = "no time"
    """The part was never started."""
    STOPPED = "stopped"
    """The part's time was used up."""
    FAILED = "failed"


@dataclass(slots=True, kw_only=True)
class Result:
    """Results of one part."""

    part: str
    status: Status
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    error: str | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the part has produced all results that are possible here."""
        return self.status in (Status.OK, Status.LEFT_OUT)


class Workshop:
    """Starts the processes of the parts."""

    def __init__(self, preload: tuple[str, ...]) -> None:
        """`preload`: modules that the server imports once for all; none may use a device when imported."""
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(preload))

    def warm(self) -> None:
        """Start the server and its imports, which from a cold disk take longer than some parts."""
        process = self._context.Process(target=_nothing)
        process.start()
        process.join()
        process.close()

    def run(self, part: Part, stage: Stage) -> Result:
        """Run a part until its budget or the stage's deadline is over, whichever comes first."""
        started_s = time.monotonic()
        deadline_s = min(stage.deadline_s, started_s + part.budget_s)
        if deadline_s <= started_s:
            return Result(part=part.name, status=Status.NO_TIME, error="the suite's time was up")
        mine, theirs = self._context.Pipe(duplex=False)
        fields = asdict(replace(stage, deadline_s=deadline_s))
        process = self._context.Process(target=_work, args=(theirs, part.module, part.function, fields))
        try:
            process.start()
        except (OSError, EOFError) as problem:  # the server is gone; it is restarted for the next part
            mine.close()
            return Result(part=part.name, status=Status.FAILED, error=f"cannot start a process: {problem!r:.200}")
        finally:
            theirs.close()  # so that the pipe ends when the process does
        try:
            result = _listen(mine, part.name, deadline_s)
            if result.status is not Status.STOPPED:
                process.join(_GRACE_S)
        finally:
            _end(process)
            mine.close()
        if result.status is Status.FAILED and result.error is None:
            result.error = f"the process ended without a message (exit code {process.exitcode})"
        result.seconds = time.monotonic() - started_s
        if process.exitcode is not None:
            process.close()
        return result


def _end(process: BaseProcess) -> None:
    if process.is_alive():
        process.kill()
    process.join(_END_S)


def _nothing() -> None:
    """Do nothing; run to start the server."""


def _listen(pipe: Connection, name: str, deadline_s: float) -> Result:
    """Collect a part's results until it ends, by itself or by timeout."""
    result = Result(part=name, status=Status.FAILED)
    while True:
        if not pipe.poll(max(0.0, deadline_s - time.monotonic())):
            result.status, result.error = Status.STOPPED, "its time was up; what it had found is kept"
            return result
        try:
            message: Mapping[str, Any] = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):  # the process ended, perhaps in the middle of a message
            return result
        if "row" in message:
            result.rows.append(Row(**message["row"]))
        elif "note" in message:
            result.notes[message["note"]["name"]] = message["note"]["text"]
        else:
            result.status, result.error = Status(message["status"]), message["error"]
            return result


def _work(pipe: Connection, module: str, function: str, fields: dict[str, Any]) -> None:
    """Run a part in its process."""

    def say(message: Mapping[str, Any]) -> None:
        pipe.send_bytes(json.dumps(message).encode())

    status, error = Status.OK, None
    try:
        for found in getattr(importlib.import_module(module), function)(Stage(**fields)):
            say({"note" if isinstance(found, Note) else "row": asdict(found)})
    except (ClusterFailed, RequestFailed) as problem:
        # Not something missing but something broken; the message has the cluster's last output, a traceback says less.
        status, error = Status.FAILED, str(problem)
    except CannotMeasure as reason:
        status, error = Status.LEFT_OUT, str(reason)
    except BaseException as problem:  # noqa: BLE001 - the process's outermost frame, and the suite goes on
        status, error = Status.FAILED, "".join(traceback.format_exception(problem)[-_LAST_LINES:])
    say({"status": status.value, "error": error})
    pipe.close()
