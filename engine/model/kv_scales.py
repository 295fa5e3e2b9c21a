"""Scales of a quantised KV cache, as checkpoints store them: one number for K and one for V of a layer, or one a head.

Names as llm-compressor writes them (`self_attn.k_scale`), and as ModelOpt does (`self_attn.k_proj.k_scale`); in both a
cached code times its scale is the value.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from tandem.errors import ConfigError

_PLANES = "kv"


def scale_names(attention: str, plane: str) -> tuple[str, str]:
    """What the scale of `plane`, "k" or "v", may be called in the layer whose attention has this prefix."""
    return f"{attention}{plane}_scale", f"{attention}{plane}_proj.{plane}_scale"


def all_scale_names(attention: str) -> frozenset[str]:
    """Of one layer."""
    return frozenset(name for plane in _PLANES for name in scale_names(attention, plane))


def kv_scales(stored: Mapping[str, Tensor], attention: str, num_kv_heads: int) -> Tensor | None:
    """Float32 `[2, num_kv_heads]` of one layer, K's first and 1 where only the other is stored; None without any.

    Raises ConfigError for a scale that is not positive and finite, or for other than one or every head.
    """
    scales = torch.ones(len(_PLANES), num_kv_heads)
    found = False
    for row, plane in enumerate(_PLANES):
        for name in scale_names(attention, plane):
            if name in stored:
                scales[row] = _checked(name, stored[name], num_kv_heads)
                found = True
    return scales if found else None


def _checked(name: str, stored: Tensor, num_kv_heads: int) -> Tensor:
    scale = stored.to("cpu", torch.float32).flatten()
    if scale.numel() not in (1, num_kv_heads) or not (scale.isfinite() & (scale > 0.0)).all():
        raise ConfigError(
            f"checkpoint: {name} must be one positive number, or one for each of {num_kv_heads} key-value heads"
        )
    return scale.clone()  # the file is unmapped after loading
