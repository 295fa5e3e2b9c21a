"""Qwen2, Qwen2.5 and Qwen3: windows in some layers where they are switched on; biases, or norms of heads; mixtures of
experts, in Qwen2's with one that computes every token.
"""

from collections.abc import Sequence
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
    read_mixture,
    read_model,
    sliding_window,
    sparse_layers,
    windows_by_type,
)
from engine.model.spec import LayerSpec, ModelSpec, MoeSpec, QKNorm


def _parse_qwen2(fields: Fields, defaults: FamilyDefaults) -> ModelSpec:
    return _with_windows(fields, defaults, replace(read_layer(fields, defaults), qkv_bias=True))


def _parse_qwen3(fields: Fields, defaults: FamilyDefaults) -> ModelSpec:
    has_bias = attention_bias(fields)
    layer = read_layer(fields, defaults)
    layer = replace(layer, qkv_bias=has_bias, output_bias=has_bias, qk_norm=QKNorm.HEAD)
    return _with_windows(fields, defaults, layer)


def _parse_qwen2_moe(fields: Fields, defaults: FamilyDefaults) -> ModelSpec:
    """Windows by `layer_types` if given; else every other layer has one, up to `max_window_layers`."""
    layer = replace(read_layer(fields, defaults), qkv_bias=fields.boolean("qkv_bias", True))
    window, last = _window(fields), fields.integer("max_window_layers", 0, 2**31 - 1, 28)
    count = num_layers(fields)
    types = [SLIDING if window and i % 2 == 0 and i < last else FULL for i in range(count)]
    shared_size = fields.integer("shared_expert_intermediate_size", 1, 2**20, 5632)
    moe = replace(_mixture(fields, num_experts=60, per_token=4, size=1408), shared_size=shared_size)
    return _with_experts(fields, defaults, layer, moe, windows_by_type(fields, window, types))


def _parse_qwen3_moe(fields: Fields, defaults: FamilyDefaults) -> ModelSpec:
    has_bias = attention_bias(fields)
    layer = read_layer(fields, defaults)
    layer = replace(layer, qkv_bias=has_bias, output_bias=has_bias, qk_norm=QKNorm.HEAD)
    moe = _mixture(fields, num_experts=128, per_token=8, size=768)
    return _with_experts(fields, defaults, layer, moe, (_window(fields),) * num_layers(fields))


def _mixture(fields: Fields, *, num_experts: int, per_token: int, size: int) -> MoeSpec:
    return read_mixture(
        fields,
        num_experts=num_experts,
        per_token=per_token,
        size=fields.integer("moe_intermediate_size", 1, 2**20, size),
        normalizes=fields.boolean("norm_topk_prob", False),
    )


def _with_experts(
    fields: Fields, defaults: FamilyDefaults, layer: LayerSpec, moe: MoeSpec, windows: Sequence[int | None]
) -> ModelSpec:
    pairs = zip(windows, sparse_layers(fields), strict=True)
    layers = [replace(layer, window=window, moe=moe if is_sparse else None) for window, is_sparse in pairs]
    return read_model(fields, defaults, layers)


def _window(fields: Fields) -> int | None:
    return sliding_window(fields) if fields.boolean("use_sliding_window", False) else None


def _with_windows(fields: Fields, defaults: FamilyDefaults, layer: LayerSpec) -> ModelSpec:
    """Windows by `layer_types` if given; else all layers from `max_window_layers` on have one."""
    window = _window(fields)
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
QWEN2_MOE = ModelFamily(
    models="Qwen1.5-MoE, Qwen2-57B-A14B",
    differs="as Qwen2; mixture of experts in the layers that the file names, one of them for every token",
    parse=_parse_qwen2_moe,
    defaults=FamilyDefaults(kv_heads=16, max_positions=32_768),
)
QWEN3_MOE = ModelFamily(
    models="Qwen3-30B-A3B, Qwen3-235B-A22B",
    differs="norms of queries and keys; mixture of experts in the layers that the file names",
    parse=_parse_qwen3_moe,
    defaults=FamilyDefaults(kv_heads=4, max_positions=32_768),
)
