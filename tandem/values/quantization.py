"""Which quantizations are made of a model's weights while they are loaded, and by what."""

from collections.abc import Mapping
from types import MappingProxyType

QUANTIZED_DTYPES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "int8": ("bfloat16",),
        "int4": ("bfloat16",),
        "fp8": ("bfloat16", "float32"),
        "nf4": ("bfloat16", "float32"),
    }
)
"""Values of `engine.quantization` that quantize weights while they are loaded, and the dtypes that each computes in.

That is on a CPU; on GPUs the integers' kernels compute in both 16-bit dtypes."""
