"""Logging set-up of a process: one line per event on stderr, never a prompt or a token."""

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime

REQUEST_ID: ContextVar[str] = ContextVar("tandem_request_id", default="")
"""Of the request that a task serves; lines of others may bring it as `extra={"request_id": …}`."""
JSON = "json"


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def __init__(self, process_name: str) -> None:
        super().__init__()
        self._process = process_name

    def format(self, record: logging.LogRecord) -> str:
        """Time in UTC with milliseconds; `request_id` and `exception` where there are such."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := getattr(record, "request_id", "") or REQUEST_ID.get():
            line["request_id"] = request_id
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
    """How this process logs."""
    return JSON if any(isinstance(one.formatter, JsonLines) for one in logging.getLogger().handlers) else "text"
