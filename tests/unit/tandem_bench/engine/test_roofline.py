"""The roofline's arithmetic, against the issue's own figures for the reference model."""

import pytest

from tandem_bench.engine.roofline import ModelCost, mean_context
from tandem_bench.shapes import REFERENCE, SHAPES


@pytest.fixture
def cost() -> ModelCost:
    return ModelCost.from_config(SHAPES[REFERENCE].model_config(), "bfloat16")


def test_roofline_reference_model_matches_issue() -> None:
    assert SHAPES[REFERENCE].num_parameters == pytest.approx(0.44e9, rel=0.015)
    cost = ModelCost.from_config(SHAPES[REFERENCE].model_config(), "bfloat16")
    assert cost.weights_bytes == pytest.approx(0.889e9, rel=5e-4)


def test_roofline_tied_head_streams_every_weight_once(cost: ModelCost) -> None:
    assert cost.streamed_weights == SHAPES[REFERENCE].num_parameters


def test_roofline_untied_embedding_is_not_streamed() -> None:
    shape = SHAPES["8b"]
    cost = ModelCost.from_config(shape.model_config(), "bfloat16")
    assert cost.streamed_weights == shape.num_parameters - shape.vocab_size * shape.hidden_size


@pytest.mark.parametrize(
    ("gb_per_s", "concurrency", "tokens_per_s"),
    [(23, 1, 25.1), (23, 4, 91.8), (23, 16, 274), (12, 1, 13.1), (12, 4, 47.9), (12, 16, 143)],
)
def test_roofline_decode_limits(cost: ModelCost, gb_per_s: float, concurrency: int, tokens_per_s: float) -> None:
    limit = cost.decode_limit(concurrency, mean_context(512, 128), gb_per_s * 1e9)
    assert limit == pytest.approx(tokens_per_s, rel=2e-3)


@pytest.mark.parametrize(("tflops", "tokens_per_s"), [(5.3, 6790), (1.45, 1860)])
def test_roofline_prefill_limits_match_issue(cost: ModelCost, tflops: float, tokens_per_s: float) -> None:
    assert cost.prefill_limit(512, tflops * 1e12) == pytest.approx(tokens_per_s, rel=2e-3)


def test_roofline_longer_contexts_and_prompts_cost_more(cost: ModelCost) -> None:
    assert cost.decode_limit(16, 2048, 2e10) < cost.decode_limit(16, 512, 2e10)
    assert cost.prompt_flops_per_token(4096) > cost.prompt_flops_per_token(1024)


@pytest.mark.parametrize(("bits", "gb"), [(8, 0.4445), (4, 0.256)])
def test_roofline_quantized_weights(bits: int, gb: float) -> None:
    config = SHAPES[REFERENCE].model_config()
    cost = ModelCost.from_config(config, "bfloat16", bits=bits)
    head = config.vocab_size * config.hidden_size
    assert cost.weights_bytes == pytest.approx(cost.layer_weights * bits / 8 + head, rel=1e-3)
    assert cost.weights_bytes == pytest.approx(gb * 1e9, rel=5e-3)
    # Keys and values stay as they are.
    grown = cost.decode_step_bytes(2, 100.0) - cost.decode_step_bytes(1, 100.0)
    assert grown == 200 * cost.kv_numbers_per_token


def test_cost_of_a_mixture_counts_the_chosen_experts() -> None:
    shape = SHAPES["0.9b-moe"]
    cost = ModelCost.from_config(shape.model_config(), "bfloat16")
    of_expert = 3 * shape.hidden_size * shape.intermediate_size
    idle = shape.num_layers * (shape.num_experts - shape.experts_per_token) * of_expert
    assert cost.streamed_weights == shape.num_parameters - idle
    assert 2 * cost.layer_weights == shape.model_config().flops_per_token
