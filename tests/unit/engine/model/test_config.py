"""config.json: transformers' meanings and defaults, and an error naming the field for everything else."""

import json

import pytest

from engine.model.config import load_model_config, parse_model_config
from engine.model.spec import NormSpec, QKNorm
from tandem.errors import ConfigError

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}


def parse(architecture="LlamaForCausalLM", generation=None, **changes):
    raw = {**BASE, "architectures": [architecture], **changes}
    return parse_model_config({k: v for k, v in raw.items() if v is not ...}, generation or {})


def biases(config):
    layer = config.layers[0]
    return layer.qkv_bias, layer.output_bias, layer.mlp_bias


def test_model_config_defaults_equal_transformers():
    config = parse()
    assert (config.num_kv_heads, config.head_dim, config.tie_embeddings) == (4, 16, False)
    assert biases(config) == (False,) * 3
    assert config.layers == (config.layers[0],) * 4
    assert config.layers[0].qk_norm is None
    assert config.layer_windows == (None,) * 4
    assert config.norm == NormSpec(eps=1e-6)
    assert config.max_context == 128
    assert config.stored_dtype is None
    assert parse("Qwen3ForCausalLM").head_dim == 128
    assert parse("MistralForCausalLM", num_attention_heads=8, hidden_size=64).num_kv_heads == 8


def test_model_config_biases_follow_architecture():
    llama = parse(attention_bias=True, mlp_bias=True)
    assert biases(llama) == (True, True, True)
    qwen2 = parse("Qwen2ForCausalLM")
    assert biases(qwen2) == (True, False, False)
    qwen3 = parse("Qwen3ForCausalLM", attention_bias=True)
    assert biases(qwen3) == (True, True, False)
    assert qwen3.layers[0].qk_norm is QKNorm.HEAD


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_model_config_reads_qwen_sliding_windows(architecture):
    assert parse(architecture, sliding_window=8, max_window_layers=0).layer_windows == (None,) * 4
    used = {"use_sliding_window": True, "sliding_window": 8}
    assert parse(architecture, **used, max_window_layers=3).layer_windows == (None, None, None, 8)
    types = ["sliding_attention", "full_attention"] * 2
    assert parse(architecture, **used, layer_types=types).layer_windows == (8, None, 8, None)


def test_model_config_reads_mistral_sliding_windows():
    kv = {"num_key_value_heads": 2}
    assert parse("MistralForCausalLM", **kv, sliding_window=9).layer_windows == (9,) * 4
    assert parse("MistralForCausalLM", **kv, sliding_window=None).layer_windows == (None,) * 4
    assert parse("MistralForCausalLM", **kv).layer_windows == (4096,) * 4


def test_end_tokens_prefer_generation_config():
    assert parse().eos_token_ids == ()
    assert parse(eos_token_id=7).eos_token_ids == (7,)
    assert parse(eos_token_id=7, generation={"eos_token_id": [9, 3, 9]}).eos_token_ids == (3, 9)
    assert parse(eos_token_id=7, generation={"eos_token_id": None}).eos_token_ids == (7,)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures"),
        ({"architectures": ...}, "architectures"),
        ({"hidden_size": -1}, r"hidden_size must be an integer in \[1, 1048576\], is -1"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": 10**4000}, "hidden_size"),
        ({"hidden_size": 66}, "hidden_size 66 is not a multiple"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of 3"),
        ({"num_key_value_heads": 8}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "head_dim must exceed 2"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"dtype": "int8"}, "dtype"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"quip_params": {"codebook": "E8P12"}}, "quip_params says that weights are stored as QuIP#"),
        ({"eos_token_id": 100}, r"^config.json: eos_token_id must be .* below vocab_size 100, is 100$"),
        (
            {"eos_token_id": 100, "generation": {"eos_token_id": 1}},
            r"^config.json: eos_token_id must be .* below vocab_size 100, is 100$",
        ),
        (
            {"eos_token_id": 1, "generation": {"eos_token_id": [1, 100]}},
            r"^generation_config.json: eos_token_id must be .* below vocab_size 100, is \[1, 100\]$",
        ),
        ({"sliding_window": -1}, r"^config.json: sliding_window must be an integer in \[0, 2147483647\], is -1$"),
        ({"max_window_layers": -1}, r"^config.json: max_window_layers must be an integer in \[0, "),
        ({"eos_token_id": [1, "2"]}, "eos_token_id"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
    ],
)
def test_model_config_bad_fields_are_named(changes, match):
    with pytest.raises(ConfigError, match=match):
        parse(**changes)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types must be 4"),
        ({"layer_types": [["full_attention"]] * 4}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 4}, "no sliding_window is in use"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window"),
        ({"use_sliding_window": True, "sliding_window": -4}, "sliding_window must be an integer"),
        ({"use_sliding_window": False, "sliding_window": -4}, "sliding_window must be an integer"),
    ],
)
def test_model_config_bad_windows_are_named(changes, match):
    with pytest.raises(ConfigError, match=match):
        parse("Qwen2ForCausalLM", **changes)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "not valid JSON"),
        ("[]", "must be a JSON object"),
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"a": 1, "a": 2}', "duplicate keys"),
        ('{"a":' * 100_000, "not valid JSON"),
        ('{"a": ' + "1" * 5000 + "}", "not valid JSON"),
    ],
)
def test_model_config_malformed_file_is_refused(tmp_path, text, match):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=match):
        load_model_config(tmp_path)


def test_model_config_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        load_model_config(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        load_model_config(tmp_path / "none")


def test_model_config_digest_covers_the_computation(tmp_path):
    assert parse().digest() == parse(eos_token_id=3, dtype="bfloat16").digest()
    assert len({parse(rms_norm_eps=e).digest() for e in (1e-5, 1e-6)}) == 2
    assert parse(rope_theta=5e4).digest() != parse().digest()


@pytest.mark.parametrize(
    ("architecture", "changes", "digest"),
    [
        ("LlamaForCausalLM", {}, "99dbfe4b0062ded15ac6368043a4870ad0710b8824d2d0a57c39978fbb5d241c"),
        (
            "LlamaForCausalLM",
            {
                "attention_bias": True,
                "mlp_bias": True,
                "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
            },
            "40d855c442339a5f1c07baa80fd180f3a3f02274c1bfa33800c4027c6e9aa9ed",
        ),
        (
            "MistralForCausalLM",
            {"num_key_value_heads": 2, "sliding_window": 9},
            "86d7189f8003fa23cf3d0336db81b073e2e74e4b4440cb944af091235749bcd7",
        ),
        (
            "Qwen2ForCausalLM",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
            "aac373dd5632c8b7f33c2e04daeb6c9fd984d6786a83fa6233b8b291e9a2b3b2",
        ),
        (
            "Qwen3ForCausalLM",
            {"tie_word_embeddings": True},
            "13700a4360a56e6b171c61a851a4bf8e7ba4216311ba006358dd92ec2c1c98f2",
        ),
    ],
)
def test_model_config_digest_survives_updates(architecture, changes, digest):
    """Workers of two versions exchange KV only if they name a model's computation alike: as version 0.1.0 did."""
    assert parse(architecture, **changes).digest().hex() == digest


def test_model_config_end_tokens_come_from_generation_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 4}')
    assert load_model_config(tmp_path).eos_token_ids == (4,)
