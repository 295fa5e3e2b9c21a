"""Logging set-up of a process: one line per event on stderr, never a prompt or a token."""

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime

from tandem.values.ids import request_of

REQUEST_ID: ContextVar[str] = ContextVar("tandem_request_id", default="")
"""The router's own id of the request that the current task serves; other code states it with `about`."""
X_REQUEST_ID: ContextVar[str] = ContextVar("tandem_x_request_id", default="")
"""Id that the response header gives for the current task's call: the same, unless the client chose one."""
JSON = "json"


def about(name: str) -> dict[str, str]:
    """The `extra` of a log line about a request, from any of its names (`tandem.values.ids.request_of`).

    Workers cannot use the context: tasks that a request starts there, such as a link to a peer, may outlive it and
    would inherit its context.
    """
    request_id = request_of(name)
    return {} if request_id is None else {"request_id": request_id}


class JsonLines(logging.Formatter):
    """Formats each record as one JSON object per line."""

    def __init__(self, process_name: str) -> None:
        super().__init__()
        self._process = process_name

    def format(self, record: logging.LogRecord) -> str:
        """Format a record: time in UTC with milliseconds; `request_id`, `x_request_id` and `exception` where there are
        any."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := getattr(record, "request_id", "") or REQUEST_ID.get():
            line["request_id"] = request_id
        if (shown := X_REQUEST_ID.get()) and shown != request_id:
            line["x_request_id"] = shown
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure(level: str, process_name: str, style: str = "text") -> None:
    """Log to stderr with the process's name; called from a `__main__`, and again when the level changes.

    `style`: `text`, or `json` for collectors.
    """
    handler = logging.StreamHandler(sys.stderr)
    plain = f"%(asctime)s %(levelname)-7s {process_name} %(name)s: %(message)s"
    handler.setFormatter(
        JsonLines(process_name) if style == JSON else logging.Formatter(plain, datefmt="%H:%M:%S"),
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for noisy in ("asyncio", "grpc", "httpx", "uvicorn.access", "uvicorn.error"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def configured_style() -> str:
    """The log format of this process: `text` or `json`."""
    return JSON if any(isinstance(one.formatter, JsonLines) for one in logging.getLogger().handlers) else "text"
