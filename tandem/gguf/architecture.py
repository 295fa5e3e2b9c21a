"""What `config.json` and `generation_config.json` would say of a GGUF file's model.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and what llama.cpp's converter writes. Every key of the
architecture is known here or refused, unless it switches nothing on: one that is ignored could change the answers.
Bounds are checked where a `config.json` is read (`engine/model/config.py`).
"""

from collections import Counter
from collections.abc import Sequence
from math import prod
from typing import Any

from tandem.errors import ConfigError
from tandem.gguf.container import GgufArray, GgufHeader

_FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_WINDOWED = "MistralForCausalLM"
"""The family of `llama` with a sliding window."""
_READ = frozenset(
    {
        *("vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length"),
        *("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
        *("attention.layer_norm_rms_epsilon", "attention.causal", "tensor_data_layout", "pooling_type"),
        *("rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor"),
        *("rope.scaling.original_context_length", "rope.scaling.finetuned"),
        *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
    }
)
"""Keys of an architecture that are read, or say nothing about how it is computed."""
_ONES = frozenset({"rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"})
"""Factors that may be there as long as they are 1."""
_SLIDING_WINDOW = "attention.sliding_window"
_ROPE_FACTORS = "rope_freqs.weight"
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_QUANTIZED_DTYPE = "bfloat16"
_TOKENS = "tokenizer.ggml."
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_TEXTS = frozenset(
    {
        *("</s>", "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>"),
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>"),
    }
)
"""Control tokens that end an answer by their texts, as in llama.cpp: files have no list of all end tokens."""
CONTROL = 3
"""Type of control tokens in `tokenizer.ggml.token_type`."""
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def config_json(header: GgufHeader) -> dict[str, Any]:
    """Raises ConfigError for an architecture that is not supported, and for keys that are missing or not known."""
    _check_kind(header)
    arch = header.text("general.architecture")
    if arch not in _FAMILIES:
        raise header.error("general.architecture", f"must be one of {', '.join(_FAMILIES)}, is {arch!r:.40}")
    _check_keys(header, arch)
    if (table := header.tensors.get("token_embd.weight")) is None:
        raise ConfigError(f"{header.name}: tensor token_embd.weight is missing")
    hidden_size = header.integer(f"{arch}.embedding_length", low=1)
    num_heads = header.integer(f"{arch}.attention.head_count", low=1)
    head_dim = header.integer(f"{arch}.attention.key_length", hidden_size // num_heads)
    if not header.has(f"{arch}.attention.key_length") and hidden_size % num_heads:
        raise header.error(f"{arch}.embedding_length", f"{hidden_size} is not a multiple of {num_heads} heads")
    for key in ("attention.value_length", "rope.dimension_count"):
        if header.integer(f"{arch}.{key}", head_dim) != head_dim:
            raise header.error(f"{arch}.{key}", f"must be attention.key_length, {head_dim}, all else is not supported")
    window = header.integer(f"{arch}.{_SLIDING_WINDOW}", 0) if arch == "llama" else 0
    return {
        "architectures": [_WINDOWED if window else _FAMILIES[arch]],
        "vocab_size": table.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": header.integer(f"{arch}.feed_forward_length"),
        "num_hidden_layers": header.integer(f"{arch}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": header.integer(f"{arch}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": header.integer(f"{arch}.context_length"),
        "rms_norm_eps": header.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(header, arch),
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": _dtype(header),
        "eos_token_id": _end_tokens(header),
        **({"sliding_window": window} if window else {}),
    }


def generation_config_json(header: GgufHeader) -> dict[str, Any]:
    """The defaults of sampling that the file states."""
    keys = {name: f"general.sampling.{key}" for key, name in _SAMPLING.items()}
    return {name: header.number(key) for name, key in keys.items() if header.has(key)}


def _check_kind(header: GgufHeader) -> None:
    if (kind := header.text("general.type", "model")) != "model":
        raise header.error("general.type", f"must be model, is {kind!r:.40}")
    if (num_parts := header.integer("split.count", 1)) > 1:
        raise header.error("split.count", f"is {num_parts}: merge the parts first (`llama-gguf-split --merge`)")


def _check_keys(header: GgufHeader, arch: str) -> None:
    known = {f"{arch}.{name}" for name in _READ | ({_SLIDING_WINDOW} if arch == "llama" else set())}
    ones = {f"{arch}.{name}" for name in _ONES}
    for key, value in header.metadata.items():
        if not key.startswith(f"{arch}.") or key in known or value in (0, "") or (key in ones and value == 1):
            continue
        shown = "an array" if isinstance(value, GgufArray) else f"{value!r:.40}"
        raise header.error(f"{key!r:.80}", f"is not supported, is {shown}")
    if not header.boolean(f"{arch}.attention.causal", True):
        raise header.error(f"{arch}.attention.causal", "must be true: this model does not generate text")


def _rope(header: GgufHeader, arch: str) -> dict[str, Any]:
    base = {"rope_theta": header.number(f"{arch}.rope.freq_base", 10_000.0)}
    scaling = f"{arch}.rope.scaling"
    # Before there were types of scaling, `scale_linear` was the factor.
    factor = header.number(f"{scaling}.factor", header.number(f"{arch}.rope.scale_linear", 0.0))
    kind = header.text(f"{scaling}.type", "linear" if factor else "none")
    if kind not in ("none", "linear", "yarn"):
        raise header.error(f"{scaling}.type", f"must be none, linear or yarn, is {kind!r:.40}")
    if (factors := header.tensors.get(_ROPE_FACTORS)) is not None:
        if kind != "none":
            raise header.error(f"{scaling}.type", f"must be none beside {_ROPE_FACTORS}, is {kind}")
        return base | {"rope_type": "factors", "factors": list(header.floats(factors))}
    if kind == "none" or factor in (0.0, 1.0):
        return base | {"rope_type": "default"}
    if kind == "linear":
        return base | {"rope_type": "linear", "factor": factor}
    original = header.integer(f"{scaling}.original_context_length")
    betas = {name: f"{scaling}.yarn_{name}" for name in ("beta_fast", "beta_slow")}
    stated = {name: header.number(key) for name, key in betas.items() if header.has(key)}
    return base | {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        **stated,
    }


def _dtype(header: GgufHeader) -> str:
    """The dtype that most values are stored in; bfloat16 where most are quantized."""
    num_values: Counter[str] = Counter()
    for tensor in header.tensors.values():
        num_values[_DTYPES.get(tensor.block_type.name, _QUANTIZED_DTYPE)] += prod(tensor.shape)
    return max(sorted(num_values), key=num_values.__getitem__)


def _end_tokens(header: GgufHeader) -> Sequence[int]:
    found = {header.integer(_TOKENS + key) for key in _END_KEYS if header.has(_TOKENS + key)}
    if header.has(f"{_TOKENS}tokens") and header.has(f"{_TOKENS}token_type"):
        texts, types = header.texts(f"{_TOKENS}tokens"), header.numbers(f"{_TOKENS}token_type")
        found |= {
            i
            for i, (text, kind) in enumerate(zip(texts, types, strict=False))
            if kind == CONTROL and text in _END_TEXTS
        }
    return sorted(found)
