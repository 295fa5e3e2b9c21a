"""Mistral: a sliding window in every layer, unless `sliding_window` is null. Mixtral: mixtures of experts."""

from dataclasses import replace

from engine.model.config_fields import Fields
from engine.model.families.reading import (
    FamilyDefaults,
    ModelFamily,
    read_layer,
    read_mixture,
    read_model,
    sliding_window,
)
from engine.model.rope_config import RopeDefaults
from engine.model.spec import ModelSpec, StoredNames

_MIXTRAL_NAMES = StoredNames(
    expert_router="block_sparse_moe.gate",
    expert="block_sparse_moe.experts.{expert}",
    expert_gate="w1",
    expert_up="w3",
    expert_down="w2",
)


def _parse(fields: Fields, defaults: FamilyDefaults) -> ModelSpec:
    return read_model(fields, defaults, replace(read_layer(fields, defaults), window=sliding_window(fields)))


def _parse_mixtral(fields: Fields, defaults: FamilyDefaults) -> ModelSpec:
    layer = read_layer(fields, defaults)
    window = sliding_window(fields) if fields.has("sliding_window") else None
    moe = read_mixture(fields, num_experts=8, per_token=2, size=layer.intermediate_size, normalizes=True)
    return read_model(fields, defaults, replace(layer, window=window, moe=moe), names=_MIXTRAL_NAMES)


MISTRAL = ModelFamily(
    models="Mistral 7B and its like",
    differs="sliding window where the file has one (absent means 4,096, `null` none)",
    parse=_parse,
    defaults=FamilyDefaults(kv_heads=8, max_positions=131_072),
    gguf="llama",
    gguf_reorders=True,
)
MIXTRAL = ModelFamily(
    models="Mixtral 8x7B, 8x22B",
    differs="mixture of experts in every layer; sliding window where the file has one",
    parse=_parse_mixtral,
    defaults=FamilyDefaults(kv_heads=8, max_positions=131_072, norm_eps=1e-5, rope=RopeDefaults(theta=1_000_000.0)),
)
