"""Qwen2, Qwen2.5 and Qwen3, dense: windows in some layers where they are switched on; biases, or norms of heads."""

from dataclasses import replace

from engine.model.config_fields import Fields
from engine.model.families.reading import (
    FULL,
    SLIDING,
    FamilyDefaults,
    ModelFamily,
    attention_bias,
    num_layers,
    read_layer,
    read_model,
    sliding_window,
    windows_by_type,
)
from engine.model.spec import LayerSpec, ModelSpec, QKNorm


def _parse_qwen2(fields: Fields, defaults: FamilyDefaults) -> ModelSpec:
    return _with_windows(fields, defaults, replace(read_layer(fields, defaults), qkv_bias=True))


def _parse_qwen3(fields: Fields, defaults: FamilyDefaults) -> ModelSpec:
    has_bias = attention_bias(fields)
    layer = read_layer(fields, defaults)
    layer = replace(layer, qkv_bias=has_bias, output_bias=has_bias, qk_norm=QKNorm.HEAD)
    return _with_windows(fields, defaults, layer)


def _with_windows(fields: Fields, defaults: FamilyDefaults, layer: LayerSpec) -> ModelSpec:
    """Windows by `layer_types` if given; else all layers from `max_window_layers` on have one."""
    window = sliding_window(fields) if fields.boolean("use_sliding_window", False) else None
    first = num_layers(fields) if window is None else fields.integer("max_window_layers", 0, 2**31 - 1, 28)
    types = [SLIDING if i >= first else FULL for i in range(num_layers(fields))]
    windows = windows_by_type(fields, window, types)
    return read_model(fields, defaults, [replace(layer, window=window) for window in windows])


QWEN2 = ModelFamily(
    models="Qwen2, Qwen2.5 dense",
    differs="biases on queries, keys and values; sliding window where switched on",
    parse=_parse_qwen2,
    defaults=FamilyDefaults(max_positions=32_768),
    gguf="qwen2",
)
QWEN3 = ModelFamily(
    models="Qwen3 dense",
    differs="norms of queries and keys; sliding window where switched on",
    parse=_parse_qwen3,
    defaults=FamilyDefaults(head_dim=128, max_positions=32_768),
    gguf="qwen3",
)
