"""Which backend an engine computes with: decided once, at start, from what is asked for and what the machine has."""

import logging

from engine.backends.backend import Backend
from engine.backends.options import BackendOptions
from engine.backends.torch_backend import TorchBackend
from engine.kv_cache import TORCH_DTYPES
from tandem.errors import ConfigError

_log = logging.getLogger(__name__)


def select_backend(options: BackendOptions) -> Backend:
    """The best backend that serves `options`.

    Raises ConfigError when nothing here can do what was asked for by name; compiled kernels that were not asked for
    by name only cost speed, so their absence is logged.
    """
    if options.dtype not in TORCH_DTYPES:
        raise ConfigError(f"model.dtype must be one of {', '.join(TORCH_DTYPES)}, is {options.dtype!r:.40}")
    reason = "engine.kernels is torch"
    if options.kernels != "torch":
        found = _compiled(options)
        if not isinstance(found, str):
            return found
        reason = found
    for name, wanted in (("deterministic", options.deterministic), ("quantization", options.quantization != "none")):
        if wanted:
            raise ConfigError(f"engine.{name} needs compiled kernels, and there are none: {reason}")
    if options.kernels != "torch":
        _log.warning("no compiled kernels, plain torch serves instead: %s", reason)
    return TorchBackend(device=options.device, dtype=TORCH_DTYPES[options.dtype])


def _compiled(options: BackendOptions) -> Backend | str:
    """The device's own kernels, or why there are none. Imported here: neither belongs to every installation."""
    if options.device.type == "cuda":
        try:
            from engine.backends.cuda_backend import CudaBackend
        except ImportError as missing:
            return f"triton cannot be imported: {missing}"
        return CudaBackend(options)
    from engine.backends.cpu_backend import cpu_backend
    from engine.kernels.cpu.build import KernelsUnavailable

    try:
        return cpu_backend(options)
    except KernelsUnavailable as unavailable:
        return str(unavailable)
