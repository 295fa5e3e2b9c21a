"""`tandem up` assigns the machine's GPUs to workers in turn, also as workers come and go."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.processes import launcher as launching
from cluster.processes.child import Callbacks
from cluster.processes.effective_config import make_effective, module_prefix, plan_processes, plan_worker
from cluster.processes.launcher import LocalLauncher
from cluster.supervisor.supervisor import ProcessPlan, Role
from tandem.config.cluster import ClusterConfig, load
from tests.unit.worker.test_gpus import FakeHost

MACHINES: list["Machine"] = []


class FakeChild:
    """Records the start arguments."""

    def __init__(self, argv: Any, _environment: Any, callbacks: Callbacks) -> None:
        self.argv: list[str] = list(argv(7))
        self.callbacks = callbacks


class Machine:
    """A launcher on a machine with so many GPUs; the workers that it has started, by name."""

    def __init__(self, num_gpus: int, **settings: Any) -> None:
        self.config: ClusterConfig = make_effective(
            load(None, {name.replace("__", "."): value for name, value in settings.items()})
        )
        self.launcher = LocalLauncher(gpus=FakeHost(num_gpus))
        self.launcher.open(self.config)
        MACHINES.append(self)
        self.children: dict[str, FakeChild] = {}
        self.ended: list[int] = []

    def start(self, plan: ProcessPlan) -> list[str]:
        """Starts one; returns its arguments about GPUs."""
        nobody = dict.fromkeys(("on_loading", "on_ready", "on_beat", "on_news", "on_log"), lambda *_: None)
        callbacks = Callbacks(**nobody, on_exit=self.ended.append)
        child: Any = self.launcher.start(plan, callbacks)
        self.children[plan.name] = child
        return child.argv[child.argv.index("--gpus") :] if "--gpus" in child.argv else []

    def start_all(self) -> list[list[str]]:
        return [self.start(plan) for plan in plan_processes(self.config)]

    def one_more(self, name: str) -> list[str]:
        role, _, index = name.partition("-")
        return self.start(plan_worker(self.config, Role(role), int(index), ""))

    def end(self, name: str) -> None:
        self.children[name].callbacks.on_exit(0)


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(launching, "Child", FakeChild)
    yield
    while MACHINES:
        MACHINES.pop().launcher.close()


def given(gpus: str, sharers: int = 1) -> list[str]:
    return ["--gpus", gpus, "--gpu-sharers", str(sharers)]


def test_worker_gpus_are_assigned_in_turn_and_none_to_routers() -> None:
    environments = Machine(8, prefill__replicas=3, decode__replicas=5).start_all()
    assert environments == [*(given(str(index)) for index in range(8)), []]


def test_worker_gpus_shared_gpu_counts_both_workers_from_start() -> None:
    assert Machine(1).start_all() == [given("0", 2), given("0", 2), []]


def test_worker_gpus_follow_stated_lists() -> None:
    machine = Machine(8, prefill__gpus=[7], decode__gpus=4, decode__tensor_parallel_size=2, decode__replicas=2)
    assert machine.start_all() == [given("7"), given("0,1"), given("2,3"), []]


def test_worker_gpus_none_or_missing_leave_worker_unrestricted() -> None:
    assert Machine(0).start_all() == [[], [], []]
    assert Machine(2, engine__device="cpu").start_all() == [[], [], []]
    assert Machine(2, decode__gpus=[2]).start_all()[1] == []


def test_worker_gpus_restart_and_successor_keep_gpu() -> None:
    machine = Machine(3, decode__replicas=2)
    machine.start_all()
    machine.end("decode-0")
    assert machine.ended == [0], "the supervisor hears of it, too"
    assert machine.one_more("decode-0") == given("1")
    machine.launcher.replace("decode-2", "decode-1")
    assert machine.one_more("decode-2") == given("2"), "the one that it replaces leaves"
    machine.end("decode-1")
    machine.end("prefill-0")
    assert machine.one_more("decode-3") == given("0"), "the least taken"


def test_worker_gpus_arguments_are_parsed_by_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tandem.process import lifetime
    from tandem.values.roles import WorkerRole

    machine = Machine(4, decode__tensor_parallel_size=2)
    machine.start_all()
    argv = machine.children["decode-0"].argv
    prefix = module_prefix(Role.DECODE)
    assert argv[: len(prefix)] == prefix
    places: list[lifetime.WorkerPlace] = []
    monkeypatch.setattr(lifetime, "_run", lambda _path, _name, main: main(None, None) or 0)
    monkeypatch.setattr("sys.argv", argv[len(prefix) - 1 :])
    assert lifetime.worker_main(WorkerRole.DECODE, lambda _config, place, _lifetime: places.append(place)) == 0  # type: ignore[arg-type]
    assert (places[0].gpus, places[0].gpu_sharers) == ((1, 2), 1)
    for bad in ("1,1", "-1", "x", ""):
        monkeypatch.setattr("sys.argv", ["decode_worker", "--config", str(tmp_path), "--gpus", bad])
        with pytest.raises(SystemExit):
            lifetime.worker_main(WorkerRole.DECODE, lambda *_: None)  # type: ignore[arg-type]
