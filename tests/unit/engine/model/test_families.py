"""Every family against transformers on small random models, in float32: chunks, decoding, prefix hits, ranks."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model.config import parse_model_config
from engine.model.families.registry import FAMILIES
from engine.model.parameters import parameter_table
from engine.model.shard import Shard
from engine.model.spec import ModelSpec
from engine.types.request import BlockTable
from tandem.errors import ConfigError
from tests.support.engine.families import FAMILY_CASES, FamilyCase
from tests.support.engine.paged_harness import Session, load_plain, random_tokens, reference_logits

TOLERANCE = 1e-4


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0.0)


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """The most likely tokens, one by one."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def test_families_all_have_a_case() -> None:
    before = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}  # test_parity
    assert {case.served_as for case in FAMILY_CASES} | before == FAMILIES.keys()


@pytest.mark.parametrize("case", FAMILY_CASES, ids=lambda case: case.name)
def test_families_equal_transformers(case: FamilyCase, tmp_path: Path) -> None:
    rng = random.Random(case.name)
    reference = case.model()
    case.save(reference, tmp_path)
    model = load_plain(tmp_path)
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

    hit = session.request(tokens, capacity=24)
    others = list(chunked.block_table)[:6]  # 24 tokens that another request has computed
    hit.block_table = BlockTable([*others, *hit.block_table])
    hit.num_computed_tokens = 24
    close(session.logits(hit, 21), expected[24:])


@pytest.mark.parametrize("case", FAMILY_CASES, ids=lambda case: case.name)
def test_families_choose_transformers_tokens(case: FamilyCase, tmp_path: Path) -> None:
    """Two requests in one mixed batch, in chunks, so that only wanted rows leave the last layer."""
    rng = random.Random(case.name)
    reference = case.model()
    case.save(reference, tmp_path)
    session = Session(load_plain(tmp_path), seed=3)
    prompts = [random_tokens(rng, 21), random_tokens(rng, 9)]
    requests = [session.request(prompt, capacity=40) for prompt in prompts]
    session.run(requests, num_output=8, chunk=6, rng=rng)
    for prompt, request in zip(prompts, requests, strict=True):
        assert list(request.token_ids[len(prompt) :])[:8] == greedy(reference, prompt, 8)


def parse(architecture: str, **changes: Any) -> ModelSpec:
    raw = {
        "architectures": [architecture],
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        **changes,
    }
    return parse_model_config({name: value for name, value in raw.items() if value is not ...}, {})


@pytest.mark.parametrize("architecture", FAMILIES)
def test_families_read_minimal_configurations(architecture: str) -> None:
    """Whatever a file may leave out has transformers' default, and every stored tensor one parameter."""
    spec = parse(architecture)
    parts = [part for parts in parameter_table(spec).values() for part in parts]
    assert len({(part.name, part.begin) for part in parts}) == len(parts)
    assert spec.digest() != parse(architecture, hidden_size=128, head_dim=32).digest()


def test_unsupported_architecture_is_refused_with_all_that_are() -> None:
    with pytest.raises(ConfigError) as refused:
        parse("DeepseekV3ForCausalLM")
    message = str(refused.value)
    assert "\n" not in message
    assert all(name in message for name in FAMILIES)


@pytest.mark.parametrize(
    ("architecture", "changes", "match"),
    [
        ("Phi3ForCausalLM", {"attention_bias": True}, "attention_bias must be false, is True"),
        ("Phi3ForCausalLM", {"lm_head_bias": True}, "lm_head_bias must be false"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 0.0}, "partial_rotary_factor must leave an even part"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 0.2}, "leaves 3 of 16"),
        (
            "Phi3ForCausalLM",
            {"rope_scaling": {"type": "su", "short_factor": [1.0] * 7, "long_factor": [1.0] * 8}},
            "short_factor must have 8 numbers, has 7",
        ),
        ("GraniteForCausalLM", {"residual_multiplier": 0.0}, "residual_multiplier must be a number in"),
        ("GraniteForCausalLM", {"logits_scaling": "4"}, "logits_scaling"),
        ("Olmo2ForCausalLM", {"clip_qkv": 8.0}, "clip_qkv"),
        ("Olmo3ForCausalLM", {"layer_types": ["sliding_attention"]}, "layer_types must be 4"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 1, 1]}, "no_rope_layers must be 4 numbers"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [0, 0, 0, 0]}, "no_rope_layers"),
        ("StableLmForCausalLM", {"hidden_act": "gelu"}, "hidden_act must be silu"),
        ("StableLmForCausalLM", {"use_parallel_residual": 1}, "use_parallel_residual must be true or false"),
        ("Glm4ForCausalLM", {"partial_rotary_factor": 2.0}, "partial_rotary_factor"),
        ("CohereForCausalLM", {"use_qk_norm": True}, "use_qk_norm must be false, is True"),
        ("CohereForCausalLM", {"logit_scale": 0.0}, "logit_scale"),
        ("Cohere2ForCausalLM", {"layer_types": ["full_attention"] * 4}, "no layer would rotate"),
        ("Gemma2ForCausalLM", {"hidden_activation": "relu"}, "hidden_activation must be gelu_pytorch_tanh, is 'relu'"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention must be false"),
        ("Gemma3ForCausalLM", {"rope_parameters": {"full_attention": 3}}, "full_attention must be an object"),
        ("Gemma3ForCausalLM", {"rope_local_base_freq": 0.5}, "rope_local_base_freq"),
        ("Gemma2ForCausalLM", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping"),
        (
            "MixtralForCausalLM",
            {"num_local_experts": 4, "num_experts_per_tok": 5},
            r"num_experts_per_tok must be .* \[1, 4\]",
        ),
        ("MixtralForCausalLM", {"num_local_experts": 0}, "num_local_experts must be an integer in"),
        (
            "Qwen3MoeForCausalLM",
            {"num_experts": 4, "num_local_experts": 8},
            "num_experts and num_local_experts must be the same number",
        ),
        ("Qwen3MoeForCausalLM", {"mlp_only_layers": 3}, "mlp_only_layers must be a list of numbers of layers"),
        ("Qwen3MoeForCausalLM", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ("Qwen3MoeForCausalLM", {"norm_topk_prob": "yes"}, "norm_topk_prob must be true or false"),
        ("Qwen2MoeForCausalLM", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size"),
        ("Qwen2MoeForCausalLM", {"moe_intermediate_size": -1}, "moe_intermediate_size"),
        ("OlmoeForCausalLM", {"clip_qkv": 8.0}, "clip_qkv"),
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1 is not supported"),
    ],
)
def test_families_refuse_what_is_not_implemented_by_name(
    architecture: str, changes: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        parse(architecture, **changes)


def test_mixture_layers_are_those_that_the_file_names() -> None:
    def sparse(**changes: Any) -> list[bool]:
        return [layer.moe is not None for layer in parse("Qwen3MoeForCausalLM", **changes).layers]

    assert sparse() == [True] * 4
    assert sparse(mlp_only_layers=[0, 3]) == [False, True, True, False]
    assert sparse(decoder_sparse_step=2) == [False, True, False, True]
    assert sparse(decoder_sparse_step=2, mlp_only_layers=[1]) == [False, False, False, True]
    assert parse("Qwen3MoeForCausalLM", mlp_only_layers=[0, 1, 2, 3]).moe is None


@pytest.mark.parametrize("changes", [{"num_experts_per_tok": 3}, {"norm_topk_prob": True}, {"mlp_only_layers": [2]}])
def test_mixture_is_part_of_the_digest(changes: dict[str, Any]) -> None:
    assert parse("Qwen3MoeForCausalLM").digest() != parse("Qwen3MoeForCausalLM", **changes).digest()
    assert parse("Qwen3MoeForCausalLM").digest() == parse("Qwen3MoeForCausalLM").digest()


def test_mixture_counts_the_operations_of_chosen_experts() -> None:
    sizes = {"num_experts": 10, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}
    dense = parse("Qwen3ForCausalLM", intermediate_size=32, head_dim=16).flops_per_token
    routers = 2 * 4 * 10 * 64
    assert parse("Qwen3MoeForCausalLM", **sizes).flops_per_token == dense + routers
    shared = {**sizes, "shared_expert_intermediate_size": 96}
    more = 2 * 4 * 64 * (3 * 96 + 1)
    assert parse("Qwen2MoeForCausalLM", **shared).flops_per_token == dense + routers + more


def test_experts_that_ranks_cannot_share_are_refused_by_field() -> None:
    for architecture, changes, field in (
        ("Qwen3MoeForCausalLM", {"moe_intermediate_size": 15}, "moe_intermediate_size, which is 15"),
        (
            "Qwen2MoeForCausalLM",
            {"shared_expert_intermediate_size": 15},
            "shared_expert_intermediate_size, which is 15",
        ),
        ("Qwen3MoeForCausalLM", {"intermediate_size": 15, "mlp_only_layers": [1]}, "intermediate_size, which is 15"),
        ("MixtralForCausalLM", {"intermediate_size": 15}, "config.json's intermediate_size, which is 15"),
    ):
        with pytest.raises(ConfigError, match=field):
            Shard(parse(architecture, **changes), rank=0, size=2)
    Shard(parse("Qwen3MoeForCausalLM", intermediate_size=15), rank=0, size=2)  # no layer has such an MLP


def test_gemma3_reads_the_older_layout_of_its_rotations() -> None:
    new = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    old = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    changes = {"num_hidden_layers": 6}
    assert parse("Gemma3ForCausalLM", **changes, rope_parameters=new) == parse("Gemma3ForCausalLM", **changes, **old)


def test_longrope_positions_beyond_the_original_context_equal_transformers_generation(tmp_path: Path) -> None:
    """Token by token over a cache, as transformers generates: keys keep the rotation that they were written with."""
    case = next(case for case in FAMILY_CASES if case.name == "phi4-mini")
    rope = {**case.changes["rope_parameters"], "original_max_position_embeddings": 16}
    reference = case.model(rope_parameters=rope, original_max_position_embeddings=16)
    case.save(reference, tmp_path)
    tokens = random_tokens(random.Random(5), 30)
    cache, expected = None, []
    with torch.no_grad():
        for token in tokens:
            found = reference(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache = found.past_key_values
            expected.append(found.logits[0, -1])
    session = Session(load_plain(tmp_path))
    request = session.request(tokens, capacity=32)
    ours = torch.cat([session.logits(request, count) for count in (11, 13, 1, 5)])
    close(ours, torch.stack(expected))
