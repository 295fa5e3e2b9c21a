"""Mistral: a sliding window in every layer, unless `sliding_window` is null."""

from dataclasses import replace

from engine.model.config_fields import Fields
from engine.model.families.reading import FamilyDefaults, ModelFamily, read_layer, read_model, sliding_window
from engine.model.spec import ModelSpec


def _parse(fields: Fields, defaults: FamilyDefaults) -> ModelSpec:
    return read_model(fields, defaults, replace(read_layer(fields, defaults), window=sliding_window(fields)))


MISTRAL = ModelFamily(
    models="Mistral 7B and its like",
    differs="sliding window where the file has one (absent means 4,096, `null` none)",
    parse=_parse,
    defaults=FamilyDefaults(kv_heads=8, max_positions=131_072),
    gguf="llama",
    gguf_reorders=True,
)
