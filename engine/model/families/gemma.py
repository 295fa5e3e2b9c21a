"""Gemma 2 and 3 (text): norms before and after blocks, stored without their 1; scaled embeddings; GELU; windows."""

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
    read_model,
    ropes_by_type,
    sliding_window,
    windows_by_type,
)
from engine.model.rope_config import RopeConfig, RopeDefaults
from engine.model.spec import Activation, ModelSpec, NormSpec, QKNorm, StoredNames

_GELU = Activation.GELU_TANH.value
_NAMES = StoredNames(mlp_norm="pre_feedforward_layernorm")


def _parse_gemma2(fields: Fields, defaults: FamilyDefaults) -> ModelSpec:
    rope = read_layer(fields, defaults).rope
    return _parse(fields, defaults, {FULL: rope, SLIDING: rope}, full_period=2, qk_norm=None, caps=(50.0, 30.0))


def _parse_gemma3(fields: Fields, defaults: FamilyDefaults) -> ModelSpec:
    ropes = ropes_by_type(fields, defaults, fields.number("rope_local_base_freq", 1.0 + 1e-6, 1e15, 10_000.0))
    return _parse(fields, defaults, dict(ropes), full_period=6, qk_norm=QKNorm.HEAD, caps=(None, None))


def _parse(
    fields: Fields,
    defaults: FamilyDefaults,
    ropes: dict[str, RopeConfig | None],
    *,
    full_period: int,
    qk_norm: QKNorm | None,
    caps: tuple[float | None, float | None],
) -> ModelSpec:
    fields.only("hidden_activation", _GELU)
    fields.only("use_bidirectional_attention", False)
    has_bias = attention_bias(fields)
    layer = replace(
        read_layer(fields, defaults, ropes[FULL]),
        qkv_bias=has_bias,
        output_bias=has_bias,
        scale=fields.number("query_pre_attn_scalar", 1e-3, 1e6, 256.0) ** -0.5,
        soft_cap=_cap(fields, "attn_logit_softcapping", caps[0]),
        qk_norm=qk_norm,
        activation=Activation.GELU_TANH,
        has_output_norms=True,
    )
    windows = windows_by_type(fields, sliding_window(fields), every_nth_is_full(fields, full_period))
    return read_model(
        fields,
        defaults,
        [replace(layer, window=w, rope=ropes[FULL if w is None else SLIDING]) for w in windows],
        norm=NormSpec(eps=fields.number("rms_norm_eps", 0.0, 1.0, defaults.norm_eps), weight_offset=1.0),
        embedding_scale=fields.integer("hidden_size", 1, 2**20) ** 0.5,
        rounds_embedding_scale=True,
        logit_cap=_cap(fields, "final_logit_softcapping", caps[1]),
        names=_NAMES,
    )


def _cap(fields: Fields, name: str, default: float | None) -> float | None:
    if fields.is_null(name) or (default is None and not fields.has(name)):
        return None
    return fields.number(name, 1e-3, 1e6, default)


_GELU_NAMES = (_GELU, "gelu")
"""Older files say gelu in `hidden_act`, which is not used."""
GEMMA2 = ModelFamily(
    models="Gemma 2",
    differs="norms after attention and MLP too, GELU, soft caps on scores and logits, a window in every second layer",
    parse=_parse_gemma2,
    defaults=FamilyDefaults(kv_heads=4, head_dim=256, max_positions=8192, tie_embeddings=True, activations=_GELU_NAMES),
)
GEMMA3 = ModelFamily(
    models="Gemma 3 (text)",
    differs="as Gemma 2 without soft caps; norms of heads; a window and another rotation in five of six layers",
    parse=_parse_gemma3,
    defaults=FamilyDefaults(
        kv_heads=4,
        head_dim=256,
        max_positions=131_072,
        tie_embeddings=True,
        activations=_GELU_NAMES,
        rope=RopeDefaults(theta=1_000_000.0),
    ),
)
