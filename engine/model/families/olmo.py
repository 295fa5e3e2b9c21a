"""OLMo 2 and 3: norms of what blocks return and none of what they read; queries and keys normed over all heads. OLMoE:
norms as in Llama, and mixtures of experts.
"""

from dataclasses import replace

from engine.model.config_fields import Fields
from engine.model.families.reading import (
    FULL,
    SLIDING,
    FamilyDefaults,
    ModelFamily,
    attention_bias,
    every_nth_is_full,
    read_layer,
    read_mixture,
    read_model,
    ropes_by_type,
    sliding_window,
    windows_by_type,
)
from engine.model.rope_config import RopeConfig, RopeDefaults
from engine.model.spec import LayerSpec, ModelSpec, QKNorm


def _layer(fields: Fields, defaults: FamilyDefaults, rope: RopeConfig | None = None) -> LayerSpec:
    fields.only("clip_qkv")
    has_bias = attention_bias(fields)
    return replace(
        read_layer(fields, defaults, rope),
        qkv_bias=has_bias,
        output_bias=has_bias,
        qk_norm=QKNorm.PROJECTION,
        has_input_norms=False,
        has_output_norms=True,
    )


def _parse_olmo2(fields: Fields, defaults: FamilyDefaults) -> ModelSpec:
    return read_model(fields, defaults, _layer(fields, defaults))


def _parse_olmo3(fields: Fields, defaults: FamilyDefaults) -> ModelSpec:
    ropes = ropes_by_type(fields, defaults, local_theta=defaults.rope.theta)
    layer = _layer(fields, defaults, ropes[FULL])
    windows = windows_by_type(fields, sliding_window(fields), every_nth_is_full(fields, 4))
    layers = [replace(layer, window=w, rope=ropes[FULL if w is None else SLIDING]) for w in windows]
    return read_model(fields, defaults, layers)


def _parse_olmoe(fields: Fields, defaults: FamilyDefaults) -> ModelSpec:
    layer = replace(_layer(fields, defaults), has_input_norms=True, has_output_norms=False)
    moe = read_mixture(
        fields,
        num_experts=64,
        per_token=8,
        size=layer.intermediate_size,
        normalizes=fields.boolean("norm_topk_prob", False),
    )
    return read_model(fields, defaults, replace(layer, moe=moe))


OLMO2 = ModelFamily(
    models="OLMo 2",
    differs="norms after attention and MLP, none before; norms of all queries and of all keys",
    parse=_parse_olmo2,
    defaults=FamilyDefaults(norm_eps=1e-5),
)
OLMO3 = ModelFamily(
    models="OLMo 3",
    differs="as OLMo 2; sliding window in three of four layers, which rotate without scaling",
    parse=_parse_olmo3,
    defaults=FamilyDefaults(norm_eps=1e-5, rope=RopeDefaults(theta=500_000.0)),
)
OLMOE = ModelFamily(
    models="OLMoE-1B-7B",
    differs="mixture of experts in every layer; norms of all queries and of all keys",
    parse=_parse_olmoe,
    defaults=FamilyDefaults(max_positions=4096, norm_eps=1e-5),
)
