"""A rank's GPU is the first of its process, whatever rank it is."""

from dataclasses import replace

import torch

from engine.backends.options import BackendOptions
from engine.distributed.ranks.follower import with_own_gpu_first
from tandem.process.gpu_host import NvidiaHost

FOUR = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")


def test_gpu_of_a_rank_becomes_its_first_where_rank_0_has_ordered_them() -> None:
    """A thread without a device of its own begins on the first: it must not be another rank's."""
    options = BackendOptions(device=torch.device("cuda", 2), dtype="bfloat16")
    environ = {"CUDA_VISIBLE_DEVICES": "GPU-d,GPU-b,GPU-c,GPU-a"}
    own = with_own_gpu_first(options, NvidiaHost(environ, lambda: FOUR))
    assert own == replace(options, device=torch.device("cuda", 0))
    assert environ == {"CUDA_VISIBLE_DEVICES": "GPU-c,GPU-d,GPU-b,GPU-a"}


def test_gpus_that_rank_0_has_not_ordered_keep_cudas_numbers() -> None:
    options = BackendOptions(device=torch.device("cuda", 2), dtype="bfloat16")
    assert with_own_gpu_first(options, NvidiaHost({}, lambda: FOUR)) == options
    on_cpu, environ = replace(options, device=torch.device("cpu")), {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}
    assert with_own_gpu_first(on_cpu, NvidiaHost(environ, lambda: FOUR)) == on_cpu
