"""The quantized formats that are read, by the `quant_method` of config.json's `quantization_config`."""

from collections.abc import Callable, Mapping
from typing import Any

from engine.model.checkpoints.format import WHERE, QuantizedFormat
from engine.model.checkpoints.formats.aqlm import parse_aqlm
from engine.model.checkpoints.formats.awq import parse_awq
from engine.model.checkpoints.formats.bitsandbytes import parse_bitsandbytes
from engine.model.checkpoints.formats.compressed_tensors import parse_compressed_tensors
from engine.model.checkpoints.formats.fp8 import parse_fp8
from engine.model.checkpoints.formats.gptq import parse_gptq
from engine.model.checkpoints.formats.mxfp4 import parse_mxfp4
from engine.model.config_fields import Fields

_PARSERS: dict[str, Callable[[Fields, Mapping[str, Any]], QuantizedFormat]] = {
    "aqlm": parse_aqlm,
    "awq": parse_awq,
    "bitsandbytes": parse_bitsandbytes,
    "compressed-tensors": parse_compressed_tensors,
    "fbgemm_fp8": parse_fp8,
    "fp8": parse_fp8,
    "gptq": parse_gptq,
    "mxfp4": parse_mxfp4,
}


def parse_format(raw: object) -> QuantizedFormat | None:
    """Read a `quantization_config`. Returns None where there is none, or only the scales of an fp8 cache.

    Raises ConfigError, naming what is supported.
    """
    if raw is None:
        return None
    settings = raw if isinstance(raw, dict) else {}
    fields = Fields(settings, WHERE)
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in _PARSERS:
        raise fields.error("quant_method", f"must be one of {', '.join(_PARSERS)}, is {method!r:.40}")
    if fields.has("kv_cache_scheme"):
        if not _is_static_fp8(settings["kv_cache_scheme"]):
            raise fields.error("kv_cache_scheme", "must be static, symmetric fp8")
        if method == "compressed-tensors" and not settings.get("config_groups"):
            return None
    return _PARSERS[method](fields, settings)


def _is_static_fp8(scheme: object) -> bool:
    if not isinstance(scheme, dict) or scheme.get("dynamic"):
        return False
    return (scheme.get("num_bits"), scheme.get("type"), scheme.get("symmetric", True)) == (8, "float", True)
