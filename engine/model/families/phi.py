"""Phi-3, Phi-3.5 and Phi-4 (dense): fused projections, longrope; Phi-4-mini rotates a part of each head."""

from dataclasses import replace

from engine.model.config_fields import Fields
from engine.model.families.reading import FamilyDefaults, ModelFamily, read_layer, read_model, sliding_window
from engine.model.rope_config import RopeDefaults
from engine.model.spec import ModelSpec, StoredNames

_NAMES = StoredNames(fused_qkv="self_attn.qkv_proj", fused_gate_up="mlp.gate_up_proj")


def _parse(fields: Fields, defaults: FamilyDefaults) -> ModelSpec:
    for name in ("attention_bias", "mlp_bias", "lm_head_bias"):
        fields.only(name, False)
    layer = read_layer(fields, defaults)
    if fields.has("sliding_window"):
        layer = replace(layer, window=sliding_window(fields))
    return read_model(fields, defaults, layer, names=_NAMES)


PHI3 = ModelFamily(
    models="Phi-3, Phi-3.5-mini, Phi-4, Phi-4-mini",
    differs="fused projections; `longrope`; rotation of a part of each head; sliding window where the file has one",
    parse=_parse,
    defaults=FamilyDefaults(
        max_positions=4096,
        norm_eps=1e-5,
        rope=RopeDefaults(partial=1.0, aliases={"su": "longrope", "yarn": "longrope"}),
    ),
)
