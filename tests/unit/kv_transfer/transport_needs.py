"""What a transport needs that not every machine has."""

import pytest

from kv_transfer.transports import nixl_agent


def require(name: str) -> None:
    """Skip the test, saying why, where a transport cannot run."""
    if name == "nixl" and (obstacle := nixl_agent.problem()) is not None:
        pytest.skip(f"the transport nixl is not tested here: {obstacle}")
