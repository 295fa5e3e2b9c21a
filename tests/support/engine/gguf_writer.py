"""Writes a model directory as one GGUF file, as llama.cpp's converter would, by the `gguf` package.

No code of ours, but what rounds to the "K" types: the package cannot.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.engine.k_quants import K_TYPES, quantized_k

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
Change = Callable[[gguf.GGUFWriter], None]


def write_gguf(
    source: Path,
    target: Path,
    *,
    block_type: str = "F32",
    pre: str | None = None,
    scores: list[float] | None = None,
    change: Change = lambda writer: None,
) -> dict[str, Tensor]:
    """Write `source` to the file `target`; returns its tensors as they are restored from the file, in float32.

    `block_type`: of matrices whose rows are whole blocks of it; others, and vectors, are F32. `Q4_K_M`: two types, as
    llama.cpp's tools mix them. `pre`: name of the pre-tokenizer, or `scores` of SentencePiece's tokens. `change`: adds
    to the metadata, or replaces what is there.
    """
    config = json.loads((source / "config.json").read_text())
    tensors: dict[str, Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        tensors |= load_file(file)
    short = ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(target, short)
    add_architecture(writer, config)
    if (source / "tokenizer.json").exists():
        add_tokenizer(writer, source, vocab_size=config["vocab_size"], pre=pre, scores=scores)
    change(writer)
    restored = add_tensors(writer, tensors, config, block_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return restored


def add_architecture(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name("made in a test")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    rope = config.get("rope_parameters") or {}
    writer.add_rope_freq_base(rope.get("rope_theta") or config["rope_theta"])
    if config.get("sliding_window") and config["architectures"] == ["MistralForCausalLM"]:
        writer.add_sliding_window(config["sliding_window"])
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def add_tokenizer(
    writer: gguf.GGUFWriter, source: Path, *, vocab_size: int, pre: str | None, scores: list[float] | None
) -> None:
    spec = json.loads((source / "tokenizer.json").read_text())
    texts = {i: token for token, i in spec["model"]["vocab"].items()}
    types = dict.fromkeys(texts, NORMAL)
    for added in spec["added_tokens"]:
        texts[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    unknown = spec["model"].get("unk_token")
    for i, text in texts.items():
        if text == unknown:
            types[i] = UNKNOWN
        elif spec["model"].get("byte_fallback") and len(text) == 6 and text.startswith("<0x"):
            types[i] = BYTE
    tokens = [texts.get(i, f"[PAD{i}]") for i in range(vocab_size)]
    writer.add_tokenizer_model("gpt2" if scores is None else "llama")
    writer.add_tokenizer_pre(pre or "default")
    writer.add_token_list(tokens)
    writer.add_token_types([types.get(i, UNUSED) for i in range(vocab_size)])
    if scores is None:
        writer.add_token_merges([" ".join(pair) for pair in spec["model"]["merges"]])
    else:
        writer.add_token_scores(scores)
    named = json.loads((source / "tokenizer_config.json").read_text())
    for name, add in (
        ("bos_token", writer.add_bos_token_id),
        ("eos_token", writer.add_eos_token_id),
        ("unk_token", writer.add_unk_token_id),
        ("pad_token", writer.add_pad_token_id),
    ):
        if named.get(name):
            add(tokens.index(named[name]))
    if "add_bos_token" in named:
        writer.add_add_bos_token(named["add_bos_token"])
    if named.get("chat_template"):
        writer.add_chat_template(named["chat_template"])


def add_tensors(
    writer: gguf.GGUFWriter, tensors: Mapping[str, Tensor], config: Mapping[str, Any], block_type: str
) -> dict[str, Tensor]:
    short = ARCHITECTURES[config["architectures"][0]]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[short.upper()], config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    restored = {}
    for name, tensor in tensors.items():
        values = tensor.float().numpy()
        quantized = gguf.GGMLQuantizationType[_type_of(name, block_type)]
        block_size = gguf.GGML_QUANT_SIZES[quantized][0]
        if values.ndim == 1 or values.shape[-1] % block_size:
            quantized = gguf.GGMLQuantizationType.F32
        is_k = quantized.name in K_TYPES
        stored = quantized_k(values, quantized.name) if is_k else gguf.quants.quantize(values, quantized)
        restored[name] = torch.from_numpy(gguf.quants.dequantize(stored, quantized).astype(np.float32))
        if short == "llama" and (num_heads := heads.get(name.split(".")[-2])):
            rows = stored.reshape(num_heads, 2, stored.shape[0] // num_heads // 2, -1)
            stored = rows.swapaxes(1, 2).reshape(stored.shape)
        title = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(title, np.ascontiguousarray(stored), raw_dtype=quantized)
    return restored


def _type_of(name: str, block_type: str) -> str:
    if block_type != "Q4_K_M":
        return block_type
    return "Q6_K" if any(part in name for part in ("v_proj", "down_proj", "embed_tokens", "lm_head")) else "Q4_K"
