"""Mooncake's transfer engine over TCP: batches of one-sided writes between registered pools. In its own environment."""

import importlib
import time
from collections.abc import Mapping
from typing import Any

_HOST = "127.0.0.1"
_MOST_RANGES = 1024
"""Maximum ranges in one batch: its queue holds 2,048, and a batch beyond that fails, as do all after it."""


class _Engine:
    """Parts that both ends share."""

    def __init__(self, pool: Any, size_bytes: int) -> None:
        library: Any = importlib.import_module("mooncake.engine")
        self._engine = library.TransferEngine()
        # Peers discover each other directly, without a metadata server.
        if code := self._engine.initialize(_HOST, "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError(f"Mooncake does not start: {code}")
        self._base = pool.address
        if code := self._engine.register_memory(self._base, size_bytes):
            raise RuntimeError(f"Mooncake rejects the pool: {code}")
        metadata: Any = importlib.import_module("importlib.metadata")
        self.about = {"version": metadata.version("mooncake-transfer-engine-non-cuda")}


class Sender(_Engine):
    """Writes batch by batch, waiting for each to complete."""

    def __init__(self, options: Mapping[str, Any], pools: Mapping[str, Any]) -> None:
        super().__init__(pools["source"], options["pool_bytes"])
        self._batches: dict[str, tuple[list[int], list[int], list[int]]] = {}

    def connect(self, address: Any) -> None:
        self._peer = f"{_HOST}:{address}"

    def prepare(self, case: Mapping[str, Any], ticket: Any) -> None:
        copies = case["copies"]
        here = [self._base + source for source, _, _ in copies]
        there = [ticket + target for _, target, _ in copies]
        self._batches[case["name"]] = (here, there, [length for _, _, length in copies])

    def run(self, name: str) -> float:
        here, there, lengths = self._batches[name]
        started_s = time.perf_counter()
        for i in range(0, len(here), _MOST_RANGES):
            part = slice(i, i + _MOST_RANGES)
            if code := self._engine.batch_transfer_sync_write(self._peer, here[part], there[part], lengths[part]):
                raise RuntimeError(f"Mooncake reports error {code}")
        return time.perf_counter() - started_s


class Receiver(_Engine):
    """Registers its pool; its library's own threads do the rest."""

    def __init__(self, options: Mapping[str, Any], pools: Mapping[str, Any]) -> None:
        super().__init__(pools["target"], options["pool_bytes"])

    def open(self) -> int:
        port: int = self._engine.get_rpc_port()
        return port

    def connect(self, address: Any) -> None:
        """Do nothing, as the sender connects by itself."""

    def prepare(self, case: Mapping[str, Any], ticket: Any) -> int:
        """Return the address of the pool, by which the sender writes."""
        base: int = self._base
        return base

    def run(self, name: str) -> None:
        """Do nothing, as writes are one-sided."""
