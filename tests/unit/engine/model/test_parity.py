"""Every architecture, rope type and head layout against transformers, through shuffled paged blocks, in float32."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engine.paged_harness import (
    ARCHITECTURES,
    Session,
    random_tokens,
    reference_logits,
    reference_model,
    save_and_load,
)

TOLERANCE = 1e-4
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
}


def random_overrides(architecture: str, rope: str, rng: random.Random) -> dict[str, Any]:
    heads = rng.choice([2, 4, 6])
    overrides: dict[str, Any] = {
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([h for h in (1, 2, heads) if heads % h == 0]),
        "head_dim": rng.choice([8, 16]),
        "hidden_size": heads * rng.choice([4, 8]),
        "tie_word_embeddings": rng.random() < 0.5,
        "rope_parameters": {"rope_type": rope, "rope_theta": rng.choice([500.0, 10_000.0]), **ROPES[rope]},
    }
    if architecture == "MistralForCausalLM":
        overrides["sliding_window"] = rng.choice([None, 5, 13])
    if architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM"):
        overrides["attention_bias"] = rng.random() < 0.5
    if architecture == "LlamaForCausalLM":
        overrides["mlp_bias"] = rng.random() < 0.5
    if architecture.startswith("Qwen") and rng.random() < 0.6:
        overrides |= {"use_sliding_window": True, "sliding_window": rng.choice([6, 11]), "max_window_layers": 1}
    return overrides


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0.0)


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_parity_logits_equal_transformers(architecture: str, rope: str, tmp_path: Path) -> None:
    rng = random.Random(f"{architecture} {rope}")
    reference = reference_model(architecture, **random_overrides(architecture, rope, rng))
    model = save_and_load(reference, tmp_path, old_rope=rng.random() < 0.5)
    tokens = random_tokens(rng, 45)
    expected = reference_logits(reference, tokens)
    session = Session(model, seed=7)

    close(session.logits(session.request(tokens, capacity=48), len(tokens)), expected)

    chunked = session.request(tokens, capacity=60)
    while chunked.num_uncomputed_tokens:
        start = chunked.num_computed_tokens
        count = min(chunked.num_uncomputed_tokens, rng.randint(1, 17))
        close(session.logits(chunked, count), expected[start : start + count])

    decoding = session.request(tokens, capacity=48)
    session.logits(decoding, 33)
    for i in range(33, len(tokens)):
        close(session.logits(decoding, 1), expected[i : i + 1])


def greedy_reference(reference: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference_logits(reference, tokens)[-1].argmax()))
    return tokens


@pytest.mark.parametrize("window", [None, 9])
def test_parity_mixed_batch_matches_transformers(window: int | None, tmp_path: Path) -> None:
    rng = random.Random(3)
    reference = reference_model("MistralForCausalLM", sliding_window=window, num_hidden_layers=2)
    model = save_and_load(reference, tmp_path)
    prompts = [random_tokens(rng, n) for n in (1, 2, 3, 16, 17, 30, 41)]
    expected = [greedy_reference(reference, prompt, 6) for prompt in prompts]
    for chunk in (2, 16, 64):
        session = Session(model, num_blocks=100, seed=chunk)
        requests = [session.request(prompt, capacity=52) for prompt in prompts]
        session.run(requests, num_output=6, chunk=chunk, rng=rng)
        assert [list(r.token_ids)[: r.num_prompt_tokens + 6] for r in requests] == expected


def test_parity_dynamic_rope_beyond_context_equals_transformers(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    reference = reference_model("LlamaForCausalLM", rope_parameters=rope, max_position_embeddings=16)
    model = save_and_load(reference, tmp_path)
    assert model.config.max_context == 64
    tokens = random_tokens(random.Random(5), 40)
    with torch.no_grad():
        out = reference(torch.tensor([tokens[:12]]), use_cache=True)
        rows = [out.logits[0, -1]]
        for token in tokens[12:]:
            out = reference(torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
            rows.append(out.logits[0, -1])
    session = Session(model)
    request = session.request(tokens)
    close(session.logits(request, 12)[-1], rows[0])
    # In chunks or one by one: the rotation of a position depends on that position alone.
    for chunk in (1, 1, 9, 17):
        start = request.num_computed_tokens - 11
        close(session.logits(request, chunk), torch.stack(rows[start : start + chunk]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_parity_half_precision_stays_near_float32(dtype: str, tmp_path: Path) -> None:
    reference = reference_model("Qwen3ForCausalLM")
    model = save_and_load(reference, tmp_path, dtype=dtype)
    tokens = random_tokens(random.Random(1), 30)
    session = Session(model)
    request = session.request(tokens)
    ours = torch.cat([session.logits(request, n) for n in (20, 9, 1)])
    expected = reference_logits(reference, tokens)
    assert ours.dtype == torch.float32
    error = (ours - expected).norm() / expected.norm()
    assert error < (0.05 if dtype == "bfloat16" else 0.01)


def test_parity_shared_prefix_reads_other_requests_blocks(tmp_path: Path) -> None:
    reference = reference_model("LlamaForCausalLM")
    session = Session(save_and_load(reference, tmp_path))
    rng = random.Random(2)
    prefix = random_tokens(rng, 16)
    first = session.request(prefix + random_tokens(rng, 9))
    session.logits(first, first.num_tokens)
    second_tokens = prefix + random_tokens(rng, 14)
    second = session.request(second_tokens, capacity=32)
    for i in range(4):
        second.block_table.replace(i, first.block_table[i])
    second.num_computed_tokens = 16
    close(session.logits(second, 14), reference_logits(reference, second_tokens)[16:])
