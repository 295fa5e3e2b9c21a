"""A model's architecture from `config.json` and `generation_config.json`, checked and normalised.

The four supported architectures differ only in biases, norms of queries and keys, and which layers have a
sliding window, so one ModelArchitecture describes them all and one decoder runs them all. Defaults for absent fields
are those of transformers.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from engine.model.config_fields import Fields
from engine.model.files import ModelDirectory
from engine.model.rope_config import RopeConfig, RopeType, parse_rope
from tandem.errors import ConfigError

_MAX_DIM = 2**20
_MAX_VOCAB = 2**24
_MAX_LAYERS = 4096
_MAX_POSITIONS = 2**31 - 1
_MAX_EOS = 64
_STORED_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelArchitecture:
    """Geometry and switches of a decoder-only transformer of the Llama family."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """RMSNorm over each head of queries and keys before the rotation (Qwen3)."""
    tie_embeddings: bool
    layer_windows: tuple[int | None, ...]
    """For each layer, the number of latest tokens, itself included, that a token attends to; None: all."""
    stored_dtype: str | None
    """Dtype of the checkpoint according to config.json; None where it has none."""
    eos_token_ids: tuple[int, ...]
    weight_format: str | None = None
    """The format that weights are quantized in, as logs call it; None: none."""

    @property
    def max_context(self) -> int:
        """Most tokens, prompt and output together, that one sequence may have."""
        return self.rope.max_context

    @property
    def group_size(self) -> int:
        """Number of query heads that share one key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def flops_per_token(self) -> int:
        """Multiplications and additions per token in the layers' products, without attention and output head."""
        projected = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return 2 * self.num_layers * self.hidden_size * (projected + 3 * self.intermediate_size)

    def digest(self) -> bytes:
        """Hash of all fields that change the computation: all but the end tokens and what weights are stored in.

        That is in the fingerprint of the weights.
        """
        values = asdict(self)
        for name in ("eos_token_ids", "stored_dtype", "weight_format"):
            del values[name]
        if not self.rope.factors:
            del values["rope"]["factors"]  # so that the previous version gives other models the same names
        text = json.dumps(values, sort_keys=True, default=_enum_value)
        return hashlib.sha256(text.encode()).digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """Properties that depend on the architecture's name."""

    qkv_bias: Callable[[Fields], bool]
    output_bias: Callable[[Fields], bool]
    mlp_bias: Callable[[Fields], bool]
    windows: Callable[[Fields, int], tuple[int | None, ...]]
    qk_norm: bool = False
    default_kv_heads: int | None = None
    default_head_dim: int | None = None
    default_max_positions: int = 2048


def load_model_config(path: str | Path) -> ModelArchitecture:
    """Read a model directory's configuration, or a GGUF file's.

    Raises ConfigError, naming file and field, for anything unsupported, out of bounds or contradictory.
    """
    directory = ModelDirectory(path)
    raw = directory.read_json("config.json")
    generation = directory.read_json("generation_config.json") if directory.has("generation_config.json") else {}
    config = parse_model_config(raw, generation)
    if (gguf := directory.gguf_path()) is None:
        return config
    if config.weight_format is not None:
        raise ConfigError(f"config.json: quantization_config cannot describe {gguf.name}, which has its own types")
    return replace(config, weight_format=f"GGUF ({gguf.name})")


def parse_model_config(raw: dict[str, Any], generation: dict[str, Any]) -> ModelArchitecture:
    """Check and normalise the two JSON objects of a model directory."""
    fields = Fields(raw, "config.json")
    name = _architecture(fields)
    family = _FAMILIES[name]
    if fields.has("hidden_act") and fields.get("hidden_act") not in ("silu", "swish"):
        raise fields.error("hidden_act", f"must be silu, is {fields.get('hidden_act')!r:.40}")
    hidden_size = fields.integer("hidden_size", 1, _MAX_DIM)
    num_heads = fields.integer("num_attention_heads", 1, _MAX_DIM)
    num_kv_heads = fields.integer("num_key_value_heads", 1, num_heads, family.default_kv_heads or num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_attention_heads", f"{num_heads} is not a multiple of {num_kv_heads} key-value heads")
    num_layers = fields.integer("num_hidden_layers", 1, _MAX_LAYERS)
    vocab_size = fields.integer("vocab_size", 1, _MAX_VOCAB)
    _check_windows(fields)
    max_positions = fields.integer("max_position_embeddings", 1, _MAX_POSITIONS, family.default_max_positions)
    head_dim = _head_dim(fields, family, hidden_size, num_heads)
    rope = parse_rope(raw, max_positions)
    if rope.rope_type is RopeType.FACTORS and len(rope.factors) != head_dim // 2:
        raise fields.error("rope_parameters", f"has {len(rope.factors)} factors, half of head_dim {head_dim} needed")
    if rope.rope_type is RopeType.DYNAMIC and head_dim == 2:
        raise fields.error("head_dim", "must exceed 2 for dynamic rotary scaling")
    return ModelArchitecture(
        architecture=name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", 1, _MAX_DIM),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 0.0, 1.0, 1e-6),
        rope=rope,
        qkv_bias=family.qkv_bias(fields),
        output_bias=family.output_bias(fields),
        mlp_bias=family.mlp_bias(fields),
        qk_norm=family.qk_norm,
        tie_embeddings=fields.boolean("tie_word_embeddings", False),
        layer_windows=family.windows(fields, num_layers),
        stored_dtype=_stored_dtype(fields),
        eos_token_ids=_eos_token_ids(fields, Fields(generation, "generation_config.json"), vocab_size),
        weight_format=_weight_format(fields),
    )


def _weight_format(fields: Fields) -> str | None:
    if not fields.has("quantization_config"):
        return None
    # Imported late: it loads torch, which `tandem up` seldom needs.
    from engine.model.checkpoints.registry import parse_format

    found = parse_format(fields.get("quantization_config"))
    return None if found is None else found.description


def _architecture(fields: Fields) -> str:
    names = fields.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in list(_FAMILIES):
        raise fields.error("architectures", f"must be one of {', '.join(_FAMILIES)}, is {names!r:.80}")
    return str(names[0])


def _head_dim(fields: Fields, family: _Family, hidden_size: int, num_heads: int) -> int:
    if not fields.has("head_dim") and family.default_head_dim is None and hidden_size % num_heads:
        raise fields.error("hidden_size", f"{hidden_size} is not a multiple of {num_heads} attention heads")
    head_dim = fields.integer("head_dim", 1, 4096, family.default_head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise fields.error("head_dim", f"must be even for rotary positions, is {head_dim}")
    return head_dim


def _stored_dtype(fields: Fields) -> str | None:
    name = fields.get("dtype") or fields.get("torch_dtype")
    if name is None:
        return None
    if name not in _STORED_DTYPES:
        raise fields.error("dtype", f"must be one of {', '.join(_STORED_DTYPES)}, is {name!r:.40}")
    return str(name)


def _eos_token_ids(config: Fields, generation: Fields, vocab_size: int) -> tuple[int, ...]:
    """End tokens; generation_config.json's take precedence, since instruction-tuned models often add some only
    there.
    """
    found: set[int] = set()
    for fields in (config, generation):
        if (value := fields.get("eos_token_id")) is None:
            continue
        ids = value if isinstance(value, list) else [value]
        valid = all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < vocab_size for i in ids)
        if not valid or len(ids) > _MAX_EOS:
            bound = f"at most {_MAX_EOS} token ids below vocab_size {vocab_size}"
            raise fields.error("eos_token_id", f"must be {bound}, is {value!r:.40}")
        found = set(ids)
    return tuple(sorted(found))


def _check_windows(fields: Fields) -> None:
    """Check window fields even where they are not used: a negative value means that the file is not as it should be."""
    for name in ("sliding_window", "max_window_layers"):
        if fields.has(name):
            fields.integer(name, 0, _MAX_POSITIONS)


def _no_windows(_fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    return (None,) * num_layers


def _mistral_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    return (_sliding_window(fields),) * num_layers


def _qwen_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Windows by `layer_types` if given; else all layers from `max_window_layers` on have one."""
    window = _sliding_window(fields) if fields.boolean("use_sliding_window", False) else None
    types = fields.get("layer_types")
    if types is None:
        first = fields.integer("max_window_layers", 0, _MAX_POSITIONS, 28)
        return tuple(window if i >= first else None for i in range(num_layers))
    known = ["full_attention", "sliding_attention"]
    if not isinstance(types, list) or len(types) != num_layers or any(t not in known for t in types):
        raise fields.error("layer_types", f"must be {num_layers} of {', '.join(known)}")
    if "sliding_attention" in types and window is None:
        raise fields.error("layer_types", "has sliding_attention, but no sliding_window is in use")
    return tuple(window if t == "sliding_attention" else None for t in types)


def _sliding_window(fields: Fields) -> int | None:
    """The window; 4096 if absent, as in transformers, and None only for an explicit null."""
    if fields.is_null("sliding_window"):
        return None
    return fields.integer("sliding_window", 1, _MAX_POSITIONS, 4096)


def _attention_bias(fields: Fields) -> bool:
    return fields.boolean("attention_bias", False)


def _mlp_bias(fields: Fields) -> bool:
    return fields.boolean("mlp_bias", False)


def _always(_fields: Fields) -> bool:
    return True


def _never(_fields: Fields) -> bool:
    return False


def _enum_value(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    raise ConfigError(f"cannot digest {type(value).__name__}")


_FAMILIES: dict[str, _Family] = {
    "LlamaForCausalLM": _Family(
        qkv_bias=_attention_bias, output_bias=_attention_bias, mlp_bias=_mlp_bias, windows=_no_windows
    ),
    "MistralForCausalLM": _Family(
        qkv_bias=_never,
        output_bias=_never,
        mlp_bias=_never,
        windows=_mistral_windows,
        default_kv_heads=8,
        default_max_positions=131_072,
    ),
    "Qwen2ForCausalLM": _Family(
        qkv_bias=_always,
        output_bias=_never,
        mlp_bias=_never,
        windows=_qwen_windows,
        default_max_positions=32_768,
    ),
    "Qwen3ForCausalLM": _Family(
        qkv_bias=_attention_bias,
        output_bias=_attention_bias,
        mlp_bias=_never,
        windows=_qwen_windows,
        qk_norm=True,
        default_head_dim=128,
        default_max_positions=32_768,
    ),
}
