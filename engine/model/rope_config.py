"""Rotary position settings, from both layouts that Hugging Face configurations use.

Old: `rope_theta` beside an optional `rope_scaling` object. New (transformers 5): one `rope_parameters` object.
When both are present, `rope_scaling` takes precedence, as in transformers. Models whose layers rotate differently have
one object for each kind of layer inside `rope_parameters`, or fields of their own, which their families read.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from engine.model.config_fields import Fields

DEFAULT_THETA = 10_000.0
_MAX_FACTOR = 1e6
_MAX_POSITIONS = 2**31 - 1
_MAX_PAIRS = 2048


class RopeType(Enum):
    """Method of extending frequencies beyond the trained context; values are Hugging Face's names."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"
    FACTORS = "factors"
    """A divisor for each frequency, as GGUF files have it where a `config.json` says llama3. Not Hugging Face's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Parameters from which a position's rotation angles follow, except for the head size."""

    rope_type: RopeType = RopeType.DEFAULT
    theta: float = DEFAULT_THETA
    max_positions: int
    """`max_position_embeddings`; dynamic scaling begins there."""
    factor: float = 1.0
    original_max_positions: int
    """Context length before scaling (llama3, yarn)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    """Factor on cosine and sine (yarn, longrope)."""
    partial: float = 1.0
    """Share of a head's elements that are rotated, the first ones."""
    is_interleaved: bool = False
    """Whether pairs are neighbours; else an element and that half of the rotated ones further."""
    short_factors: tuple[float, ...] = ()
    """Divisors of the pairs' frequencies within `original_max_positions` (longrope)."""
    long_factors: tuple[float, ...] = ()
    """The same beyond it."""
    factors: tuple[float, ...] = ()
    """Divisors of the frequencies, the highest frequency first (factors)."""

    def rotary_dim(self, head_dim: int) -> int:
        """Number of a head's elements that are rotated."""
        return int(head_dim * self.partial)

    @property
    def max_context(self) -> int:
        """Longest sequence that the rotation is meant for.

        yarn reaches `original * factor` and dynamic `max_positions * factor`; for the others the checkpoint's
        `max_position_embeddings` is the extended context already.
        """
        if self.rope_type is RopeType.YARN:
            return max(self.max_positions, int(self.original_max_positions * self.factor))
        if self.rope_type is RopeType.DYNAMIC:
            return int(self.max_positions * self.factor)
        return self.max_positions


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeDefaults:
    """What a family's configuration means where it is silent, and what it cannot say."""

    theta: float = DEFAULT_THETA
    partial: float | None = None
    """Share of a head that is rotated by default; None: all of it, and the family has no such field."""
    is_interleaved: bool = False
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Older names of rotary types."""


def parse_rope(raw: Mapping[str, Any], max_positions: int, defaults: RopeDefaults | None = None) -> RopeConfig:
    """Read the rotary settings of a `config.json`. Raises ConfigError, which names the offending field."""
    top, defaults = Fields(raw, "config.json"), defaults or RopeDefaults()
    name = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    nested = raw.get(name) or {}
    if not isinstance(nested, dict) or any(isinstance(value, dict) for value in nested.values()):
        raise top.error(name, "must be one flat object for all layers")
    return read_rope(top, Fields(nested, f"config.json: {name}"), max_positions, defaults)


def read_rope(top: Fields, rope: Fields, max_positions: int, defaults: RopeDefaults) -> RopeConfig:
    """Read one rotation: `rope` are its own fields, `top` those of the whole configuration. Raises ConfigError."""
    kind = rope.get("rope_type") or rope.get("type") or RopeType.DEFAULT.value
    known = [member.value for member in RopeType]
    if isinstance(kind, str):
        kind = defaults.aliases.get(kind, kind)
    if kind not in known:
        raise rope.error("rope_type", f"must be one of {', '.join(known)}, is {kind!r:.40}")
    holder = rope if rope.has("rope_theta") else top
    theta = holder.number("rope_theta", 1.0 + 1e-6, 1e15, defaults.theta)
    found = _BY_TYPE[RopeType(kind)](top, rope, theta, max_positions)
    return replace(found, partial=_partial(top, rope, defaults), is_interleaved=defaults.is_interleaved)


def _partial(top: Fields, rope: Fields, defaults: RopeDefaults) -> float:
    holder = rope if rope.has("partial_rotary_factor") else top
    partial = holder.number("partial_rotary_factor", 0.0, 1.0, defaults.partial or 1.0)
    if partial != 1.0 and defaults.partial is None:
        raise holder.error("partial_rotary_factor", "other than 1 is not supported for this architecture")
    return partial


def _default(_top: Fields, _rope: Fields, theta: float, max_positions: int) -> RopeConfig:
    return RopeConfig(theta=theta, max_positions=max_positions, original_max_positions=max_positions)


def _linear(_top: Fields, rope: Fields, theta: float, max_positions: int) -> RopeConfig:
    return RopeConfig(
        rope_type=RopeType.LINEAR,
        theta=theta,
        max_positions=max_positions,
        original_max_positions=max_positions,
        factor=rope.number("factor", 1.0, _MAX_FACTOR),
    )


def _dynamic(_top: Fields, rope: Fields, theta: float, max_positions: int) -> RopeConfig:
    return RopeConfig(
        rope_type=RopeType.DYNAMIC,
        theta=theta,
        max_positions=max_positions,
        original_max_positions=max_positions,
        factor=rope.number("factor", 1.0, _MAX_FACTOR),
    )


def _llama3(top: Fields, rope: Fields, theta: float, max_positions: int) -> RopeConfig:
    low = rope.number("low_freq_factor", 1e-6, _MAX_FACTOR)
    high = rope.number("high_freq_factor", 1e-6, _MAX_FACTOR)
    if high <= low:
        raise rope.error("high_freq_factor", f"must exceed low_freq_factor {low:g}, is {high:g}")
    return RopeConfig(
        rope_type=RopeType.LLAMA3,
        theta=theta,
        max_positions=max_positions,
        factor=rope.number("factor", 1.0, _MAX_FACTOR),
        original_max_positions=_original_max(top, rope, max_positions),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(top: Fields, rope: Fields, theta: float, max_positions: int) -> RopeConfig:
    original = _original_max(top, rope, max_positions)
    factor = rope.number("factor", 1.0, _MAX_FACTOR, max(1.0, max_positions / original))
    fast = rope.number("beta_fast", 1e-6, _MAX_FACTOR, 32.0)
    slow = rope.number("beta_slow", 1e-6, _MAX_FACTOR, 1.0)
    if fast < slow:
        raise rope.error("beta_fast", f"must not be below beta_slow {slow:g}, is {fast:g}")
    return RopeConfig(
        rope_type=RopeType.YARN,
        theta=theta,
        max_positions=max_positions,
        factor=factor,
        original_max_positions=original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=rope.boolean("truncate", True),
        attention_factor=_yarn_attention_factor(rope, factor),
    )


def _factors(_top: Fields, rope: Fields, theta: float, max_positions: int) -> RopeConfig:
    return RopeConfig(
        rope_type=RopeType.FACTORS,
        theta=theta,
        max_positions=max_positions,
        original_max_positions=max_positions,
        factors=_factors_of_pairs(rope, "factors"),
    )


def _longrope(top: Fields, rope: Fields, theta: float, max_positions: int) -> RopeConfig:
    original = _original_max(top, rope, max_positions)
    # The ratio of the contexts says more than `factor`, which is used only where the file has it.
    factor = rope.number("factor", 1.0, _MAX_FACTOR, max(1.0, max_positions / original))
    usual = math.sqrt(1.0 + math.log(factor) / math.log(original)) if factor > 1.0 and original > 1 else 1.0
    return RopeConfig(
        rope_type=RopeType.LONGROPE,
        theta=theta,
        max_positions=max_positions,
        factor=factor,
        original_max_positions=original,
        attention_factor=rope.number("attention_factor", 1e-6, 1e3, usual),
        short_factors=_factors_of_pairs(rope, "short_factor"),
        long_factors=_factors_of_pairs(rope, "long_factor"),
    )


def _factors_of_pairs(rope: Fields, name: str) -> tuple[float, ...]:
    values = rope.get(name)
    if not isinstance(values, list) or not 1 <= len(values) <= _MAX_PAIRS:
        raise rope.error(name, "must be a list of one number for each rotated pair")
    each = [Fields({f"{name}[{i}]": value}, "config.json: rope_scaling") for i, value in enumerate(values)]
    return tuple(fields.number(f"{name}[{i}]", 1e-6, _MAX_FACTOR) for i, fields in enumerate(each))


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    """Temperature of YaRN (Peng et al., 2023, section 3.4), unless the checkpoint has its own."""
    if rope.has("attention_factor"):
        return rope.number("attention_factor", 1e-6, 1e3)

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope.number("mscale", 0.0, 1e3)) / scale(rope.number("mscale_all_dim", 0.0, 1e3))
    return scale(1.0)


def _original_max(top: Fields, rope: Fields, max_positions: int) -> int:
    holder = top if top.has("original_max_position_embeddings") else rope
    return holder.integer("original_max_position_embeddings", 1, _MAX_POSITIONS, max_positions)


_BY_TYPE = {
    RopeType.DEFAULT: _default,
    RopeType.LINEAR: _linear,
    RopeType.DYNAMIC: _dynamic,
    RopeType.LLAMA3: _llama3,
    RopeType.YARN: _yarn,
    RopeType.FACTORS: _factors,
    RopeType.LONGROPE: _longrope,
}
