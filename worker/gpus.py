"""Selects the GPUs assigned to this worker: by its parent process, else by `tandem.config.gpu_placement`."""

import logging
import os

import torch

from tandem.config.cluster import ClusterConfig
from tandem.config.gpu_placement import GpuSeat, static_seat
from tandem.errors import ConfigError
from tandem.process.gpu_host import GpuHost, NvidiaHost
from tandem.process.lifetime import WorkerPlace
from tandem.values.roles import WorkerRole

_log = logging.getLogger(__name__)


def take_gpus(
    config: ClusterConfig, role: WorkerRole, place: WorkerPlace, host: GpuHost | None = None
) -> GpuSeat | None:
    """Make the worker's GPUs the first of this process, and return them; None where it computes on the CPU, or where
    GPUs cannot be distinguished: it then uses the first that CUDA shows.

    Must be called before CUDA is used. Raises ConfigError for GPUs that do not exist.
    """
    if config.engine.device == "cpu" or torch.version.cuda is None:
        return None
    host = host or NvidiaHost(os.environ)
    pool = config.prefill if role is WorkerRole.PREFILL else config.decode
    num_gpus = len(host.names())
    if not num_gpus:
        if pool.gpus is not None and config.engine.device == "cuda":
            raise ConfigError(f"{role.value}.gpus: the NVIDIA driver lists no GPU that this process may use")
        return None
    if place.gpus:
        if missing := [gpu for gpu in place.gpus if gpu >= num_gpus]:
            raise ConfigError(f"--gpus must name GPUs in [0, {num_gpus - 1}], got {missing[0]}")
        seat = GpuSeat(gpus=place.gpus, sharers=place.gpu_sharers)
    else:
        seat = static_seat(config, role, place.index, num_gpus)
    if len(seat.gpus) != pool.ranks_per_node:
        raise ConfigError(f"--gpus must name {pool.ranks_per_node} GPUs, one for each rank here, got {len(seat.gpus)}")
    host.put_first(seat.gpus)
    _log.info("GPU %s of the %d visible; workers on it: %d", _listed(seat), num_gpus, seat.sharers)
    return seat


def _listed(seat: GpuSeat) -> str:
    return ", ".join(map(str, seat.gpus))
