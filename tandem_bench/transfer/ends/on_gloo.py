"""gloo, as `torch.distributed` sends from point to point over TCP: one send and one receive per range, all at once."""

import importlib
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

_HOST = "127.0.0.1"
_PATIENCE = timedelta(seconds=60)
_TAG = 1
_GO_TAG, _DONE_TAG = 2, 3
_RECEIVER, _SENDER = 0, 1


class _Gloo:
    """Parts that both ends share."""

    def __init__(self, pool: Any) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._distributed: Any = importlib.import_module("torch.distributed")
        self._torch.set_num_threads(1)
        self._pool = self._torch.frombuffer(pool.view, dtype=self._torch.uint8)
        self._ranges: dict[str, list[Any]] = {}
        self._word = self._torch.zeros(1, dtype=self._torch.uint8)
        self.about = {"torch": self._torch.__version__}

    def _store(self, port: int, is_master: bool) -> Any:
        return self._distributed.TCPStore(
            _HOST, port, 2, is_master, timeout=_PATIENCE, wait_for_workers=False, multi_tenant=True
        )

    def _join(self, store: Any, rank: int) -> Any:
        group: Any = self._distributed.ProcessGroupGloo
        options = group._Options()
        options._devices = [group.create_device(hostname=_HOST)]
        options._timeout = _PATIENCE
        return group(store, rank, 2, options)

    def _keep(self, name: str, ranges: list[tuple[int, int]]) -> None:
        self._ranges[name] = [self._pool[offset : offset + length] for offset, length in ranges]


class Sender(_Gloo):
    """Starts its clock when the receiver is about to receive."""

    def __init__(self, _options: Mapping[str, Any], pools: Mapping[str, Any]) -> None:
        super().__init__(pools["source"])

    def connect(self, address: Any) -> None:
        self._group = self._join(self._store(address, is_master=False), _SENDER)

    def prepare(self, case: Mapping[str, Any], ticket: Any) -> None:
        self._keep(case["name"], [(here, length) for here, _, length in case["copies"]])

    def run(self, name: str) -> float:
        self._group.recv([self._word], _RECEIVER, _GO_TAG).wait()
        started_s = time.perf_counter()
        works = [self._group.send([part], _RECEIVER, _TAG) for part in self._ranges[name]]
        for work in works:
            work.wait()
        self._group.recv([self._word], _RECEIVER, _DONE_TAG).wait()
        return time.perf_counter() - started_s


class Receiver(_Gloo):
    """Hosts the store through which both connect."""

    def __init__(self, _options: Mapping[str, Any], pools: Mapping[str, Any]) -> None:
        super().__init__(pools["target"])
        self._meeting = self._store(0, is_master=True)

    def open(self) -> int:
        port: int = self._meeting.port
        return port

    def connect(self, address: Any) -> None:
        self._group = self._join(self._meeting, _RECEIVER)

    def prepare(self, case: Mapping[str, Any], ticket: Any) -> None:
        self._keep(case["name"], [(there, length) for _, there, length in case["copies"]])

    def run(self, name: str) -> None:
        # Receives are posted first: unexpected data would be copied once more.
        works = [self._group.recv([part], _SENDER, _TAG) for part in self._ranges[name]]
        self._group.send([self._word], _SENDER, _GO_TAG).wait()
        for work in works:
            work.wait()
        self._group.send([self._word], _SENDER, _DONE_TAG).wait()
