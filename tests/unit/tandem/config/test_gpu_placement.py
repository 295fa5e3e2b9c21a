"""The GPUs of each of a host's workers, and how many workers share each."""

from typing import Any

import pytest

from tandem.config.cluster import ClusterConfig, load
from tandem.config.gpu_placement import GpuSeat, GpuSpread, allowed_gpus, static_seat
from tandem.errors import ConfigError
from tandem.values.roles import WorkerRole

PREFILL, DECODE = WorkerRole.PREFILL, WorkerRole.DECODE


def cluster(
    prefill: int = 1, decode: int = 1, *, hosts: tuple[str, ...] = ("127.0.0.1",), **settings: Any
) -> ClusterConfig:
    """Workers whose addresses are on these hosts, in turn."""
    addresses = {
        f"{role}.addresses": [f"{hosts[i % len(hosts)]}:{base + i}" for i in range(count)]
        for role, count, base in (("prefill", prefill, 4000), ("decode", decode, 5000))
    }
    sizes = {"prefill.replicas": prefill, "decode.replicas": decode}
    return load(None, addresses | sizes | {name.replace("__", "."): value for name, value in settings.items()})


def seats(config: ClusterConfig, num_gpus: int) -> list[GpuSeat]:
    """The GPUs of all workers, each computed by the worker itself."""
    sizes = ((PREFILL, len(config.prefill.addresses)), (DECODE, len(config.decode.addresses)))
    return [static_seat(config, role, index, num_gpus) for role, count in sizes for index in range(count)]


def gpus(config: ClusterConfig, num_gpus: int) -> list[tuple[int, ...]]:
    return [seat.gpus for seat in seats(config, num_gpus)]


def test_gpu_placement_two_workers_share_one_gpu() -> None:
    assert seats(cluster(), 1) == [GpuSeat(gpus=(0,), sharers=2)] * 2


def test_gpu_placement_one_gpu_per_worker() -> None:
    assert seats(cluster(3, 5), 8) == [GpuSeat(gpus=(index,), sharers=1) for index in range(8)]


def test_gpu_placement_more_workers_than_gpus_share_evenly() -> None:
    assert seats(cluster(2, 3), 2) == [
        GpuSeat(gpus=(gpu,), sharers=sharers) for gpu, sharers in ((0, 3), (1, 2), (0, 3), (1, 2), (0, 3))
    ]


def test_gpu_placement_ranks_of_a_worker_get_distinct_gpus() -> None:
    assert gpus(cluster(2, 1, decode__tensor_parallel_size=2), 4) == [(0,), (1,), (2, 3)]
    assert gpus(cluster(1, 1, decode__tensor_parallel_size=2), 2) == [(0,), (1, 0)]
    assert [seat.sharers for seat in seats(cluster(1, 1, decode__tensor_parallel_size=2), 2)] == [2, 2]


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"prefill__gpus": [7]}, [(7,), (7,), (0,), (1,)]),
        ({"prefill__gpus": [1, 0], "decode__gpus": [3, 2]}, [(1,), (0,), (3,), (2,)]),
        ({"prefill__gpus": [0], "decode__gpus": [0]}, [(0,)] * 4),
        ({"decode__gpus": 6}, [(6,), (7,), (0,), (1,)]),
        ({"prefill__gpus": 1, "decode__gpus": 7}, [(0,), (0,), (1,), (2,)]),
        ({"prefill__gpus": 2, "decode__gpus": [0, 5]}, [(1,), (2,), (0,), (5,)]),
        ({"prefill__gpus": list(range(8))}, [(0,), (1,), (2,), (3,)]),
    ],
)
def test_gpu_placement_stated_gpus_are_left_to_their_pool(
    settings: dict[str, Any], found: list[tuple[int, ...]]
) -> None:
    assert gpus(cluster(2, 2, **settings), 8) == found


def test_gpu_placement_ignores_workers_of_other_hosts() -> None:
    config = cluster(2, 2, hosts=("10.0.0.1", "10.0.0.2"))
    assert seats(config, 2) == [GpuSeat(gpus=(gpu,)) for gpu in (0, 0, 1, 1)]
    assert gpus(cluster(1, 1, hosts=("127.0.0.1", "127.0.0.2")), 2) == [(0,), (1,)]
    assert static_seat(cluster(1, 1), DECODE, 5, 4).gpus == (2,), "one more than is listed"


def test_gpu_placement_worker_with_own_host_uses_first_gpu() -> None:
    own = load(None, {"prefill.port": 7000, "decode.port": 7000, "decode.tensor_parallel_size": 2})
    assert [static_seat(own, role, 3, 2) for role in (PREFILL, DECODE)] == [GpuSeat(gpus=(0,)), GpuSeat(gpus=(0, 1))]
    stated = load(None, {"decode.port": 7000, "decode.gpus": [1], "prefill.port": 7000, "prefill.gpus": 2})
    assert static_seat(stated, DECODE, 0, 2) == GpuSeat(gpus=(1,)), "what the other pool claims is elsewhere"


def test_gpu_placement_worker_uses_gpus_from_ray() -> None:
    assert static_seat(load(None, {"ray.address": "auto", "decode.replicas": 9}), DECODE, 7, 1) == GpuSeat(gpus=(0,))


@pytest.mark.parametrize(
    ("settings", "role", "words"),
    [
        ({"prefill__gpus": [0, 8]}, PREFILL, r"prefill\.gpus names GPU 8: the last visible one is GPU 7"),
        ({"decode__gpus": 9}, DECODE, r"decode\.gpus is 9: 8 are visible, of which the other pool claims 0"),
        (
            {"prefill__gpus": [0, 1], "decode__gpus": 7},
            DECODE,
            r"decode\.gpus is 7: 8 are visible, of which .* claims 2",
        ),
        (
            {"decode__gpus": [4], "decode__tensor_parallel_size": 2},
            DECODE,
            r"decode\.tensor_parallel_size is 2: each of the 2 ranks here needs a GPU of its own, and the pool has 1 "
            r"\(GPUs 4\) of the 8 that are visible",
        ),
        (
            {"prefill__tensor_parallel_size": 16},
            PREFILL,
            r"prefill\.tensor_parallel_size is 16: .* has 8 \(GPUs 0, 1, 2",
        ),
    ],
)
def test_gpu_placement_refuses_impossible_gpus(settings: dict[str, Any], role: WorkerRole, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        allowed_gpus(cluster(**settings), role, 8)


@pytest.mark.parametrize("value", [[], [0, 0], [-1], [64], ["a"], [True], 0, 65, True, "two", {"a": 1}, 1.5])
def test_gpu_placement_invalid_list_is_refused_in_one_line(value: object) -> None:
    with pytest.raises(
        ConfigError, match=r"^decode\.gpus: must be a list of different indices of GPUs, 0 to 63, or how"
    ):
        load(None, {"decode.gpus": value})


def test_gpu_placement_gpus_are_refused_with_ray_or_nodes() -> None:
    with pytest.raises(ConfigError, match=r"prefill\.gpus cannot be set on Ray"):
        load(None, {"prefill.gpus": 1, "ray.address": "auto"})
    nodes = {"decode.nodes": 2, "decode.tensor_parallel_size": 2, "decode.rank_port": 7100}
    with pytest.raises(ConfigError, match=r"decode\.gpus cannot be set with several nodes"):
        load(None, nodes | {"decode.gpus": [0]})


def test_gpu_placement_restarted_worker_keeps_gpus() -> None:
    spread = GpuSpread()
    for name in ("a", "b", "c"):
        spread.place(name, range(3), 1)
    spread.leave("b")
    spread.leave("a")
    assert spread.place("d", range(3), 1).gpus == (0,), "the least taken, then the lowest"
    assert spread.place("b", range(3), 1) == GpuSeat(gpus=(1,))
    assert spread.place("a", range(3), 1) == GpuSeat(gpus=(0,), sharers=2)
    spread.leave("a")
    assert spread.place("a", (2,), 1) == GpuSeat(gpus=(2,), sharers=2), "what it had is not allowed any more"


def test_gpu_placement_successor_uses_gpus_of_replaced_worker() -> None:
    spread = GpuSpread()
    for name in ("p", "d0", "d1"):
        spread.place(name, range(3), 1)
    spread.replace("d2", "d1")
    assert spread.place("d2", range(3), 1) == GpuSeat(gpus=(2,))
    spread.leave("d1")
    spread.leave("d2")
    assert spread.place("d2", range(3), 1) == GpuSeat(gpus=(2,)), "after a crash"
    spread.replace("d1", "d2")
    spread.leave("d2")
    assert spread.place("d1", range(3), 1) == GpuSeat(gpus=(2,)), "in place: it starts when the other has left"
    spread.replace("x", "nobody")
    assert spread.place("x", range(3), 1).gpus == (0,)
