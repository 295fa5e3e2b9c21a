"""Router processes of one host share rate limits: real processes, which are stopped and killed."""

import errno
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from router.admission.rate_limits import RateLimiter, RateLimitGrant
from router.host_peers.rate_limits import RateLimitFile
from router.process.admission_setup import make_limits
from tandem.config.admission import LimitsConfig, TenantLimits
from tandem.config.cluster import RouterConfig
from tandem.errors import Overloaded
from tandem.values.ids import Incarnation

SECRET = b"a secret of the cluster"
NOW_S = 123_456.789
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([__name__])


def limiter_over(file: RateLimitFile, limits: dict[str, Any], clock: Callable[[], float]) -> RateLimiter:
    return make_limits(RouterConfig.model_validate({"limits": limits}), SECRET, clock, file).limiter


class RouterProcess:
    """Code of a child process: a limiter over the shared file, with orders from a pipe."""

    def __init__(self, file: RateLimitFile, limits: dict[str, Any]) -> None:
        self.file = file
        self.now_s = NOW_S
        self.limiter = limiter_over(file, limits, lambda: self.now_s)
        self.grants: list[RateLimitGrant] = []

    def admit(self, count: int = 1, tenant: str = "") -> int:
        """How many of so many attempts were admitted."""
        former = len(self.grants)
        for _ in range(count):
            try:
                self.grants.append(self.limiter.admit(tenant, 10.0))
            except Overloaded:
                continue
        return len(self.grants) - former

    def end(self, count: int) -> None:
        for _ in range(count):
            self.limiter.settle(self.grants.pop(), 10.0)

    def admit_and_end(self, count: int) -> int:
        """As `admit`, one after the other."""
        admitted = 0
        for _ in range(count):
            admitted += self.admit()
            self.end(len(self.grants))
        return admitted

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds

    def hold_lock(self) -> None:
        self.file.lock()

    def set_limits(self, **limits: int) -> None:
        self.limiter.reconfigure(LimitsConfig(default=TenantLimits(**limits)))


def serve(pipe: Connection, folder: Path, router: int, limits: dict[str, Any]) -> None:
    with RateLimitFile(folder, router=Incarnation(router)) as file:
        process = RouterProcess(file, limits)
        pipe.send(None)
        while (call := pipe.recv()) is not None:
            name, args, more = call
            pipe.send(getattr(process, name)(*args, **more))


class Peers:
    """Child processes over one folder; each call is answered before the next, unless it is only sent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []

    def start(self, count: int, **limits: Any) -> None:
        for _ in range(count):
            ours, theirs = _FORKS.Pipe()
            router = len(self.processes) + 1
            process = _FORKS.Process(target=serve, args=(theirs, self.folder, router, {"default": limits}), daemon=True)
            process.start()
            theirs.close()
            ours.recv()
            self.processes.append(process)
            self._pipes.append(ours)

    def call(self, index: int, name: str, *args: Any, **more: Any) -> Any:
        self.send(index, name, *args, **more)
        return self.answer(index)

    def send(self, index: int, name: str, *args: Any, **more: Any) -> None:
        self._pipes[index].send((name, args, more))

    def answer(self, index: int) -> Any:
        assert self._pipes[index].poll(60.0), "no answer"
        return self._pipes[index].recv()

    def signal(self, index: int, number: int) -> None:
        pid = self.processes[index].pid
        assert pid is not None
        os.kill(pid, number)

    def kill(self, index: int) -> None:
        self.signal(index, signal.SIGKILL)
        self.processes[index].join()

    def stop(self) -> None:
        for process, pipe in zip(self.processes, self._pipes, strict=True):
            if process.is_alive():
                self.signal(self.processes.index(process), signal.SIGCONT)
                pipe.send(None)
                process.join()
            pipe.close()


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Peers]:
    made = Peers(tmp_path)
    yield made
    made.stop()


def test_host_limits_concurrency_slot_is_free_in_other_process_at_once(peers: Peers) -> None:
    peers.start(2, concurrent_requests=1)
    for _ in range(50):
        assert peers.call(0, "admit") == 1
        assert peers.call(1, "admit") == 0
        peers.call(0, "end", 1)
        assert peers.call(1, "admit") == 1
        assert peers.call(0, "admit") == 0
        peers.call(1, "end", 1)


def test_host_limits_requests_per_minute_are_exact_over_processes(peers: Peers) -> None:
    peers.start(2, requests_per_minute=5)
    assert [peers.call(number % 2, "admit_and_end", 1) for number in range(8)] == [1] * 5 + [0] * 3
    for index in (0, 1):
        peers.call(index, "pass_time", 12.0)
    assert [peers.call(index, "admit_and_end", 1) for index in (1, 0)] == [1, 0]


def test_host_limits_tokens_per_minute_bind_other_process(peers: Peers) -> None:
    peers.start(2, tokens_per_minute=40)
    assert [peers.call(number % 2, "admit_and_end", 1) for number in range(5)] == [1, 1, 1, 1, 0]


def test_host_limits_concurrent_requests_per_minute_are_counted_exactly(peers: Peers) -> None:
    peers.start(3, requests_per_minute=2000)
    for index in range(3):
        peers.send(index, "admit_and_end", 1500)
    assert sum(peers.answer(index) for index in range(3)) == 2000


def test_host_limits_concurrency_bound_is_filled_exactly(peers: Peers) -> None:
    peers.start(3, concurrent_requests=4)
    for _ in range(40):
        for index in range(3):
            peers.send(index, "admit", 3)
        admitted = [peers.answer(index) for index in range(3)]
        assert sum(admitted) == 4
        for index in range(3):
            peers.call(index, "end", admitted[index])


def test_host_limits_killed_process_frees_its_slots(peers: Peers) -> None:
    peers.start(3, concurrent_requests=4)
    assert [peers.call(index, "admit", 2) for index in range(3)] == [2, 2, 0]
    peers.kill(0)
    assert [peers.call(2, "admit", 4), peers.call(1, "admit", 1)] == [2, 0]
    # Its place is taken by another, which begins with nothing.
    peers.start(1, concurrent_requests=4)
    peers.call(2, "end", 2)
    assert peers.call(3, "admit", 4) == 2


def test_host_limits_killed_lock_holder_blocks_no_other(peers: Peers) -> None:
    peers.start(2, concurrent_requests=2)
    peers.call(0, "hold_lock")
    peers.kill(0)
    assert peers.call(1, "admit", 3) == 2


def test_host_limits_stopped_lock_holder_is_waited_for_once(
    peers: Peers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    peers.start(1, concurrent_requests=2)
    assert peers.call(0, "admit") == 1
    with RateLimitFile(peers.folder, router=Incarnation(9)) as file:
        limiter = limiter_over(file, {"default": {"concurrent_requests": 2}}, lambda: NOW_S)
        limiter.settle(limiter.admit("", 1.0), 1.0)
        peers.call(0, "hold_lock")
        peers.signal(0, signal.SIGSTOP)
        monkeypatch.setattr("router.host_peers.account_file._LONGEST_LOCK_S", 0.05)
        with caplog.at_level(logging.ERROR):
            limiter.admit("", 1.0)
            with pytest.raises(Overloaded):
                limiter.admit("", 1.0)
        assert len([record for record in caplog.records if "locked" in record.getMessage()]) == 1
        peers.kill(0)
        limiter.admit("", 1.0)


def test_host_limits_changed_at_different_times_keep_usage(peers: Peers) -> None:
    peers.start(2, requests_per_minute=10)
    assert peers.call(0, "admit_and_end", 8) == 8
    peers.call(0, "set_limits", requests_per_minute=12)
    assert [peers.call(index, "admit_and_end", 1) for index in (0, 1, 0, 1, 0)] == [1, 1, 1, 0, 1]
    peers.call(1, "set_limits", requests_per_minute=12)
    assert [peers.call(index, "admit_and_end", 1) for index in (0, 1)] == [0, 0]


def test_host_limits_tenants_have_separate_accounts(peers: Peers) -> None:
    peers.start(2, concurrent_requests=1)
    for number in range(300):
        index = number % 2
        assert peers.call(index, "admit", tenant=f"t{number}") == 1
    for number in range(300):
        assert peers.call(1 - number % 2, "admit", tenant=f"t{number}") == 0


def test_host_limits_file_of_dead_processes_is_reset(peers: Peers) -> None:
    peers.start(2, concurrent_requests=2, requests_per_minute=2)
    assert [peers.call(index, "admit") for index in (0, 1)] == [1, 1]
    for index in (0, 1):
        peers.kill(index)
    peers.start(1, concurrent_requests=2, requests_per_minute=2)
    assert peers.call(2, "admit", 3) == 2


def test_host_limits_file_is_private(tmp_path: Path) -> None:
    with RateLimitFile(tmp_path, router=Incarnation(1)) as file:
        file.usage_of(bytes(16))
    (made,) = tmp_path.iterdir()
    assert made.stat().st_mode & 0o777 == 0o600


def test_host_limits_symlink_in_place_of_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    (tmp_path / "rate-limits-1").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic link"), RateLimitFile(tmp_path, router=Incarnation(1)):
        pass


def test_host_limits_full_disk_falls_back_to_own_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with ExitStack() as stack:
        file = stack.enter_context(RateLimitFile(tmp_path, router=Incarnation(1)))
        limiter = limiter_over(file, {"default": {"concurrent_requests": 1}}, lambda: NOW_S)
        first = limiter.admit("a", 1.0)
        monkeypatch.setattr(os, "posix_fallocate", full)
        for number in range(200):
            limiter.admit(f"t{number}", 1.0)
            with pytest.raises(Overloaded):
                limiter.admit(f"t{number}", 1.0)
        assert "No space left" in caplog.text
        limiter.settle(first, 1.0)
        limiter.admit("a", 1.0)


def test_host_limits_first_live_router_reports_for_host(peers: Peers) -> None:
    peers.start(2, concurrent_requests=1)
    with RateLimitFile(peers.folder, router=Incarnation(77)) as file:
        assert file.routers() == {1, 2, 77}
        assert not file.is_first()
        peers.kill(0)
        assert not file.is_first()
        peers.kill(1)
        assert file.is_first()
        # What Redis still says of the dead is not counted beside what the account says.
        assert file.routers() == {1, 2, 77}


def test_host_limits_failed_open_leaks_no_descriptor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RateLimitFile(tmp_path, router=Incarnation(1)):
        pass
    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr("router.host_peers.account_file._MAX_COLUMNS", 0)
    with pytest.raises(OSError, match="more than 0 router processes"), RateLimitFile(tmp_path, router=Incarnation(2)):
        pass
    assert os.listdir("/proc/self/fd") == before


def test_host_limits_closed_file_still_settles_requests(tmp_path: Path) -> None:
    with RateLimitFile(tmp_path, router=Incarnation(1)) as file:
        limiter = limiter_over(file, {"default": {"concurrent_requests": 1, "tokens_per_minute": 50}}, lambda: NOW_S)
        grant = limiter.admit("", 1.0)
    limiter.settle(grant, 1.0)
    assert limiter.num_inflight("") == 0


FILE = "rate-limits-1"


def test_host_limits_file_removed_in_use_is_recreated_with_usage(peers: Peers) -> None:
    peers.start(2, requests_per_minute=10, concurrent_requests=4)
    assert [peers.call(index, "admit", count) for index, count in ((0, 2), (1, 1))] == [2, 1]
    for _ in range(3):
        (peers.folder / FILE).unlink()
        # The first that notices makes another, the next one joins it: neither begins anew.
        peers.call(1, "end", 1)
        assert [peers.call(1, "admit"), peers.call(0, "admit"), peers.call(1, "admit", 2)] == [1, 1, 0]
        peers.call(0, "end", 1)
        assert (peers.folder / FILE).exists()
    peers.call(0, "end", 2)
    peers.call(1, "end", 1)
    # Three at first, and twice two a round.
    assert [peers.call(index, "admit_and_end", 10) for index in (1, 0)] == [1, 0]


def test_host_limits_file_replaced_by_other_process_is_joined(peers: Peers) -> None:
    peers.start(2, requests_per_minute=6, concurrent_requests=3)
    assert [peers.call(index, "admit") for index in (0, 1)] == [1, 1]
    (peers.folder / FILE).unlink()
    peers.start(1, requests_per_minute=6, concurrent_requests=3)
    assert peers.call(2, "admit") == 1
    assert [peers.call(index, "admit", 3) for index in (0, 1, 2)] == [1, 0, 0]
    for index, count in ((0, 2), (1, 1), (2, 1)):
        peers.call(index, "end", count)
    # Four, less the one that the newcomer let in before it heard of the former two.
    assert sum(peers.call(index, "admit_and_end", 6) for index in (0, 1, 2)) == 3
    assert [peers.call(index, "admit_and_end", 1) for index in (0, 1, 2)] == [0, 0, 0]


def test_host_limits_file_not_recreatable_stays_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("router.host_peers.rate_limits._AGAIN_S", 0.0)
    with RateLimitFile(tmp_path, router=Incarnation(1)) as file:
        limiter = limiter_over(file, {"default": {"concurrent_requests": 2}}, lambda: NOW_S)
        grants = [limiter.admit("", 1.0)]
        num_open = len(os.listdir("/proc/self/fd"))
        (tmp_path / FILE).unlink()
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            grants.append(limiter.admit("", 1.0))
            with pytest.raises(Overloaded):
                limiter.admit("", 1.0)
        assert f"No space left on device: '{tmp_path / FILE}'" in caplog.text
        with pytest.raises(Overloaded):
            limiter.admit("", 1.0)
        assert "was removed while in use" in caplog.text
        assert len(os.listdir("/proc/self/fd")) == num_open
        for grant in grants:
            limiter.settle(grant, 1.0)
        assert file.routers() == {1}
        assert limiter.admit("", 1.0)


def test_host_limits_file_in_use_has_recent_mtime(tmp_path: Path) -> None:
    with RateLimitFile(tmp_path, router=Incarnation(1)) as file:
        os.utime(tmp_path / FILE, (0, 0))
        limiter_over(file, {"default": {"concurrent_requests": 2}}, lambda: NOW_S).admit("", 1.0)
        assert (tmp_path / FILE).stat().st_mtime > 1e9
