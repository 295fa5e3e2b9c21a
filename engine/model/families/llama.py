"""Llama, and models of exactly its shape: Falcon3, Yi, InternLM3 (which has attention's biases without the last)."""

from dataclasses import replace

from engine.model.config_fields import Fields
from engine.model.families.reading import FamilyDefaults, ModelFamily, attention_bias, read_layer, read_model
from engine.model.spec import ModelSpec


def parse_llama(fields: Fields, defaults: FamilyDefaults) -> ModelSpec:
    """Biases as the file says."""
    has_bias = attention_bias(fields)
    layer = replace(
        read_layer(fields, defaults),
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=fields.boolean("mlp_bias", False),
    )
    return read_model(fields, defaults, layer)


def _parse_internlm3(fields: Fields, defaults: FamilyDefaults) -> ModelSpec:
    has_bias = fields.boolean("bias", False)
    layer = replace(
        read_layer(fields, defaults),
        qkv_bias=fields.boolean("qkv_bias", False),
        output_bias=has_bias,
        mlp_bias=has_bias,
    )
    return read_model(fields, defaults, layer)


LLAMA = ModelFamily(
    models="Llama 2, 3, 3.1, 3.2 (text), Falcon3, and models of that shape",
    differs="`attention_bias`, `mlp_bias` as the file says",
    parse=parse_llama,
    gguf="llama",
    gguf_reorders=True,
)
INTERNLM3 = ModelFamily(
    models="InternLM3",
    differs="`qkv_bias` and `bias` as the file says",
    parse=_parse_internlm3,
    defaults=FamilyDefaults(max_positions=32_768, norm_eps=1e-6),
)
