"""The quantized formats that are read, by the `quant_method` of config.json's `quantization_config`."""

from collections.abc import Callable, Mapping
from typing import Any

from engine.model.checkpoints.format import WHERE, QuantizedFormat
from engine.model.checkpoints.formats.awq import parse_awq
from engine.model.checkpoints.formats.bitsandbytes import parse_bitsandbytes
from engine.model.checkpoints.formats.compressed_tensors import parse_compressed_tensors
from engine.model.checkpoints.formats.fp8 import parse_fp8
from engine.model.checkpoints.formats.gptq import parse_gptq
from engine.model.checkpoints.formats.mxfp4 import parse_mxfp4
from engine.model.config_fields import Fields

_PARSERS: dict[str, Callable[[Fields, Mapping[str, Any]], QuantizedFormat]] = {
    "awq": parse_awq,
    "bitsandbytes": parse_bitsandbytes,
    "compressed-tensors": parse_compressed_tensors,
    "fbgemm_fp8": parse_fp8,
    "fp8": parse_fp8,
    "gptq": parse_gptq,
    "mxfp4": parse_mxfp4,
}


def parse_format(raw: object) -> QuantizedFormat:
    """Read a `quantization_config`. Raises ConfigError, naming what is supported."""
    settings = raw if isinstance(raw, dict) else {}
    fields = Fields(settings, WHERE)
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in _PARSERS:
        raise fields.error("quant_method", f"must be one of {', '.join(_PARSERS)}, is {method!r:.40}")
    return _PARSERS[method](fields, settings)
