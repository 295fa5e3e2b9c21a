"""A worker selects its assigned or own GPUs before anything of CUDA is loaded."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import decode_worker.__main__
import prefill_worker.__main__
from tandem.config.cluster import ClusterConfig, load
from tandem.config.gpu_placement import GpuSeat
from tandem.errors import ConfigError
from tandem.process.lifetime import Lifetime, WorkerPlace
from tandem.values.roles import WorkerRole
from worker.engine_spec import engine_spec
from worker.gpus import take_gpus

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE


class FakeHost:
    """A machine with so many GPUs."""

    def __init__(self, num_gpus: int) -> None:
        self._names = tuple(f"GPU-{index}" for index in range(num_gpus))
        self.first: tuple[int, ...] | None = None

    def names(self) -> tuple[str, ...]:
        return self._names

    def put_first(self, gpus: Sequence[int]) -> None:
        self.first = tuple(gpus)


@pytest.fixture(autouse=True)
def torch_for_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")


def cluster(**settings: Any) -> ClusterConfig:
    addresses = {
        "prefill.addresses": ["127.0.0.1:4001", "127.0.0.1:4002"],
        "decode.addresses": [f"127.0.0.1:{port}" for port in range(5001, 5007)],
        "secret": "0123456789abcdef",
    }
    return load(None, addresses | {name.replace("__", "."): value for name, value in settings.items()})


def test_gpus_each_worker_of_a_host_takes_one_first() -> None:
    taken = []
    for role, count in ((PREFILL, 2), (DECODE, 6)):
        for index in range(count):
            host = FakeHost(8)
            seat = take_gpus(cluster(), role, WorkerPlace(index=index), host)
            assert seat is not None
            assert (seat.gpus, seat.sharers) == (host.first, 1)
            taken.append(seat.gpus)
    assert taken == [(index,) for index in range(8)]


def test_gpus_assigned_are_taken_and_passed_to_engine() -> None:
    for role in (PREFILL, DECODE):
        host = FakeHost(8)
        seat = take_gpus(cluster(), role, WorkerPlace(gpus=(6,), gpu_sharers=2), host)
        assert (seat, host.first) == (GpuSeat(gpus=(6,), sharers=2), (6,))
        spec = engine_spec(cluster(), role, None, seat)
        assert (spec.gpus, spec.gpu_sharers) == ((6,), 2)
        assert (engine_spec(cluster(), role).gpus, engine_spec(cluster(), role).gpu_sharers) == ((), 1)


@pytest.mark.parametrize("module", [prefill_worker.__main__, decode_worker.__main__])
async def test_gpus_are_taken_before_model_loads(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Loading(Exception):
        """Raised when loading is reached."""

    def load_model(spec: Any, _progress: Any) -> None:
        raise Loading(spec.gpus, spec.gpu_sharers)

    seen: list[WorkerPlace] = []
    monkeypatch.setattr(module, "take_gpus", lambda _config, _role, place: seen.append(place) or GpuSeat(gpus=(6,)))
    monkeypatch.setattr(module, "assemble_worker", load_model)
    place = WorkerPlace(address="127.0.0.1:0", gpus=(6,))
    with pytest.raises(Loading) as caught:
        await module.serve(cluster(), place, Lifetime())
    assert (caught.value.args, seen) == (((6,), 1), [place])


@pytest.mark.parametrize(
    ("settings", "place", "words"),
    [
        ({"decode__gpus": [9]}, {}, r"decode\.gpus names GPU 9: the last visible one is GPU 7"),
        ({}, {"gpus": (8,)}, r"--gpus must name GPUs in \[0, 7\], got 8"),
        ({}, {"gpus": (1, 2)}, "--gpus must name 1 GPUs, one for each rank here, got 2"),
    ],
)
def test_gpus_missing_on_host_are_refused(settings: dict[str, Any], place: dict[str, Any], words: str) -> None:
    host = FakeHost(8)
    with pytest.raises(ConfigError, match=words):
        take_gpus(cluster(**settings), DECODE, WorkerPlace(**place), host)
    assert host.first is None


def test_gpus_on_cpu_worker_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    host = FakeHost(8)
    assert take_gpus(cluster(engine__device="cpu", decode__gpus=[9]), DECODE, WorkerPlace(), host) is None
    assert take_gpus(cluster(decode__gpus=[9]), DECODE, WorkerPlace(), FakeHost(0)) is None
    with pytest.raises(ConfigError, match=r"decode\.gpus: the NVIDIA driver lists no GPU"):
        take_gpus(cluster(engine__device="cuda", decode__gpus=[0]), DECODE, WorkerPlace(), FakeHost(0))
    monkeypatch.setattr(torch.version, "cuda", None)
    assert take_gpus(cluster(decode__gpus=[9]), DECODE, WorkerPlace(), host) is None
    assert host.first is None
