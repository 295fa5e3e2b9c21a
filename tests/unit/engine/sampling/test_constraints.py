"""Constraints without a grammar, alone and together, against their definitions."""

from array import array
from random import Random

import numpy as np
import pytest
import torch

from engine.backends.options import BackendOptions
from engine.backends.select import select_backend
from engine.model.loader import load_model
from engine.sampling.constraints import AllOf, AllowedTokens, BannedSequences
from engine.types.request import FinishReason
from engine.types.token_guide import TokenGuide, follow, num_words, unusable
from tandem.errors import InternalError, InvalidRequest
from tandem.values.sampling import SamplingParams
from tests.support.engine import ledger
from tests.support.engine.paged_harness import random_tokens, reference_model
from tests.support.engine.serve import Serve

VOCAB = 100


def allowed(guide: TokenGuide) -> set[int]:
    bits = np.zeros(num_words(VOCAB), np.int32)
    guide.allow(bits)
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[:VOCAB]).tolist())


def test_allowed_tokens_allow_only_listed():
    guide = AllowedTokens([0, 31, 32, 99], VOCAB)
    assert allowed(guide) == {0, 31, 32, 99}
    assert guide.accept(99)
    assert not guide.accept(98)
    assert guide.has_refused


def test_bad_words_sequence_bans_last_token_only():
    guide = BannedSequences([[7], [31], [1, 2], [1, 2, 63], [2, 2, 2]])
    everything = set(range(VOCAB)) - {7, 31}
    assert allowed(guide) == everything
    assert guide.accept(1)
    assert allowed(guide) == everything - {2}
    assert guide.accept(3)
    assert guide.accept(2)
    assert guide.accept(2)
    assert allowed(guide) == everything - {2}
    assert not guide.accept(2)


@pytest.mark.parametrize("seed", range(20))
def test_banned_sequences_never_occur(seed):
    rng = Random(seed)
    sequences = [tuple(rng.choices(range(6), k=rng.randrange(1, 4))) for _ in range(6)]
    guide = BannedSequences(sequences)
    accepted: list[int] = []
    for _ in range(60):
        choices = [token for token in range(6) if token in allowed(guide)]
        expected = [t for t in range(6) if not any((*accepted, t)[-len(s) :] == s for s in sequences)]
        assert choices == expected
        if not choices:
            break
        accepted.append(rng.choice(choices))
        assert guide.accept(accepted[-1])
    again = BannedSequences(sequences)
    assert follow(again, array("i", accepted))
    assert allowed(again) == allowed(guide)


def test_all_of_allows_the_intersection():
    guide = AllOf([AllowedTokens([1, 2, 3], VOCAB), BannedSequences([[2], [1, 3]])])
    assert allowed(guide) == {1, 3}
    assert guide.accept(1)
    assert allowed(guide) == {1}
    assert not guide.accept(3)
    assert guide.has_refused
    assert not guide.is_over


def test_unusable_logits_error_names_culprit():
    guide = AllowedTokens([1], VOCAB)
    assert isinstance(unusable(None), InternalError)
    assert isinstance(unusable(guide), InternalError)
    guide.accept(2)
    assert isinstance(unusable(guide), InvalidRequest)
    assert unusable(guide).param is None
    guide.is_too_costly = True
    assert unusable(AllOf([guide])).param == "grammar"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    reference_model("LlamaForCausalLM", num_hidden_layers=1).save_pretrained(path)
    options = BackendOptions(device=torch.device("cpu"), dtype="float32", kernels="torch", num_threads=1)
    return load_model(path, backend=select_backend(options))


@pytest.mark.parametrize("pipelined", [False, True])
def test_constraints_hold_in_any_batch(model, pipelined):
    def ask(seed: int, guide: TokenGuide | None):
        params = SamplingParams(max_tokens=20, temperature=1.0, seed=seed, ignore_eos=True)
        request = ledger.request(random_tokens(Random(seed), 12), params=params, arrival_s=float(seed))
        request.guide = guide
        return request

    def guides() -> list[TokenGuide | None]:
        return [AllowedTokens([5, 6, 7], 97), None, BannedSequences([[token] for token in range(40)])]

    with Serve(model, pipelined=pipelined) as engine:
        few, free, rest = engine.run([ask(seed, guide) for seed, guide in enumerate(guides())])
        (alone,) = engine.run([ask(1, None)])
        (stuck,) = engine.run([ask(3, AllOf([AllowedTokens([5], 97), BannedSequences([[5, 5]])]))])
    assert set(few.ids) <= {5, 6, 7}
    assert free.ids == alone.ids
    assert min(rest.ids) >= 40
    assert {answer.reason for answer in (few, free, rest)} == {FinishReason.LENGTH}
    assert (stuck.ids, stuck.reason) == ([5], FinishReason.ERROR), "nothing may follow, and nobody else is disturbed"
