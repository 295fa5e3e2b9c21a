"""Decides whether a worker computes its model well enough to serve, from the log probabilities of a text. Pure.

A gate holds the text and what a base expected of it. `tandem eval --gate FILE` writes one; a worker with
`engine.quality_gate` scores the text before it serves (`worker.quality_check`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tandem.errors import ConfigError
from tandem.values.quantization import QUANTIZED_DTYPES

MAX_GATE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Greatest loss of one scheme, against the same weights in float32 or the base that was named."""

    perplexity_percent: float
    """Rise of the perplexity per token."""
    divergence_nats: float | None = None
    """Mean KL divergence; None: nothing is promised."""


LIMITS: Mapping[str, Limits] = {
    "float": Limits(perplexity_percent=1.0, divergence_nats=0.01),
    "int8": Limits(perplexity_percent=1.0, divergence_nats=0.01),
    "int4": Limits(perplexity_percent=5.0),
    "fp8": Limits(perplexity_percent=1.0, divergence_nats=0.01),
    "nf4": Limits(perplexity_percent=5.0),
    "stored": Limits(perplexity_percent=5.0),
}
"""By scheme of the weights: `stored` is a quantized checkpoint, of any number of bits.

A rise of 1 % of the perplexity is 0.01 nats per token, and the mean KL divergence is the rise to expect where the base
itself writes the text: so the same loss, measured without the noise of what a text happens to say. With four bits it
depends on the text much more (the built-in model: 0.003 on its own stories, 0.11 on a licence, whose perplexity falls),
so that no limit would tell a good scheme from a bad one.
"""


def scheme_of(quantization: str, weight_format: str | None) -> str:
    """Return the key of LIMITS for `engine.quantization` of a checkpoint; `weight_format`: None for float weights."""
    if quantization in QUANTIZED_DTYPES:
        return quantization
    return "float" if weight_format is None else "stored"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class GateWindow(_Part):
    """Tokens that are scored together, and what the base expected after each but the last."""

    token_ids: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=2)
    logprobs: tuple[Annotated[float, Field(le=0, allow_inf_nan=False)], ...]
    """Log probability of each token but the first."""
    top_ids: tuple[Annotated[int, Field(ge=0)], ...]
    """The token that the base found likeliest, in the place of each but the first."""

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        wanted = len(self.token_ids) - 1
        for name in ("logprobs", "top_ids"):
            if (got := len(getattr(self, name))) != wanted:
                raise ValueError(f"{name}: {got} values for {wanted} tokens")
        return self


class QualityGate(_Part):
    """A text and what a base expected of it."""

    version: Literal[1] = 1
    base: str
    """What the base was: its name and dtype, for people."""
    vocab_size: int = Field(gt=0)
    windows: tuple[GateWindow, ...] = Field(min_length=1)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a gate file. Raises ConfigError that names the first wrong field."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise ConfigError(f"{place}: {first['msg']}" if place else first["msg"]) from None

    @model_validator(mode="after")
    def _check_ids(self) -> Self:
        for index, window in enumerate(self.windows):
            if (highest := max(*window.token_ids, *window.top_ids)) >= self.vocab_size:
                raise ValueError(f"windows.{index}: token {highest} is not below vocab_size {self.vocab_size}")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowScores:
    """What a worker's model expected after each token of a window but the last."""

    logprobs: Sequence[float]
    top_ids: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityLoss:
    """How a worker's model does beside the base, on the same tokens."""

    num_tokens: int
    base_perplexity: float
    perplexity: float
    agreement_percent: float
    """Share of tokens in whose place both expect the same one most."""

    @property
    def rise_percent(self) -> float:
        """Rise of the perplexity; NaN where the model gives no probabilities."""
        return 100 * (self.perplexity / self.base_perplexity - 1)

    def is_within(self, scheme: str) -> bool:
        """Whether the scheme's limit is kept."""
        return self.rise_percent <= LIMITS[scheme].perplexity_percent  # False for NaN

    def render(self, scheme: str) -> str:
        """Describe it in one line, for logs and errors."""
        return (
            f"perplexity {self.perplexity:.4g}, {self.rise_percent:+.2f} % from the base's {self.base_perplexity:.4g} "
            f"(limit of {scheme}: {LIMITS[scheme].perplexity_percent:+g} %), the same likeliest token in "
            f"{self.agreement_percent:.1f} % of {self.num_tokens} places"
        )


def quality_loss(gate: QualityGate, found: Sequence[WindowScores]) -> QualityLoss:
    """Compare a model's scores of all windows, in the gate's order, with the base's."""
    num_tokens = num_agreeing = 0
    base_nats = nats = 0.0
    for window, scores in zip(gate.windows, found, strict=True):
        num_tokens += len(window.logprobs)
        base_nats -= sum(window.logprobs)
        nats -= sum(scores.logprobs)
        num_agreeing += sum(ours == base for base, ours in zip(window.top_ids, scores.top_ids, strict=True))
    return QualityLoss(
        num_tokens=num_tokens,
        base_perplexity=perplexity_of(base_nats / num_tokens),
        perplexity=perplexity_of(nats / num_tokens),
        agreement_percent=100 * num_agreeing / num_tokens,
    )


def perplexity_of(nats: float) -> float:
    """Return e to the power of `nats`, at most e to the 700: a broken model must not end in an overflow."""
    return math.exp(min(nats, 700.0))
