"""Whether this machine's GPUs have room for a worker's replacement while the worker still runs.

A worker's ready line states its GPUs and how much memory it uses on them. Free memory is queried with torch in a
separate process that sees what a worker would see: `tandem up` itself never holds GPU memory.
"""

import asyncio
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from cluster.supervisor.process_view import ProcessView
from engine.model.memory_budget import default_limit_bytes
from tandem.config.cluster import ClusterConfig

_ANSWER_S = 120.0
"""Timeout of the query: importing torch from a cold disk alone takes seconds."""
_ASK = """
import json, os, torch

if "CUDA_VISIBLE_DEVICES" not in os.environ:
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as tandem.gpu_host numbers them

def free(index):
    try:
        return torch.cuda.mem_get_info(index)[0]
    except RuntimeError:  # not even room for a context
        return 0

print(json.dumps([free(index) for index in range(torch.cuda.device_count())]))
"""
_log = logging.getLogger(__name__)


async def workers_without_room(
    workers: Sequence[ProcessView], config: ClusterConfig, command: Sequence[str] = (sys.executable, "-c", _ASK)
) -> frozenset[str]:
    """Return the names of the workers whose GPUs have no room for a second one like them.

    Returns none where free memory is unknown; nothing is queried while no worker computes on a GPU.
    """
    on_gpus = [view for view in workers if _num_gpus(view.ready)]
    if not on_gpus:
        return frozenset()
    free = await _free_bytes(command)
    return frozenset() if free is None else frozenset(v.name for v in on_gpus if not has_room(v.ready, config, free))


def has_room(ready: Mapping[str, Any], config: ClusterConfig, free_bytes: Sequence[int]) -> bool:
    """Return whether a replacement fits on the GPUs of the worker with this ready line.

    A worker of the previous version does not name its GPUs, and has the first ones.
    """
    count = _num_gpus(ready)
    gpus = [int(gpu) for gpu in ready.get("gpus") or range(count)]
    if max(gpus) >= len(free_bytes):
        return False
    least = min(free_bytes[gpu] for gpu in gpus)
    if (limit_bytes := int(ready.get("memory_bytes", 0))) and "gpus" in ready:
        return least >= limit_bytes // count
    if (stated := config.engine.memory_bytes) is not None:
        return least >= stated // count
    kept = (int(ready.get("weights_bytes", 0)) + int(ready.get("kv_bytes", 0))) // count
    return default_limit_bytes(least) >= kept


def _num_gpus(ready: Mapping[str, Any]) -> int:
    return int(ready.get("num_gpus", 0))


async def _free_bytes(command: Sequence[str]) -> list[int] | None:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(_ANSWER_S):
            output, _ = await process.communicate()
        return [int(free) for free in json.loads(output)]
    except (TimeoutError, ValueError, TypeError):
        _log.warning("cannot determine the free memory of the GPUs")
        return None
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
