"""Locks that change hands within one burst."""

import ctypes
import threading
import time

import pytest

from kv_transfer.memory.write_stop_lock import BurstLock, WriteStopLock
from tandem.errors import TransferError

WAIT_S = 20.0


def is_wanted(lock: BurstLock) -> bool:
    return ctypes.c_int32.from_address(lock.wanted).value != 0


def until_wanted(lock: BurstLock) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not is_wanted(lock):
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.001)


def test_burst_lock_waiter_precedes_last_holder() -> None:
    for _ in range(50):
        lock, order = BurstLock(), []

        def wait(lock: BurstLock = lock, order: list[str] = order) -> None:
            with lock:
                order.append("waited")

        lock.acquire()
        thread = threading.Thread(target=wait)
        thread.start()
        until_wanted(lock)
        lock.release()
        with lock:
            order.append("held before")
        thread.join(WAIT_S)
        assert order == ["waited", "held before"]
        assert not is_wanted(lock)


def test_burst_lock_threads_are_exclusive() -> None:
    lock, total = BurstLock(), [0]

    def count() -> None:
        for _ in range(2000):
            with lock:
                seen = total[0]
                total[0] = seen + 1

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert total == [8000]
    assert not is_wanted(lock)


@pytest.mark.parametrize("with_other", [False, True])
def test_write_stop_lock_closed_gate_leaves_locks_free(with_other: bool) -> None:
    lock, other = BurstLock(), BurstLock() if with_other else None

    def refuse() -> None:
        raise TransferError("stop")

    gate = WriteStopLock(refuse, lock, other)
    with pytest.raises(TransferError, match="stop"), gate:
        pytest.fail("went through")
    for each in filter(None, (lock, other)):
        with each:
            pass
    assert bool(gate.also_wanted) is with_other


def test_write_stop_lock_check_runs_under_both_locks() -> None:
    lock, other = BurstLock(), BurstLock()
    held = []
    with WriteStopLock(lambda: held.append((lock._lock.locked(), other._lock.locked())), lock, other):
        assert held == [(True, True)]
    assert not lock._lock.locked()
    assert not other._lock.locked()
