"""Logging set-up of a process: one line per event on stderr, never a prompt or a token."""

import logging
import sys


def configure(level: str, process_name: str) -> None:
    """Log to stderr with the process's name; called from a `__main__`, and again when the level changes."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(f"%(asctime)s %(levelname)-7s {process_name} %(name)s: %(message)s", datefmt="%H:%M:%S")
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    for noisy in ("asyncio", "grpc", "httpx", "uvicorn.access", "uvicorn.error"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
