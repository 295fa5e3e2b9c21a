"""GLM-4: half of each head rotated, in pairs of neighbours; the 0414 models norm what blocks return as well."""

from dataclasses import replace

from engine.model.config_fields import Fields
from engine.model.families.reading import FamilyDefaults, ModelFamily, attention_bias, read_layer, read_model
from engine.model.rope_config import RopeDefaults
from engine.model.spec import ModelSpec, StoredNames

_NAMES = StoredNames(
    fused_gate_up="mlp.gate_up_proj",
    attention_output_norm="post_self_attn_layernorm",
    mlp_output_norm="post_mlp_layernorm",
)
_DEFAULTS = FamilyDefaults(
    kv_heads=2,
    head_dim=128,
    max_positions=131_072,
    norm_eps=1.5625e-07,
    rope=RopeDefaults(partial=0.5, is_interleaved=True),
)


def _parse_glm(fields: Fields, defaults: FamilyDefaults) -> ModelSpec:
    layer = replace(read_layer(fields, defaults), qkv_bias=attention_bias(fields, default=True))
    return read_model(fields, defaults, layer, names=_NAMES)


def _parse_glm4(fields: Fields, defaults: FamilyDefaults) -> ModelSpec:
    layer = replace(read_layer(fields, defaults), qkv_bias=attention_bias(fields, default=True), has_output_norms=True)
    return read_model(fields, defaults, layer, names=_NAMES)


GLM = ModelFamily(
    models="GLM-4-9B-Chat in transformers' form (`-hf`)",
    differs="fused MLP; half of each head rotated, in pairs of neighbours; biases on queries, keys and values",
    parse=_parse_glm,
    defaults=_DEFAULTS,
)
GLM4 = ModelFamily(
    models="GLM-4-0414 9B and 32B, GLM-Z1",
    differs="as GLM, and norms after attention and MLP too",
    parse=_parse_glm4,
    defaults=_DEFAULTS,
)
