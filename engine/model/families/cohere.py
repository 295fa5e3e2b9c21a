"""Command R and R7B: parallel blocks, LayerNorms without biases, a factor on logits, pairs of neighbours rotated.

Cohere2 has a window in three of four layers; the others see everything, and do not rotate.
"""

from dataclasses import replace

from engine.model.config_fields import Fields
from engine.model.families.reading import (
    FamilyDefaults,
    ModelFamily,
    attention_bias,
    every_nth_is_full,
    layer_norm,
    num_layers,
    read_layer,
    read_model,
    sliding_window,
    windows_by_type,
)
from engine.model.rope_config import RopeDefaults
from engine.model.spec import ModelSpec


def _parse_cohere(fields: Fields, defaults: FamilyDefaults) -> ModelSpec:
    return _parse(fields, defaults, (None,) * num_layers(fields), rotates_all=True)


def _parse_cohere2(fields: Fields, defaults: FamilyDefaults) -> ModelSpec:
    windows = windows_by_type(fields, sliding_window(fields), every_nth_is_full(fields, 4))
    if not any(windows):
        raise fields.error("layer_types", "has no sliding_attention: then no layer would rotate positions")
    return _parse(fields, defaults, windows, rotates_all=False)


def _parse(fields: Fields, defaults: FamilyDefaults, windows: tuple[int | None, ...], rotates_all: bool) -> ModelSpec:
    fields.only("use_qk_norm", False)
    has_bias = attention_bias(fields)
    layer = replace(read_layer(fields, defaults), qkv_bias=has_bias, output_bias=has_bias, is_parallel=True)
    layers = [replace(layer, window=w, rope=layer.rope if rotates_all or w else None) for w in windows]
    scale = fields.number("logit_scale", 1e-6, 1e6, 0.0625)
    return read_model(fields, defaults, layers, norm=layer_norm(fields, has_bias=False), logit_scale=scale)


COHERE = ModelFamily(
    models="Command R",
    differs="attention and MLP in parallel; LayerNorms; pairs of neighbours rotated; `logit_scale`",
    parse=_parse_cohere,
    defaults=FamilyDefaults(
        max_positions=8192, tie_embeddings=True, rope=RopeDefaults(theta=500_000.0, is_interleaved=True)
    ),
)
COHERE2 = ModelFamily(
    models="Command R7B, Command A",
    differs="as Cohere; sliding window in three of four layers, no rotation in the others",
    parse=_parse_cohere2,
    defaults=FamilyDefaults(max_positions=8192, tie_embeddings=True, rope=RopeDefaults(is_interleaved=True)),
)
