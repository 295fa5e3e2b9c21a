"""What a transport needs that not every machine has."""

from functools import cache

import pytest

from kv_transfer.transports import nixl_agent

_nixl_problem = cache(nixl_agent.problem)


def require(name: str) -> None:
    """Skip the test, saying why, where a transport cannot run."""
    if name == "nixl" and (obstacle := _nixl_problem()) is not None:
        pytest.skip(f"the transport nixl is not tested here: {obstacle}")
