"""Settles the drafts of one request: which of a step's samples are the tokens that single steps would have sampled.

A step with drafts d1 .. dK samples s0 after the last known token, s1 after d1, and so on. Every sample is a function of
the tokens before it, so s0 is the next token, and each further sample is the token after its predecessor if that
equals the draft it was computed from. The first that differs, or that ends the request, is the last one kept.
"""

from collections.abc import Sequence
from typing import NamedTuple

from engine.scheduler.request_limits import reason_of
from engine.types.request import EndRule, FinishReason, Request, SampledToken
from engine.types.token_guide import TokenGuide, num_acceptable


def useful_drafts(request: Request, drafts: tuple[int, ...]) -> tuple[int, ...]:
    """The drafts before the first that its grammar refuses, or that would end the request: nothing is sampled after."""
    rule = request.end_rule
    for i, token_id in enumerate(drafts):
        if rule is not None and token_id in rule.token_ids and request.num_tokens + i + 1 >= rule.min_tokens:
            drafts = drafts[:i]
            break
    if drafts and request.guide is not None:
        return drafts[: num_acceptable(request.guide, drafts)]
    return drafts


class Settled(NamedTuple):
    """What became of a request's samples in one step."""

    tokens: tuple[SampledToken, ...]
    """New tokens, in order."""
    num_computed: int
    """Rows whose keys and values are the sequence's: that of the last known token, and those of the drafts kept."""
    finish_reason: FinishReason | None
    """Why the last of `tokens` ends the request; None when it goes on."""
    is_unusable: bool
    """No token could be sampled after these: the request fails."""


def settle(
    drafts: Sequence[int],
    sampled: Sequence[SampledToken | None],
    *,
    num_tokens: int,
    rule: EndRule,
    guide: TokenGuide | None = None,
) -> Settled:
    """Settle `1 + len(drafts)` samples of a request that has `num_tokens` tokens. `guide` follows what is kept.

    A first sample that is None makes the request fail. A later one is sampled again by the next step: it may be missing
    only because a copy of the guide, which follows drafts while they are being verified, has given up.
    """
    kept: list[SampledToken] = []
    for row, token in enumerate(sampled):
        if token is None:
            return Settled(tuple(kept), max(1, row), None, not row)
        if guide is not None and not guide.accept(token.token_id):
            return Settled(tuple(kept), row + 1, None, True)
        kept.append(token)
        length = num_tokens + row + 1
        reason = None
        if length >= rule.max_tokens or token.token_id in rule.token_ids:
            reason = reason_of(rule, token.token_id, length)
        if guide is not None and guide.is_over:
            reason = FinishReason.STOP
        if reason is not None:
            return Settled(tuple(kept), row + 1, reason, False)
        if row < len(drafts) and drafts[row] != token.token_id:
            break
    return Settled(tuple(kept), len(kept), None, False)
