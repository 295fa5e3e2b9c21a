"""NIXL with its UCX backend: one-sided writes between registered pools, from descriptor lists that are made once.

The caller restricts UCX to TCP (`peers.py`). Runs in NIXL's own environment.
"""

import importlib
import time
from collections.abc import Mapping
from typing import Any

_DONE, _FAILED = "DONE", "ERR"


class _Agent:
    """Parts that both ends share."""

    def __init__(self, name: str, pool: Any, size_bytes: int, *, is_passive: bool) -> None:
        api: Any = importlib.import_module("nixl._api")
        # Querying a status also makes progress: a polling thread would only take a core from it.
        settings = api.nixl_agent_config(enable_prog_thread=is_passive, backends=["UCX"])
        self._agent = api.nixl_agent(name, settings)
        self._base = pool.address
        self._registered = self._agent.register_memory([(self._base, size_bytes, 0, "")], "DRAM")
        self.about = {"version": importlib.import_module("importlib.metadata").version("nixl")}


class Sender(_Agent):
    """Writes; the status of a request shows when its bytes are in the other process's memory."""

    def __init__(self, options: Mapping[str, Any], pools: Mapping[str, Any]) -> None:
        super().__init__("bench-sender", pools["source"], options["pool_bytes"], is_passive=False)
        self._requests: dict[str, Any] = {}

    def connect(self, address: Any) -> None:
        name = self._agent.add_remote_agent(bytes.fromhex(address))
        self._peer = name.decode() if isinstance(name, bytes) else name
        self._agent.make_connection(self._peer)

    def prepare(self, case: Mapping[str, Any], ticket: Any) -> None:
        copies = case["copies"]
        here = [(self._base + source, length, 0) for source, _, length in copies]
        there = [(ticket + target, length, 0) for _, target, length in copies]
        mine = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", here, "DRAM")
        theirs = self._agent.prep_xfer_dlist(self._peer, there, "DRAM")
        everything = list(range(len(copies)))
        self._requests[case["name"]] = self._agent.make_prepped_xfer("WRITE", mine, everything, theirs, everything)

    def run(self, name: str) -> float:
        request = self._requests[name]
        started_s = time.perf_counter()
        state = self._agent.transfer(request)
        while state not in (_DONE, _FAILED):
            # Its interface has no way to wait; querying also makes progress.
            state = self._agent.check_xfer_state(request)
        took_s = time.perf_counter() - started_s
        if state == _FAILED:
            raise RuntimeError("NIXL reports an error")
        return took_s


class Receiver(_Agent):
    """Registers its pool; its library's own thread does the rest."""

    def __init__(self, options: Mapping[str, Any], pools: Mapping[str, Any]) -> None:
        super().__init__("bench-receiver", pools["target"], options["pool_bytes"], is_passive=True)

    def open(self) -> str:
        metadata: bytes = self._agent.get_agent_metadata()
        return metadata.hex()

    def connect(self, address: Any) -> None:
        """Do nothing, as the sender connects by itself."""

    def prepare(self, case: Mapping[str, Any], ticket: Any) -> int:
        """Return the address of the pool, which the sender's descriptors use."""
        base: int = self._base
        return base

    def run(self, name: str) -> None:
        """Do nothing, as writes are one-sided."""
