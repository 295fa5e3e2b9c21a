"""Sources of drafts: what they propose, to whom, and in which order."""

from collections.abc import Sequence

import numpy as np
import pytest

from engine.sampling.constraints import AllOf, AllowedTokens, BannedSequences
from engine.speculation.proposer import NO_DRAFT, Ask, Draft, ProposerChain
from engine.speculation.sources import SOURCES, ForcedTokens, PromptLookup
from engine.speculation.suffix_cache import MAX_ROOTS, MAX_TOKENS, SuffixCache
from engine.types.config import SpeculationConfig
from engine.types.request import Request
from engine.types.token_guide import num_acceptable
from tandem.errors import ConfigError
from tandem.values.ids import BlockHash
from tandem.values.step_sizes import DRAFT_SOURCES
from tests.support.engine import drafts, ledger


def draft(source: object, request: Request, most: int = 4) -> tuple[int, ...]:
    (found,) = source.propose([Ask(request, most)])  # type: ignore[attr-defined]
    assert found.source == (source.name if found.token_ids else "")  # type: ignore[attr-defined]
    return found.token_ids


def finished(source: SuffixCache, prompt: Sequence[int], output: Sequence[int], root: bytes = b"a") -> Request:
    request = ledger.request(prompt, output=output)
    request.hash_root = BlockHash(root)
    source.forget(request)
    return request


def test_lookup_continues_as_text_went_on() -> None:
    lookup = PromptLookup()
    request = ledger.request([5, 6, 7, 8, 9, 10, 1, 5, 6, 7])
    assert draft(lookup, request) == (8, 9, 10, 1)
    request.token_ids.extend([8, 9])
    assert draft(lookup, request, most=2) == (10, 1)
    request.token_ids.append(3)
    assert draft(lookup, request) == ()
    lookup.forget(request)
    assert not lookup._histories


def test_lookup_of_long_prompt_is_indexed_over_several_steps() -> None:
    lookup = PromptLookup()
    request = ledger.request([*range(3000), 7, 8, 9])
    assert draft(lookup, request) == ()
    assert draft(lookup, request) == (10, 11, 12, 13)


def test_suffix_cache_continues_answer_of_same_root_only() -> None:
    cache = SuffixCache()
    finished(cache, [1, 2, 3], [4, 5, 6, 7, 8])
    other = ledger.request([9, 1, 2, 3], output=[])
    other.hash_root = BlockHash(b"a")
    assert draft(cache, other) == (4, 5, 6, 7)
    assert draft(cache, other, most=9) == (4, 5, 6, 7, 8)
    other.hash_root = BlockHash(b"b")
    assert draft(cache, other) == ()


def test_suffix_cache_prefers_longer_match_and_never_crosses_answers() -> None:
    cache = SuffixCache()
    finished(cache, [1, 2, 3], [40, 41, 42, 50])
    finished(cache, [7, 8, 9], [2, 3, 40, 41, 42, 60])
    asking = ledger.request([1, 2, 3], output=[40, 41, 42])
    asking.hash_root = BlockHash(b"a")
    assert draft(cache, asking) == (50,)
    asking.token_ids.append(50)
    assert draft(cache, asking) == ()


def test_suffix_cache_is_bounded() -> None:
    cache = SuffixCache()
    for i in range(MAX_ROOTS + 3):
        finished(cache, [1, 2, 3], [4, 5], root=b"%d" % i)
    assert len(cache._roots) == MAX_ROOTS
    assert BlockHash(b"0") not in cache._roots
    for i in range(9):
        finished(cache, [1, 2, 3], [i] * (MAX_TOKENS // 3))
    (root,) = [cache._roots[BlockHash(b"a")]]
    assert len(root.generations) == 2
    assert sum(len(history.tokens) for history in root.generations) <= 2 * MAX_TOKENS
    finished(cache, [1, 2, 3], [1] * MAX_TOKENS)
    assert sum(len(history.tokens) for history in root.generations) <= 2 * MAX_TOKENS


def test_forced_tokens_come_from_the_guide() -> None:
    source = ForcedTokens()
    request = ledger.request([1, 2])
    assert draft(source, request) == ()
    request.guide = AllOf([BannedSequences([[3]]), AllowedTokens([7], 97)])
    assert draft(source, request, most=3) == (7, 7, 7)
    assert request.guide.num_tokens == 0
    request.guide = AllowedTokens([7, 8], 97)
    assert draft(source, request) == ()


def test_guides_forks_leave_the_guide_as_it_was() -> None:
    guide = AllOf([BannedSequences([[1, 2, 3]]), AllowedTokens([1, 2, 3], 97)])
    assert guide.accept(1)
    assert num_acceptable(guide, [2, 1, 1, 2, 3]) == 4
    assert num_acceptable(guide, [2, 3]) == 1
    assert num_acceptable(guide, [5]) == 0
    assert guide.num_tokens == 1
    bits = np.zeros(4, dtype=np.int32)
    guide.allow(bits)
    assert bits[0] == 0b1110
    assert guide.accept(2)
    guide.allow(bits)
    assert bits[0] == 0b0110


def test_chain_asks_by_priority_and_tells_all() -> None:
    first, second = drafts.Oracle(lambda r: [1, 2] if len(r.token_ids) == 1 else []), drafts.Oracle(lambda _: [3, 4])
    chain = ProposerChain([first, second])
    requests = [ledger.request([0]), ledger.request([0, 0])]
    assert chain.propose([Ask(request, 1) for request in requests]) == [Draft((1,), "oracle"), Draft((3,), "oracle")]
    assert (first.num_proposed, second.num_proposed) == (1, 1)
    chain.settled(requests[0], 1)
    assert (first.num_kept, second.num_kept) == (1, 1)
    chain.forget(requests[0])
    assert first.forgotten == second.forgotten == [requests[0]]
    assert ProposerChain([]).propose([Ask(requests[0], 3)]) == [NO_DRAFT]


def test_speculation_cuts_drafts_to_what_is_asked() -> None:
    oracle = drafts.Oracle(lambda _: range(20))
    speculation = drafts.speculation(oracle, most=5)
    requests = [ledger.request([1]) for _ in range(2)]
    assert speculation.max_drafts(2, beside_chunk=True) == 5
    found = speculation.propose([Ask(requests[0], 5), Ask(requests[1], 2)], 2)
    assert [draft.token_ids for draft in found] == [(0, 1, 2, 3, 4), (0, 1)]
    many = [Ask(request, 5) for request in (ledger.request([1]) for _ in range(20))]
    assert sum(len(draft.token_ids) for draft in speculation.propose(many, 20)) == 16 * 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_draft_tokens": 0}, r"max_draft_tokens must be in \[1, 64\], not 0"),
        ({"sources": ("lookup", "magic")}, r"sources must be some of grammar, prediction, lookup, suffix, not 'magic'"),
    ],
)
def test_speculation_config_bad_values_are_refused(changes: dict[str, object], message: str) -> None:
    good: dict[str, object] = {"sources": ("lookup",), "max_draft_tokens": 4, "adaptive": True}
    with pytest.raises(ConfigError, match=message):
        SpeculationConfig(**good | changes)  # type: ignore[arg-type]


def test_source_names_match_the_settings() -> None:
    assert tuple(SOURCES) == DRAFT_SOURCES
    assert all(make().name == name for name, make in SOURCES.items())  # type: ignore[attr-defined]
