"""The curriculum: how long the rows are and what they hold, by progress through the run.

Copying at a distance is learnt first on short rows full of questions, then stretched.
"""

from dataclasses import dataclass
from random import Random

from training.corpus import Mix

TOKENS_PER_STEP = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Holds until `until` (a share of the run); lengths are drawn per step, by weight."""

    until: float
    lengths: tuple[tuple[int, float], ...]
    mix: Mix


CURRICULUM = (
    Stage(
        until=0.13,
        lengths=((128, 1.0),),
        mix=Mix(plain=0.15, needle=0.40, json=0.25, talk=0.05, copy=0.15),
    ),
    Stage(
        until=0.33,
        lengths=((256, 1.0),),
        mix=Mix(plain=0.30, needle=0.38, json=0.19, talk=0.08, copy=0.05),
    ),
    Stage(
        until=0.70,
        lengths=((512, 0.85), (1024, 0.15)),
        mix=Mix(plain=0.38, needle=0.38, json=0.15, talk=0.08, copy=0.01),
    ),
    Stage(
        until=1.0,
        lengths=((512, 0.55), (1024, 0.25), (2048, 0.20)),
        mix=Mix(plain=0.40, needle=0.38, json=0.13, talk=0.08, copy=0.01),
    ),
)


def stage_at(progress: float) -> Stage:
    """The stage for a share of the run in [0, 1]."""
    return next((stage for stage in CURRICULUM if progress < stage.until), CURRICULUM[-1])


def row_length(rng: Random, stage: Stage) -> int:
    """Draw the length of all rows of one step."""
    lengths, shares = zip(*stage.lengths, strict=True)
    length: int = rng.choices(lengths, shares)[0]
    return length


def learning_rate_scale(step: int, progress: float, warmup_steps: int = 100) -> float:
    """Linear warm-up, a plateau for the first 40 %, then a straight line to zero."""
    warmup = min(1.0, (step + 1) / warmup_steps)
    decay = min(1.0, (1.0 - progress) / 0.6)
    return warmup * max(0.0, decay)
