"""What is kept of a step's samples is what single steps would have sampled, by direct recursion."""

from collections.abc import Sequence

import hypothesis.strategies as st
from hypothesis import given, settings

from engine.sampling.constraints import AllowedTokens, BannedSequences
from engine.scheduler.request_limits import reason_of
from engine.scheduler.settling import Settled, settle
from engine.types.request import EndRule, FinishReason, SampledToken
from engine.types.token_guide import TokenGuide

VOCAB = 4
tokens = st.integers(0, VOCAB - 1)


def model(sequence: Sequence[int], seed: int, bad: frozenset[int]) -> SampledToken | None:
    """The next token as a function of all before it; None at the lengths in `bad`, where logits are NaN."""
    if len(sequence) in bad:
        return None
    return SampledToken(hash((seed, *sequence)) % VOCAB, logprob=float(len(sequence)))


def one_by_one(
    prompt: list[int], seed: int, bad: frozenset[int], rule: EndRule, guide: TokenGuide | None, most: int
) -> tuple[list[SampledToken], FinishReason | None, bool]:
    """At most `most` steps: their tokens, why the last ended the request, and whether one failed."""
    sequence, output = list(prompt), []
    for _ in range(most):
        token = model(sequence, seed, bad)
        if token is None or (guide is not None and not guide.accept(token.token_id)):
            return output, None, True
        sequence.append(token.token_id)
        output.append(token)
        reason = reason_of(rule, token.token_id, len(sequence))
        if guide is not None and guide.is_over:
            reason = FinishReason.STOP
        if reason is not None:
            return output, reason, False
    return output, None, False


@settings(max_examples=400, deadline=None)
@given(
    prompt=st.lists(tokens, min_size=1, max_size=3),
    seed=st.integers(0, 1000),
    num_right=st.integers(0, 6),
    wrong=st.lists(tokens, max_size=3),
    stops=st.frozensets(tokens, max_size=2),
    least=st.integers(1, 4),
    room=st.integers(1, 8),
    bad=st.frozensets(st.integers(1, 8), max_size=1),
    guided=st.sampled_from([None, "allowed", "banned"]),
)
def test_settle_any_drafts_keeps_tokens_of_single_steps(
    prompt: list[int],
    seed: int,
    num_right: int,
    wrong: list[int],
    stops: frozenset[int],
    least: int,
    room: int,
    bad: frozenset[int],
    guided: str | None,
) -> None:
    def guide() -> TokenGuide | None:
        if guided is None:
            return None
        return AllowedTokens([0, 1, 2], VOCAB) if guided == "allowed" else BannedSequences([[1, 1], [2, 0]])

    rule = EndRule(stops, len(prompt) + least, len(prompt) + room)
    drafts: list[int] = []
    for _ in range(num_right):
        right = model([*prompt, *drafts], seed, bad)
        if right is None:
            break
        drafts.append(right.token_id)
    drafts += wrong
    sampled = [model([*prompt, *drafts[:i]], seed, bad) for i in range(len(drafts) + 1)]
    settled = settle(drafts, sampled, num_tokens=len(prompt), rule=rule, guide=guide())
    output, reason, failed = one_by_one(prompt, seed, bad, rule, guide(), max(1, len(settled.tokens)))
    assert list(settled.tokens) == output
    assert settled.finish_reason is reason
    accepted = 0
    while accepted < len(drafts) and accepted < len(output) and drafts[accepted] == output[accepted].token_id:
        accepted += 1
    if failed:
        assert settled.is_unusable
        assert not output
    elif settled.is_unusable:
        # The guide refused a later sample, as it would in the next step.
        assert one_by_one(prompt, seed, bad, rule, guide(), len(output) + 1) == (output, None, True)
        assert settled.num_computed == len(output) + 1
    else:
        # Nothing more could have been kept: the end, a draft that differs, no draft left, or nothing to be sampled.
        over = reason is not None or accepted < len(output) or len(output) == len(drafts) + 1
        assert over or sampled[len(output)] is None
        assert settled.num_computed == len(output)


def test_settle_missing_first_sample_fails_and_later_one_waits() -> None:
    rule = EndRule(frozenset(), 1, 100)
    assert settle([5], [None, None], num_tokens=3, rule=rule) == Settled((), 1, None, True)
    kept = SampledToken(5)
    assert settle([5, 6], [kept, None, None], num_tokens=3, rule=rule) == Settled((kept,), 1, None, False)
