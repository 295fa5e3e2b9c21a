"""A process's view of a host's GPUs, and how it puts its own first."""

import ctypes

import pytest

from tandem.process import gpu_host
from tandem.process.gpu_host import NvidiaHost, driver_uuids

FOUR = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")


@pytest.mark.parametrize(
    ("stated", "names"),
    [
        (None, FOUR),
        ("2,0", ("2", "0")),
        (" GPU-c , GPU-a ", ("GPU-c", "GPU-a")),
        ("MIG-1,MIG-2", ("MIG-1", "MIG-2")),
        ("1,4,0", ("1",)),
        ("0,-1,1", ("0",)),
        ("", ()),
        ("-1", ()),
    ],
)
def test_gpu_host_names_follow_cuda_visible_devices(stated: str | None, names: tuple[str, ...]) -> None:
    environ = {} if stated is None else {"CUDA_VISIBLE_DEVICES": stated}
    assert NvidiaHost(environ, lambda: FOUR).names() == names


def test_gpu_host_without_driver_has_no_gpu() -> None:
    assert NvidiaHost({"CUDA_VISIBLE_DEVICES": "0"}, lambda: ()).names() == ()


@pytest.mark.parametrize(
    ("stated", "own", "then"),
    [
        (None, (2,), "GPU-c,GPU-a,GPU-b,GPU-d"),
        (None, (3, 1), "GPU-d,GPU-b,GPU-a,GPU-c"),
        ("3,1", (1,), "1,3"),
        (None, (0,), "GPU-a,GPU-b,GPU-c,GPU-d"),
        (None, (0, 1), "GPU-a,GPU-b,GPU-c,GPU-d"),
        ("3,1", (0,), "3,1"),
    ],
)
def test_gpu_host_put_first_keeps_other_gpus_visible(
    stated: str | None, own: tuple[int, ...], then: str | None
) -> None:
    environ = {} if stated is None else {"CUDA_VISIBLE_DEVICES": stated}
    NvidiaHost(environ, lambda: FOUR).put_first(own)
    assert environ.get("CUDA_VISIBLE_DEVICES") == then


def test_gpu_host_single_gpu_needs_no_order() -> None:
    environ: dict[str, str] = {}
    NvidiaHost(environ, lambda: ("GPU-a",)).put_first((0,))
    assert environ == {}


class Nvml:
    """The library's calls, as C would answer them."""

    def __init__(self, uuids: tuple[str, ...], *, failing: str = "") -> None:
        self._uuids = uuids
        self._failing = failing
        self.num_open = 0

    def _status(self, call: str) -> int:
        return 999 if call == self._failing else 0

    def nvmlInit_v2(self) -> int:
        self.num_open += self._status("init") == 0
        return self._status("init")

    def nvmlShutdown(self) -> int:
        self.num_open -= 1
        return 0

    def nvmlDeviceGetCount_v2(self, count) -> int:
        count._obj.value = len(self._uuids)
        return self._status("count")

    def nvmlDeviceGetHandleByIndex_v2(self, index, handle) -> int:
        handle._obj.value = 1000 + index.value
        return self._status("handle")

    def nvmlDeviceGetUUID(self, handle, uuid, length) -> int:
        assert length.value == ctypes.sizeof(uuid)
        uuid.value = self._uuids[handle.value - 1000].encode()
        return self._status("uuid")


@pytest.mark.parametrize("failing", ["", "init", "count", "handle", "uuid"])
def test_gpu_host_driver_lists_gpus_or_none(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml(FOUR, failing=failing)
    monkeypatch.setattr(gpu_host.ctypes, "CDLL", lambda _name: nvml)
    assert driver_uuids() == (() if failing else FOUR)
    assert nvml.num_open == 0


def test_gpu_host_without_library_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_name: str) -> None:
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    monkeypatch.setattr(gpu_host.ctypes, "CDLL", missing)
    assert driver_uuids() == ()
