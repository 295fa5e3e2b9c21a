"""Frequencies of real checkpoints' settings against transformers, and the parsing of both layouts."""

import pytest
import torch

from engine.model.layers.rope import RotaryEmbedding, base_frequencies, rotate_
from engine.model.rope_config import RopeType, parse_rope
from tandem.errors import ConfigError

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
QWEN_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
CASES = [
    (None, 10_000.0, 4096, 64),
    ({"type": "linear", "factor": 4.0}, 10_000.0, 16384, 128),
    ({"type": "dynamic", "factor": 2.0}, 10_000.0, 4096, 128),
    (LLAMA3, 500_000.0, 131072, 128),
    (QWEN_YARN, 1_000_000.0, 32768, 128),
    ({**QWEN_YARN, "attention_factor": 0.9, "beta_fast": 16, "beta_slow": 2, "truncate": False}, 1e4, 32768, 64),
    ({**QWEN_YARN, "mscale": 0.7, "mscale_all_dim": 1.2}, 1e4, 131072, 64),
    ({"rope_type": "yarn", "factor": 4.0}, 1e4, 64, 32),
]


def reference(scaling, theta, max_positions, head_dim):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=head_dim * 2,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rope_theta=theta,
        rope_scaling=dict(scaling) if scaling else None,
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize(("scaling", "theta", "max_positions", "head_dim"), CASES)
def test_rope_angles_equal_transformers(scaling, theta, max_positions, head_dim):
    expected = reference(scaling, theta, max_positions, head_dim)
    old = parse_rope({"rope_theta": theta, "rope_scaling": scaling}, max_positions)
    flat = {**(scaling or {}), "rope_theta": theta}
    flat["rope_type"] = flat.pop("type", flat.get("rope_type", "default"))
    assert parse_rope({"rope_parameters": flat}, max_positions) == old
    torch.testing.assert_close(base_frequencies(old, head_dim), expected.inv_freq, rtol=1e-6, atol=0.0)
    assert old.attention_factor == pytest.approx(expected.attention_scaling)
    positions = torch.arange(0, 60, 7)
    cos, sin = RotaryEmbedding(old, head_dim).angles(positions, torch.float32)
    their_cos, their_sin = expected(torch.zeros(1), positions[None])
    torch.testing.assert_close(cos[:, 0], their_cos[0], atol=1e-5, rtol=0.0)
    torch.testing.assert_close(sin[:, 0, head_dim // 2 :], their_sin[0, :, head_dim // 2 :], atol=1e-5, rtol=0.0)


def test_rope_dynamic_angles_beyond_context_match_reference():
    config = parse_rope({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, 16)
    cos, _ = RotaryEmbedding(config, 32).angles(torch.arange(60), torch.float32)
    for last in (10, 15, 16, 17, 40, 59):
        expected, _ = reference({"type": "dynamic", "factor": 4.0}, 1e4, 16, 32)(torch.zeros(1), torch.tensor([[last]]))
        torch.testing.assert_close(cos[last, 0], expected[0, 0], atol=1e-5, rtol=0.0)


def test_rope_rotation_keeps_norms_and_depends_on_distance():
    rope = RotaryEmbedding(parse_rope({}, 64), 16)
    vectors = torch.randn(1, 2, 16, generator=torch.Generator().manual_seed(0))
    scores = []
    for shift in (0, 5, 30):
        rows = vectors.expand(2, -1, -1).clone()
        rotate_(rows, *rope.angles(torch.tensor([shift, shift + 3]), torch.float32))
        torch.testing.assert_close(rows.norm(dim=-1), vectors.norm(dim=-1).expand(2, -1))
        scores.append(float(rows[0, 0] @ rows[1, 1]))
    assert scores == pytest.approx([scores[0]] * 3, abs=1e-4)


@pytest.mark.parametrize(
    ("rope", "max_context"),
    [
        ({"rope_type": "default"}, 100),
        ({"rope_type": "linear", "factor": 2.0}, 100),
        ({"rope_type": "dynamic", "factor": 2.0}, 200),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 50}, 200),
    ],
)
def test_rope_scaling_extends_context(rope, max_context):
    assert parse_rope({"rope_parameters": rope}, 100).max_context == max_context


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        ({"rope_scaling": {"type": "proportional"}}, "rope_type"),
        ({"rope_scaling": {"type": "longrope"}}, "short_factor must be a list"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": ["x"]}}, r"long_factor\[0\]"),
        ({"rope_scaling": {"type": ["yarn"]}}, "rope_type"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0.0}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": True}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 10**400}}, "factor"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_scaling": {**QWEN_YARN, "original_max_position_embeddings": 0}}, "original_max_position_embeddings"),
        ({"rope_scaling": {**QWEN_YARN, "beta_fast": 0.5}}, "beta_fast"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_theta": "10000"}, "rope_theta"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_rope_bad_settings_are_named(raw, field):
    with pytest.raises(ConfigError, match=field):
        parse_rope(raw, 64)


def test_rope_without_parameters_has_defaults():
    assert parse_rope({}, 64).rope_type is RopeType.DEFAULT
