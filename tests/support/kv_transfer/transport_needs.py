"""What a transport needs that not every machine has, and what it may not keep."""

import os
from contextlib import suppress
from functools import cache

import pytest

from kv_transfer.transports.nixl import agent as nixl_agent

_nixl_problem = cache(nixl_agent.problem)


def require(name: str) -> None:
    """Skip the test, saying why, where a transport cannot run."""
    if name == "nixl" and (obstacle := _nixl_problem()) is not None:
        pytest.skip(f"the transport nixl is not tested here: {obstacle}")


def open_files() -> set[tuple[str, str]]:
    """Descriptors and what they are: every socket and pipe has a number of its own."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
    return found
