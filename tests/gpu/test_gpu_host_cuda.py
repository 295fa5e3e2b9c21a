"""The driver's library and CUDA number GPUs alike, and a worker's own come first."""

import json
import os
import subprocess
import sys

import pytest
import torch

from engine.model.gpu_memory import GpuMemoryRequest, gpu_limit_bytes
from tandem.process.gpu_host import VISIBLE, NvidiaHost

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
_SHOW = """
import json, os, sys
from tandem.process.gpu_host import NvidiaHost

host = NvidiaHost(os.environ)
names = host.names()
host.put_first([int(sys.argv[1])])
import torch

seen = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
print(json.dumps([names, seen]))
"""


@pytest.mark.parametrize("which", ["first", "last"])
def test_cuda_put_first_gpu_is_device_zero_and_hides_none(which: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != VISIBLE}
    names = NvidiaHost(environment).names()
    own = 0 if which == "first" else len(names) - 1
    shown = subprocess.run(  # this interpreter, no shell
        [sys.executable, "-c", _SHOW, str(own)], env=environment, capture_output=True, text=True, check=True
    )
    reported, seen = json.loads(shown.stdout)
    assert tuple(reported) == names
    assert len(seen) == len(names)
    if len(names) > 1:  # a lone one may be a slice, which has a name of its own
        assert seen[0] == names[own].removeprefix("GPU-")
        assert sorted(seen) == sorted(name.removeprefix("GPU-") for name in names)


def test_cuda_memory_share_is_of_whole_gpu() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    limit = gpu_limit_bytes(GpuMemoryRequest(index=0, sharers=4), torch.device("cuda", 0))
    assert limit == pytest.approx(total * 0.8 / 4, rel=0.02)
