"""StableLM 2: LayerNorms with biases, rotation of a part of each head; parallel blocks and norms of heads in some."""

from dataclasses import replace

from engine.model.config_fields import Fields
from engine.model.families.reading import FamilyDefaults, ModelFamily, layer_norm, read_layer, read_model
from engine.model.rope_config import RopeDefaults
from engine.model.spec import ModelSpec, QKNorm, StoredNames

_NAMES = StoredNames(query_norm="self_attn.q_layernorm.norms.{head}", key_norm="self_attn.k_layernorm.norms.{head}")


def _parse(fields: Fields, defaults: FamilyDefaults) -> ModelSpec:
    layer = replace(
        read_layer(fields, defaults),
        qkv_bias=fields.boolean("use_qkv_bias", False),
        qk_norm=QKNorm.HEAD_LAYER if fields.boolean("qk_layernorm", False) else None,
        is_parallel=fields.boolean("use_parallel_residual", False),
    )
    return read_model(fields, defaults, layer, norm=layer_norm(fields, has_bias=True), names=_NAMES)


STABLELM = ModelFamily(
    models="StableLM 3B, StableLM 2 1.6B and 12B",
    differs="LayerNorms with biases; rotation of a part of each head; parallel blocks, norms of heads as the file says",
    parse=_parse,
    defaults=FamilyDefaults(kv_heads=32, max_positions=4096, rope=RopeDefaults(partial=0.25)),
)
