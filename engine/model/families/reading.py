"""What families share: the geometry that nearly all configurations state alike, windows by layer, and defaults."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.model.config_fields import Fields
from engine.model.rope_config import RopeConfig, RopeDefaults, RopeType, parse_rope, read_rope
from engine.model.spec import LayerSpec, ModelSpec, MoeSpec, NormKind, NormSpec

_MAX_DIM = 2**20
_MAX_VOCAB = 2**24
_MAX_LAYERS = 4096
_MAX_EXPERTS = 4096
_NUM_EXPERTS = ("num_experts", "num_local_experts")
_MAX_POSITIONS = 2**31 - 1
SLIDING = "sliding_attention"
FULL = "full_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyDefaults:
    """What a configuration means where it is silent: transformers' defaults."""

    kv_heads: int | None = None
    """None: as many as query heads."""
    head_dim: int | None = None
    """None: the hidden size divided by the query heads."""
    max_positions: int = 2048
    tie_embeddings: bool = False
    norm_eps: float = 1e-6
    activations: tuple[str, ...] = ("silu", "swish")
    """Names of the one function of gates that is implemented, in `hidden_act`."""
    rope: RopeDefaults = field(default_factory=RopeDefaults)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """An entry of the registry: how one architecture's `config.json` is read."""

    models: str
    """Models that have this architecture, for the documentation."""
    differs: str
    """What it has that Llama has not, for the documentation."""
    parse: Callable[[Fields, FamilyDefaults], ModelSpec]
    """Raises ConfigError, naming the field, for what the architecture does not allow or is not implemented."""
    defaults: FamilyDefaults = field(default_factory=FamilyDefaults)
    gguf: str | None = None
    """The architecture's name in GGUF files; None: these are refused."""
    gguf_reorders: bool = False
    """Whether llama.cpp's converter changes the order of the rows of queries and keys."""


def read_layer(fields: Fields, defaults: FamilyDefaults, rope: RopeConfig | None = None) -> LayerSpec:
    """Heads, sizes and rotation of all layers, with Llama's parts; `rope`: where the family has read it. Raises
    ConfigError.
    """
    if fields.has("hidden_act") and fields.get("hidden_act") not in defaults.activations:
        raise fields.error("hidden_act", f"must be {defaults.activations[0]}, is {fields.get('hidden_act')!r:.40}")
    hidden_size = fields.integer("hidden_size", 1, _MAX_DIM)
    num_heads = fields.integer("num_attention_heads", 1, _MAX_DIM)
    num_kv_heads = fields.integer("num_key_value_heads", 1, num_heads, defaults.kv_heads or num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_attention_heads", f"{num_heads} is not a multiple of {num_kv_heads} key-value heads")
    head_dim = _head_dim(fields, defaults, hidden_size, num_heads)
    rope = rope or parse_rope(fields.raw, max_positions(fields, defaults), defaults.rope)
    rotated = rope.rotary_dim(head_dim)
    if rope.rope_type is RopeType.DYNAMIC and rotated == 2:
        raise fields.error("head_dim", "must exceed 2 for dynamic rotary scaling")
    if rotated % 2 or not rotated:
        raise fields.error(
            "partial_rotary_factor", f"must leave an even part of a head, leaves {rotated} of {head_dim}"
        )
    longrope = {"short_factor": rope.short_factors, "long_factor": rope.long_factors}
    divisors = {RopeType.LONGROPE: longrope, RopeType.FACTORS: {"factors": rope.factors}}
    for name, factors in divisors.get(rope.rope_type, {}).items():
        if len(factors) != rotated // 2:
            raise fields.error(f"rope_scaling: {name}", f"must have {rotated // 2} numbers, has {len(factors)}")
    return LayerSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size", 1, _MAX_DIM),
        rope=rope,
    )


def read_model(
    fields: Fields,
    defaults: FamilyDefaults,
    layers: LayerSpec | Sequence[LayerSpec],
    *,
    norm: NormSpec | None = None,
    **parts: Any,
) -> ModelSpec:
    """The whole model from its layers, or from the one that all are like; `norm`: None for Llama's. Raises
    ConfigError.
    """
    for name in ("sliding_window", "max_window_layers"):
        if fields.has(name):  # even where it is not used: a negative value means that the file is damaged
            fields.integer(name, 0, _MAX_POSITIONS)
    if isinstance(layers, LayerSpec):
        layers = (layers,) * num_layers(fields)
    return ModelSpec(
        architecture=fields.get("architectures")[0],
        vocab_size=fields.integer("vocab_size", 1, _MAX_VOCAB),
        hidden_size=fields.integer("hidden_size", 1, _MAX_DIM),
        layers=tuple(layers),
        norm=norm or NormSpec(eps=fields.number("rms_norm_eps", 0.0, 1.0, defaults.norm_eps)),
        tie_embeddings=fields.boolean("tie_word_embeddings", defaults.tie_embeddings),
        **parts,
    )


def layer_norm(fields: Fields, *, has_bias: bool) -> NormSpec:
    """LayerNorms whose epsilon is `layer_norm_eps`."""
    return NormSpec(eps=fields.number("layer_norm_eps", 0.0, 1.0, 1e-5), kind=NormKind.LAYER, has_bias=has_bias)


def num_layers(fields: Fields) -> int:
    """Number of layers."""
    return fields.integer("num_hidden_layers", 1, _MAX_LAYERS)


def max_positions(fields: Fields, defaults: FamilyDefaults) -> int:
    """Positions that the checkpoint was made for."""
    return fields.integer("max_position_embeddings", 1, _MAX_POSITIONS, defaults.max_positions)


def ropes_by_type(fields: Fields, defaults: FamilyDefaults, local_theta: float) -> dict[str, RopeConfig]:
    """The rotations of windowed layers and of the others: one object for each in `rope_parameters`.

    In the older layout, `rope_theta` and `rope_scaling` are those of layers without a window; others have
    `local_theta`. Raises ConfigError.
    """
    positions, nested = max_positions(fields, defaults), fields.nested("rope_parameters")
    local = replace(defaults.rope, theta=local_theta)
    if nested is None or not any(nested.has(kind) for kind in (FULL, SLIDING)):
        empty = Fields({}, "config.json")
        return {
            FULL: parse_rope(fields.raw, positions, defaults.rope),
            SLIDING: read_rope(empty, empty, positions, local),
        }
    kinds = {FULL: defaults.rope, SLIDING: local}
    own = {kind: nested.nested(kind) or Fields({}, f"config.json: rope_parameters: {kind}") for kind in kinds}
    return {kind: read_rope(fields, own[kind], positions, kinds[kind]) for kind in kinds}


def read_mixture(fields: Fields, *, num_experts: int, per_token: int, size: int, normalizes: bool) -> MoeSpec:
    """The mixture of experts of a layer, without a shared one. Raises ConfigError.

    `num_experts`, `per_token`: what they are where the file is silent.
    """
    # One number with two names: transformers 5 writes another one for Qwen3 than the models' files have.
    names = [name for name in _NUM_EXPERTS if fields.has(name)]
    if len(names) > 1 and len({fields.get(name) for name in names}) > 1:
        raise fields.error(" and ".join(names), "must be the same number")
    count = fields.integer(names[0] if names else _NUM_EXPERTS[0], 1, _MAX_EXPERTS, num_experts)
    chosen = fields.integer("num_experts_per_tok", 1, count, per_token)
    return MoeSpec(num_experts=count, experts_per_token=chosen, expert_size=size, normalizes_weights=normalizes)


def sparse_layers(fields: Fields) -> tuple[bool, ...]:
    """Which layers have a mixture of experts, by `mlp_only_layers` and `decoder_sparse_step`. Raises ConfigError."""
    count, dense = num_layers(fields), fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(index) is not int for index in dense):
        raise fields.error("mlp_only_layers", "must be a list of numbers of layers")
    step = fields.integer("decoder_sparse_step", 1, _MAX_LAYERS, 1)
    return tuple(index not in dense and (index + 1) % step == 0 for index in range(count))


def attention_bias(fields: Fields, *, default: bool = False) -> bool:
    """Whether projections of attention have biases."""
    return fields.boolean("attention_bias", default)


def sliding_window(fields: Fields) -> int | None:
    """The window; 4096 if absent, as in transformers, and None only for an explicit null."""
    if fields.is_null("sliding_window"):
        return None
    return fields.integer("sliding_window", 1, _MAX_POSITIONS, 4096)


def windows_by_type(fields: Fields, window: int | None, types: Sequence[str]) -> tuple[int | None, ...]:
    """The window of each layer by `layer_types`; `types`: those of a file that has none. Raises ConfigError."""
    given = fields.get("layer_types") if fields.has("layer_types") else list(types)
    if not isinstance(given, list) or len(given) != num_layers(fields) or any(t not in (FULL, SLIDING) for t in given):
        raise fields.error("layer_types", f"must be {num_layers(fields)} of {FULL}, {SLIDING}")
    if SLIDING in given and window is None:
        raise fields.error("layer_types", f"has {SLIDING}, but no sliding_window is in use")
    return tuple(window if kind == SLIDING else None for kind in given)


def every_nth_is_full(fields: Fields, default: int) -> list[str]:
    """Types of layers of which every n-th sees everything; n: `sliding_window_pattern`."""
    period = fields.integer("sliding_window_pattern", 1, _MAX_POSITIONS, default)
    return [SLIDING if (i + 1) % period else FULL for i in range(num_layers(fields))]


def _head_dim(fields: Fields, defaults: FamilyDefaults, hidden_size: int, num_heads: int) -> int:
    if not fields.has("head_dim") and defaults.head_dim is None and hidden_size % num_heads:
        raise fields.error("hidden_size", f"{hidden_size} is not a multiple of {num_heads} attention heads")
    head_dim = fields.integer("head_dim", 1, 4096, defaults.head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise fields.error("head_dim", f"must be even for rotary positions, is {head_dim}")
    return head_dim
