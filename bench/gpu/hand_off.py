"""KV hand-off between two GPU processes through CUDA IPC, a transport that comes with the KV fabric."""

import importlib.util

from bench.errors import CannotMeasure
from bench.gpu.stage import Findings, Note, Stage

_TRANSPORT = "kv_transfer.transports.cuda_ipc"


def cuda_ipc(stage: Stage) -> Findings:
    """How far it is. Raises CannotMeasure."""
    state = "not built" if importlib.util.find_spec(_TRANSPORT) is None else "built, but not measured here yet"
    yield Note(name=_TRANSPORT, text=state)
    raise CannotMeasure(f"hand-off by CUDA IPC on {stage.device}: {state}")
