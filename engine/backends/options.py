"""Options of a backend."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """The requested backend and its settings; tandem/config/cluster.py documents each."""

    device: torch.device
    dtype: str
    kernels: str = "auto"
    quantization: str = "none"
    """"none", "stored" (matrices of quantized checkpoints stay as they are where kernels multiply them so), "auto" (the
    same, but where restored ones are faster), "int8", "int4", "fp8" or "nf4"."""
    kv_dtype: str = "auto"
    deterministic: bool = False
    takes_adapters: bool = False
    """Whether adapters add to projections, whose rows then lie as they are, ungated."""
    num_threads: int = 1
    binds_threads: bool = False
    """True when the processors are this worker's own: each compute thread is bound to one of them."""
