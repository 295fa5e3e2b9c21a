"""SmolLM3: Llama without rotation in every fourth layer."""

from dataclasses import replace

from engine.model.config_fields import Fields
from engine.model.families.reading import (
    FULL,
    SLIDING,
    FamilyDefaults,
    ModelFamily,
    attention_bias,
    num_layers,
    read_layer,
    read_model,
    sliding_window,
    windows_by_type,
)
from engine.model.rope_config import RopeDefaults
from engine.model.spec import ModelSpec


def _parse(fields: Fields, defaults: FamilyDefaults) -> ModelSpec:
    has_bias = attention_bias(fields)
    layer = replace(
        read_layer(fields, defaults),
        qkv_bias=has_bias,
        output_bias=has_bias,
        mlp_bias=fields.boolean("mlp_bias", False),
    )
    rotates = _rotates(fields)
    is_used = fields.boolean("use_sliding_window", False) and fields.has("sliding_window")
    types = [FULL if rotated or not is_used else SLIDING for rotated in rotates]
    windows = windows_by_type(fields, sliding_window(fields) if is_used else None, types)
    pairs = zip(windows, rotates, strict=True)
    return read_model(
        fields, defaults, [replace(layer, window=w, rope=layer.rope if rotated else None) for w, rotated in pairs]
    )


def _rotates(fields: Fields) -> list[bool]:
    count, given = num_layers(fields), fields.get("no_rope_layers")
    if given is None:
        interval = fields.integer("no_rope_layer_interval", 1, 2**31 - 1, 4)
        given = [int((i + 1) % interval != 0) for i in range(count)]
    if not isinstance(given, list) or len(given) != count or any(one not in (0, 1) for one in given) or 1 not in given:
        raise fields.error("no_rope_layers", f"must be {count} numbers, 1 where positions are rotated, else 0")
    return [one == 1 for one in given]


SMOLLM3 = ModelFamily(
    models="SmolLM3",
    differs="no rotation in the layers that the file names, every fourth",
    parse=_parse,
    defaults=FamilyDefaults(
        kv_heads=4, max_positions=32_768, tie_embeddings=True, rope=RopeDefaults(theta=2_000_000.0)
    ),
)
