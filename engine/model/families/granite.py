"""Granite 3 (dense): factors on embeddings, scores, logits, and on what every block adds to the residual stream.

The last needs no operator. With a residual stream divided by the factor, blocks add what they return, and a norm, which
does not see the scale of its input, sees the same with an epsilon divided by the factor's square.
"""

from dataclasses import replace

from engine.model.config_fields import Fields
from engine.model.families.reading import FamilyDefaults, ModelFamily, attention_bias, read_layer, read_model
from engine.model.spec import ModelSpec, NormSpec


def _parse(fields: Fields, defaults: FamilyDefaults) -> ModelSpec:
    has_bias = attention_bias(fields)
    layer = replace(
        read_layer(fields, defaults),
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=fields.boolean("mlp_bias", False),
        scale=_multiplier(fields, "attention_multiplier"),
    )
    residual = _multiplier(fields, "residual_multiplier")
    eps = fields.number("rms_norm_eps", 0.0, 1.0, defaults.norm_eps)
    return read_model(
        fields,
        defaults,
        layer,
        norm=NormSpec(eps=eps / residual**2),
        embedding_scale=_multiplier(fields, "embedding_multiplier") / residual,
        logit_scale=1.0 / _multiplier(fields, "logits_scaling"),
    )


def _multiplier(fields: Fields, name: str) -> float:
    return fields.number(name, 1e-4, 1e4, 1.0)


GRANITE = ModelFamily(
    models="Granite 3.0 to 3.3 dense",
    differs="factors on embeddings, scores, residuals and logits",
    parse=_parse,
)
