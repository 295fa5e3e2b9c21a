"""Selects an engine's backend, once at start, by the settings and the machine's hardware."""

import logging

import torch

from engine.backends.options import BackendOptions
from engine.backends.plain_torch import TorchBackend
from engine.kv_storage.paged_cache import TORCH_DTYPES
from engine.model.backend import Backend
from tandem.errors import ConfigError
from tandem.values.kv_layout import AUTO_DTYPE, QUANTISED_DTYPES

_log = logging.getLogger(__name__)
_FIRST_WITH_FP8 = (8, 9)
"""Least compute capability with fp8: Ada and Hopper."""
_FIRST_WITH_BF16 = (8, 0)
"""Least compute capability with bfloat16: Ampere."""


def select_backend(options: BackendOptions) -> Backend:
    """Make the best backend that can serve `options`.

    Raises ConfigError when a backend that was requested by name cannot run here. Missing compiled kernels that were not
    requested by name only cost speed, so their absence is logged.
    """
    if options.dtype not in TORCH_DTYPES:
        raise ConfigError(f"model.dtype must be one of {', '.join(TORCH_DTYPES)}, is {options.dtype!r:.40}")
    _check_dtype(options)
    _check_kv_dtype(options)
    reason = "engine.kernels is torch"
    if options.kernels != "torch":
        found = _compiled(options)
        if not isinstance(found, str):
            return found
        reason = found
    quantizes = options.quantization not in ("none", "auto", "stored")
    for name, wanted in (("deterministic", options.deterministic), ("quantization", quantizes)):
        if wanted:
            raise ConfigError(f"engine.{name} needs compiled kernels, and there are none: {reason}")
    if options.kernels != "torch":
        _log.warning("compiled kernels are unavailable, using plain torch: %s", reason)
    return TorchBackend(device=options.device, dtype=TORCH_DTYPES[options.dtype], takes_adapters=options.takes_adapters)


def _check_dtype(options: BackendOptions) -> None:
    """Refuse bfloat16 on a GPU that lacks it: emulation is slow, our kernels have none, and another dtype would differ
    from the cluster's other pools. Raises ConfigError.
    """
    if options.dtype != "bfloat16" or options.device.type != "cuda":
        return
    if (found := torch.cuda.get_device_capability(options.device)) < _FIRST_WITH_BF16:
        name, (major, minor) = torch.cuda.get_device_name(options.device), found
        raise ConfigError(
            f"model.dtype is bfloat16, which {name} (compute capability {major}.{minor}) lacks: 8.0 is needed. "
            "Set model.dtype to float16, which this GPU has, on every worker of the cluster"
        )


def _check_kv_dtype(options: BackendOptions) -> None:
    known = (AUTO_DTYPE, *QUANTISED_DTYPES)
    if options.kv_dtype not in known:
        raise ConfigError(f"engine.kv_dtype must be one of {', '.join(known)}, is {options.kv_dtype!r:.40}")
    if options.kernels == "torch":
        return
    if options.kv_dtype == "int4" and options.device.type == "cuda":
        raise ConfigError("engine.kv_dtype is int4, for which GPUs have no kernels: set engine.kv_dtype to int8")
    if options.kv_dtype != "fp8_e4m3":
        return
    if options.device.type == "cuda":
        if torch.cuda.get_device_capability(options.device) < _FIRST_WITH_FP8:
            raise ConfigError("engine.kv_dtype is fp8_e4m3, which this GPU does not support; int8 runs on every GPU")
        return
    if options.deterministic:
        raise ConfigError(
            "engine.kv_dtype is fp8_e4m3, for which a CPU has no compiled attention, and engine.deterministic needs "
            "it: set engine.kv_dtype to int8"
        )
    _log.warning("engine.kv_dtype is fp8_e4m3: no compiled attention for it on a CPU, using plain torch")


def _compiled(options: BackendOptions) -> Backend | str:
    """Make the device's compiled backend, or return the reason why it is unavailable.

    Backends are imported here: not every installation has what they need.
    """
    if options.device.type == "cuda":
        try:
            from engine.backends.cuda.backend import CudaBackend
        except ImportError as missing:
            return f"triton cannot be imported: {missing}"
        return CudaBackend(options)
    from engine.backends.cpu.backend import cpu_backend
    from engine.kernels.cpu.build import KernelsUnavailable

    try:
        return cpu_backend(options)
    except KernelsUnavailable as unavailable:
        return str(unavailable)
