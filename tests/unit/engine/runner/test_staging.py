"""Uploads through reused memory are right even on a device that copies as late as it may."""

import random
from collections import deque

import numpy as np
import pytest
import torch

from engine.runner.device_queue import Download, HostQueue, Staging, device_queue
from engine.runner.pending_samples import ComingKeys


class LateMark:
    def __init__(self, queue):
        self._queue = queue
        self.is_passed = False

    def wait(self):
        while not self.is_passed:
            self._queue.do_one()


class LateQueue:
    """Runs its work only when waited for, and no more than needed. Implements DeviceQueue."""

    def __init__(self):
        self._work = deque()
        self.num_allocations = 0

    def host_memory(self, num_bytes):
        self.num_allocations += 1
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def upload(self, host):
        there = torch.zeros_like(host)
        self._work.append(lambda: there.copy_(host))
        return there

    def download(self, tensor):
        here = torch.zeros_like(tensor)
        self._work.append(lambda: here.copy_(tensor))
        return Download(here, self.mark(), tensor)

    def mark(self):
        mark = LateMark(self)
        self._work.append(lambda: setattr(mark, "is_passed", True))
        return mark

    def do_one(self):
        self._work.popleft()()


@pytest.mark.parametrize("queue_type", [LateQueue, HostQueue])
def test_staging_later_upload_does_not_change_earlier_one(queue_type):
    queue, rng = queue_type(), random.Random(1)
    staging = Staging(queue)
    expected, arrived = [], []
    for _ in range(30):
        with staging.step():
            for _ in range(rng.randint(0, 6)):
                shape = rng.choice([(0,), (1,), (3, 5), (rng.choice([700, 70_000]),)])
                array = np.array([rng.randrange(1000) for _ in range(int(np.prod(shape)))]).reshape(shape)
                array = array.astype(rng.choice([np.int64, np.int32, np.float32]))
                expected.append(array.copy())
                arrived.append(staging.upload(array))
                array[...] = -1
    queue.mark().wait()
    for array, tensor in zip(expected, arrived, strict=True):
        assert tensor.numpy().dtype == array.dtype
        assert np.array_equal(tensor.numpy(), array)


def test_staging_steady_state_allocates_nothing():
    queue = LateQueue()
    staging = Staging(queue)
    for step in range(20):
        with staging.step():
            for _ in range(4):
                staging.upload(np.arange(9000, dtype=np.int64))
        if step == 3:
            before = queue.num_allocations
    assert queue.num_allocations == before


def test_download_waits_for_own_result_only():
    queue = LateQueue()
    first = queue.download(torch.arange(4))
    later = queue.mark()
    assert first.wait().tolist() == [0, 1, 2, 3]
    assert not later.is_passed
    keys = ComingKeys(queue)
    assert keys.tokens() == []
    assert later.is_passed


def test_staging_cpu_needs_no_copy():
    assert isinstance(device_queue(torch.device("cpu")), HostQueue)
