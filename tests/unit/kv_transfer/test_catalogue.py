"""A transport that is forced but cannot work is a wrong configuration, said plainly."""

import os
from dataclasses import replace

import pytest

from kv_transfer.transports.catalogue import open_receivers, open_senders
from tandem.errors import ConfigError
from tests.unit.kv_transfer.transport_peer import make_region


@pytest.mark.parametrize("choice", ["memory", "carrier-pigeon"])
def test_a_forced_transport_that_cannot_work_is_a_config_error(choice: str) -> None:
    region = make_region(seed=0)
    with pytest.raises(ConfigError, match=choice):
        open_senders(region, choice=choice)
    with pytest.raises(ConfigError, match=choice):
        open_receivers(region, choice=choice)
    os.close(region.fd)


def test_shm_needs_shared_memory() -> None:
    region = make_region(seed=0)
    with pytest.raises(ConfigError, match="shared memory"):
        open_receivers(replace(region, fd=None), choice="shm")
    os.close(region.fd)
