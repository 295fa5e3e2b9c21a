"""Gates: what a file may say, and when a model is good enough."""

import json
import math

import pytest

from tandem.errors import ConfigError
from worker.decisions.quality_gate import (
    LIMITS,
    GateWindow,
    QualityGate,
    WindowScores,
    quality_loss,
    scheme_of,
)

WINDOW = {"token_ids": [1, 2, 3], "logprobs": [-1.0, -2.0], "top_ids": [2, 4]}
GATE = {"version": 1, "base": "model in float32", "vocab_size": 9, "windows": [WINDOW]}


def _gate(**window: object) -> str:
    return json.dumps({**GATE, "windows": [WINDOW | window]})


def test_gate_file_is_read_as_it_was_written() -> None:
    gate = QualityGate.parse(json.dumps(GATE))
    assert gate.windows == (GateWindow(token_ids=(1, 2, 3), logprobs=(-1.0, -2.0), top_ids=(2, 4)),)
    assert QualityGate.parse(gate.model_dump_json()) == gate


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("", "Invalid JSON"),
        ("[]", "should be an object"),
        (json.dumps(GATE | {"version": 2}), "version: "),
        (json.dumps(GATE | {"more": 1}), "more: Extra inputs"),
        (json.dumps(GATE | {"windows": []}), "windows: .* at least 1 item"),
        (json.dumps(GATE | {"vocab_size": 4}), r"windows\.0: token 4 is not below vocab_size 4"),
        (_gate(token_ids=[1]), r"windows\.0\.token_ids: .* at least 2 items"),
        (_gate(token_ids=[1, 2, -3]), r"windows\.0\.token_ids\.2: "),
        (_gate(token_ids=[1, 2, "3"]), r"windows\.0\.token_ids\.2: "),
        (_gate(logprobs=[-1.0]), r"windows\.0: .*logprobs: 1 values for 2 tokens"),
        (_gate(logprobs=[-1.0, 0.5]), r"windows\.0\.logprobs\.1: "),
        (_gate(logprobs=[-1.0, -math.inf]).replace("-Infinity", "-1e999"), r"windows\.0\.logprobs\.1: "),
        (_gate(top_ids=[1, 2, 3]), r"windows\.0: .*top_ids: 3 values for 2 tokens"),
    ],
)
def test_gate_file_that_is_wrong_is_refused_by_field(text: str, wrong: str) -> None:
    with pytest.raises(ConfigError, match=wrong):
        QualityGate.parse(text)


def test_quality_loss_is_a_rise_of_perplexity() -> None:
    gate = QualityGate.parse(json.dumps(GATE))
    loss = quality_loss(gate, [WindowScores(logprobs=(-1.1, -1.92), top_ids=(2, 5))])
    assert loss.base_perplexity == pytest.approx(math.exp(1.5))
    assert loss.perplexity == pytest.approx(math.exp(1.51))
    assert loss.rise_percent == pytest.approx(1.005, abs=1e-3)
    assert (loss.agreement_percent, loss.num_tokens) == (50.0, 2)
    assert not loss.is_within("int8")
    assert loss.is_within("int4")
    assert loss.render("int8") == (
        "perplexity 4.527, +1.01 % from the base's 4.482 (limit of int8: +1 %), the same likeliest token in "
        "50.0 % of 2 places"
    )


@pytest.mark.parametrize("logprob", [math.nan, -math.inf, -1e9])
def test_quality_loss_of_a_broken_model_is_beyond_every_limit(logprob: float) -> None:
    gate = QualityGate.parse(json.dumps(GATE))
    loss = quality_loss(gate, [WindowScores(logprobs=(-1.0, logprob), top_ids=(0, 0))])
    assert not any(loss.is_within(scheme) for scheme in LIMITS)
    assert loss.render("float")


def test_better_model_passes() -> None:
    gate = QualityGate.parse(json.dumps(GATE))
    assert quality_loss(gate, [WindowScores(logprobs=(-0.5, -1.0), top_ids=(0, 0))]).is_within("float")


@pytest.mark.parametrize(
    ("quantization", "weight_format", "scheme"),
    [
        ("auto", None, "float"),
        ("none", "gptq", "stored"),
        ("stored", "gptq", "stored"),
        ("int8", "gptq", "int8"),
        ("int4", None, "int4"),
        ("fp8", None, "fp8"),
        ("nf4", "gptq", "nf4"),
    ],
)
def test_scheme_is_of_the_weights_that_are_multiplied(
    quantization: str, weight_format: str | None, scheme: str
) -> None:
    assert scheme_of(quantization, weight_format) == scheme
    assert scheme in LIMITS
