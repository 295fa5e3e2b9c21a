"""A GGUF file's configuration is that of the directory it was made of, and what is not supported is refused by name."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from engine.model.config import load_model_config, parse_model_config
from engine.model.dtype import stored_dtype
from engine.model.layers.rope import base_frequencies
from engine.model.loader import expected_shapes
from engine.model.spec import ModelSpec
from router.api.request.generation_defaults import load_generation_defaults
from tandem.errors import ConfigError
from tandem.model_files import read_model_text
from tests.support.engine.gguf_writer import CONTROL, NORMAL, write_gguf

BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "eos_token_id": [],
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "llama-biases": {"architectures": ["LlamaForCausalLM"], "attention_bias": True, "mlp_bias": True},
    "llama-tied": {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True, "head_dim": 8},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 100},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "rms_norm_eps": 1e-6},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32, "tie_word_embeddings": True},
    "linear": {"architectures": ["LlamaForCausalLM"], "rope_parameters": {"rope_type": "linear", "factor": 2.5}},
    "yarn": {
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 16,
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    },
}
Change = Callable[[gguf.GGUFWriter], None]


def write(folder: Path, changes: dict[str, Any], *, block_type: str = "F32", change: Change = lambda w: None) -> Path:
    """Write a random model and its GGUF file. Returns the file, which lies beside nothing."""
    raw = BASE | changes
    source = folder / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(raw))
    draw = torch.Generator().manual_seed(3)
    shapes = expected_shapes(parse_model_config(raw, {}))
    save_file(
        {name: torch.randn(*shape, generator=draw) for name, shape in shapes.items()}, source / "model.safetensors"
    )
    (folder / "file").mkdir()
    write_gguf(source, folder / "file" / "model.gguf", block_type=block_type, change=change)
    return folder / "file" / "model.gguf"


def bare(config: ModelSpec) -> ModelSpec:
    """Without what a file has and a `config.json` has not."""
    return replace(config, weight_format=None, stored_dtype=None)


@pytest.mark.parametrize("family", FAMILIES)
def test_gguf_configuration_equals_that_of_the_directory(family: str, tmp_path: Path) -> None:
    file = write(tmp_path, FAMILIES[family])
    found = load_model_config(file)
    assert bare(found) == bare(load_model_config(tmp_path / "source"))
    assert (found.weight_format, found.stored_dtype) == ("GGUF (model.gguf)", "float32")
    theirs = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    assert (theirs.hidden_size, theirs.intermediate_size) == (found.hidden_size, found.intermediate_size)
    assert (theirs.num_attention_heads, theirs.num_key_value_heads) == (found.num_heads, found.num_kv_heads)
    assert (theirs.num_hidden_layers, theirs.vocab_size) == (found.num_layers, found.vocab_size)
    assert theirs.max_position_embeddings == found.max_context
    assert theirs.rms_norm_eps == pytest.approx(found.norm.eps, rel=1e-7)


def test_gguf_mistral_without_window_is_a_llama(tmp_path: Path) -> None:
    file = write(tmp_path, {"architectures": ["MistralForCausalLM"], "sliding_window": None})
    config = load_model_config(file)
    assert config.architecture == "LlamaForCausalLM"
    assert bare(config) == replace(bare(load_model_config(tmp_path / "source")), architecture="LlamaForCausalLM")


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def test_gguf_factors_of_frequencies_are_those_of_llama3(tmp_path: Path) -> None:
    changes = {"architectures": ["LlamaForCausalLM"], "head_dim": 64, "rope_scaling": LLAMA3}
    raw = BASE | changes
    wanted = base_frequencies(parse_model_config(raw, {}).ropes[0], 64)
    plain = base_frequencies(parse_model_config(raw | {"rope_scaling": None}, {}).ropes[0], 64)
    factors = (plain / wanted).numpy()
    assert len(set(factors.tolist())) > 4  # both bands, and some between

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", factors)

    rope = load_model_config(write(tmp_path, changes, change=add)).ropes[0]
    torch.testing.assert_close(base_frequencies(rope, 64), wanted, rtol=3e-7, atol=0.0)


def test_gguf_factors_have_to_fit_heads_and_be_positive(tmp_path: Path) -> None:
    llama = {"architectures": ["LlamaForCausalLM"]}
    for number, (values, match) in enumerate(
        [
            ([1.0] * 7, "rope_scaling: factors must have 8 numbers, has 7"),
            ([1.0] * 7 + [0.0], r"factors\[7\] must be"),
            ([1.0] * 7 + [-1.0], r"factors\[7\] must be"),
        ]
    ):
        (tmp_path / str(number)).mkdir()

        def add(writer: gguf.GGUFWriter, values: list[float] = values) -> None:
            writer.add_tensor("rope_freqs.weight", torch.tensor(values).numpy())

        with pytest.raises(ConfigError, match=match):
            load_model_config(write(tmp_path / str(number), llama, change=add))


def test_gguf_names_of_other_models_do_not_change() -> None:
    """A field that only GGUF files use must not rename the KV of models that the previous version serves."""
    config = parse_model_config(BASE | FAMILIES["llama"], {})
    assert config.digest().hex() == "48845f95c21313c91275c314703d5174016c5bba790a5c1d02c167975a5d3630"
    rope = config.ropes[0]
    assert rope is not None
    factors = replace(rope, factors=(1.0,) * 8)
    layers = tuple(replace(layer, rope=factors) for layer in config.layers)
    assert replace(config, layers=layers).digest() != config.digest()


@pytest.mark.parametrize(
    ("block_type", "dtype"), [("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("Q8_0", "bfloat16")]
)
def test_gguf_dtype_is_that_of_most_values(block_type: str, dtype: str, tmp_path: Path) -> None:
    assert stored_dtype(write(tmp_path, FAMILIES["qwen2"], block_type=block_type)) == dtype


def test_gguf_defaults_of_sampling_are_read(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_sampling_temp(0.6)
        writer.add_sampling_top_k(20)
        writer.add_sampling_top_p(0.95)
        writer.add_sampling_penalty_repeat(1.05)

    file = write(tmp_path, FAMILIES["qwen3"], change=add)
    expected = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    assert load_generation_defaults(file).to_json() == expected


def test_gguf_ends_are_all_that_the_file_names_or_that_are_known_by_name(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        tokens = [f"t{i}" for i in range(28)] + ["<|eot_id|>", "<|endoftext|>", "<|im_end|>", "<|other|>"]
        writer.add_token_list(tokens)
        writer.add_token_types([NORMAL] * 28 + [CONTROL, CONTROL, NORMAL, CONTROL])
        writer.add_eos_token_id(3)
        writer.add_eom_token_id(5)

    assert load_model_config(write(tmp_path, FAMILIES["llama"], change=add)).eos_token_ids == (3, 5, 28, 29)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda w: w.add_key_length(17), r"attention\.value_length must be attention\.key_length, 17"),
        (lambda w: w.add_rope_dimension_count(8), r"rope\.dimension_count must be attention\.key_length, 16"),
        (lambda w: w.add_expert_count(8), r"'llama\.expert_count' is not supported, is 8"),
        (lambda w: w.add_logit_scale(0.5), r"'llama\.logit_scale' is not supported, is 0\.5"),
        (lambda w: w.add_uint32("llama.whatever", 1), r"'llama\.whatever' is not supported, is 1"),
        (lambda w: w.add_causal_attention(False), r"attention\.causal must be true"),
        (lambda w: w.add_head_count_kv([2, 1]), r"attention\.head_count_kv must be an integer .*, is an array"),
        (lambda w: w.add_head_count(3), r"num_attention_heads 3 is not a multiple of 2 key-value heads"),
        (lambda w: w.add_head_count(2**31), r"attention\.head_count must be an integer in \[1, 2147483647\]"),
        (lambda w: w.add_block_count(2**20), r"num_hidden_layers must be an integer in \[1, 4096\], is 1048576"),
        (lambda w: w.add_layer_norm_rms_eps(float("nan")), r"layer_norm_rms_epsilon must be a finite number"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), r"rope\.scaling\.type must be none, linear"),
        (lambda w: w.add_rope_scaling_yarn_attn_factor(0.5), r"yarn_attn_factor' is not supported, is 0\.5"),
        (lambda w: w.add_string("general.type", "adapter"), r"general\.type must be model, is 'adapter'"),
        (lambda w: w.add_uint16("split.count", 3), r"split\.count is 3: merge the parts first"),
        (lambda w: w.add_string("general.architecture", "gemma3"), r"must be one of llama, qwen2, qwen3, is 'gemma3'"),
        (lambda w: w.add_sliding_window(4096), None),
    ],
)
def test_gguf_unsupported_metadata_is_refused_by_key(change: Change, match: str | None, tmp_path: Path) -> None:
    file = write(tmp_path, FAMILIES["llama"], change=change)
    if match is None:
        assert load_model_config(file).layer_windows == (4096, 4096)
        return
    with pytest.raises(ConfigError, match=match) as refused:
        load_model_config(file)
    assert "\n" not in str(refused.value)


def test_gguf_windows_of_qwen_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path, FAMILIES["qwen2"], change=lambda writer: writer.add_sliding_window(4096))
    with pytest.raises(ConfigError, match=r"'qwen2\.attention\.sliding_window' is not supported, is 4096"):
        load_model_config(file)


def test_gguf_has_no_other_files(tmp_path: Path) -> None:
    file = write(tmp_path, FAMILIES["llama"])
    with pytest.raises(ConfigError, match=r"model\.gguf has no chat_template\.jinja"):
        read_model_text(file / "chat_template.jinja", max_bytes=100)
    with pytest.raises(ConfigError, match="larger than 100 bytes"):
        read_model_text(file / "config.json", max_bytes=100)
