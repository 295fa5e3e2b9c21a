"""The workers and pools that the configuration names, re-read when the file has changed."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tandem.config.cluster import ClusterConfig, load
from tandem.errors import ConfigError
from tandem.rpc.worker_directory import WorkerAddress, stated_addresses
from tandem.values.roles import WorkerRole

_log = logging.getLogger(__name__)


def configured_addresses(config: ClusterConfig) -> frozenset[WorkerAddress]:
    """Return the addresses of both pools. Raises ConfigError."""
    return stated_addresses(prefill=config.prefill.addresses, decode=config.decode.addresses)


class ConfiguredWorkers:
    """Re-reads the addresses; needs a running event loop."""

    def __init__(self, path: Path | None, apply: Callable[[frozenset[WorkerAddress]], None]) -> None:
        """`apply` is called on the loop. Without a path, `read` does nothing."""
        self._path = path
        self._apply = apply
        self._loop = asyncio.get_running_loop()

    def read(self) -> None:
        """Re-read the file, in a thread. An invalid one is logged and changes nothing."""
        if self._path is None:
            return
        try:
            found = configured_addresses(load(self._path))
        except (ConfigError, OSError) as error:
            _log.error("%s; keeping the previous worker addresses", error)
            return
        self._loop.call_soon_threadsafe(self._apply, found)


class ConfiguredPoolSizes:
    """Reports how many workers each pool is configured to have, so that an empty pool differs from a lost one."""

    def __init__(self, path: Path | None, config: ClusterConfig, show: Callable[[str, int], None]) -> None:
        """`show` takes a role and a number, on any thread. Without a path, `read` does nothing."""
        self._path = path
        self._show = show
        self._show_sizes(config)

    def read(self) -> None:
        """Re-read the file, in a thread. An invalid one changes nothing; `ConfiguredWorkers` logs it."""
        if self._path is not None:
            with suppress(ConfigError, OSError):
                self._show_sizes(load(self._path))

    def _show_sizes(self, config: ClusterConfig) -> None:
        self._show(WorkerRole.PREFILL.value, config.prefill.replicas)
        self._show(WorkerRole.DECODE.value, config.decode.replicas)
