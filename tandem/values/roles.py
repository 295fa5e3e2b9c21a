"""The two pools of workers."""

from enum import Enum


class WorkerRole(Enum):
    """Which pool a worker belongs to."""

    PREFILL = "prefill"
    DECODE = "decode"
