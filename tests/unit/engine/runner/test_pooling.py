"""Pooled states and labels' log probabilities equal `transformers`': in any chunks and pool, and behind prefixes."""

import random

import pytest
import torch

from engine.backends.options import BackendOptions
from engine.backends.select import select_backend
from engine.model.loader import load_model
from engine.types.prompt_logprobs import PromptPooling, PromptScoringState
from tandem.errors import InvariantError
from tandem.values.pooling import PoolingMode
from tandem.values.sampling import SamplingParams
from tests.support.engine import ledger
from tests.support.engine.paged_harness import random_tokens, reference_model
from tests.support.engine.pooling_models import pool
from tests.support.engine.serve import Serve

EVERY = (*((mode,) for mode in PoolingMode), (PoolingMode.CLS, PoolingMode.MAX, PoolingMode.LAST), tuple(PoolingMode))


@pytest.fixture(scope="module")
def reference():
    return reference_model("Qwen3ForCausalLM", num_hidden_layers=2)


@pytest.fixture(scope="module")
def model(reference, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    reference.save_pretrained(path)
    options = BackendOptions(device=torch.device("cpu"), dtype="float32", kernels="torch", num_threads=1)
    return load_model(path, backend=select_backend(options))


def asked(prompt, number=0, **what):
    request = ledger.request(prompt, params=SamplingParams(max_tokens=1, temperature=0.0), arrival_s=float(number))
    what = {"num_top": None, **what}
    request.scoring = PromptScoringState(num_prompt_tokens=len(prompt), **what)
    return request


def assert_right(reference, request):
    prompt = torch.tensor([list(request.token_ids[: request.num_prompt_tokens])])
    with torch.no_grad():
        out = reference(prompt, output_hidden_states=True)
    scoring = request.scoring
    assert scoring.num_scored == scoring.num_wanted
    if scoring.label_token_ids:
        expected = out.logits[0, -1].log_softmax(-1)[list(scoring.label_token_ids)]
        torch.testing.assert_close(torch.tensor(scoring.logprobs), expected, atol=2e-5, rtol=1e-5)
        return
    states, pooling = out.hidden_states[-1][0], scoring.pooling
    expected = torch.cat([pool(states, mode.value, pooling.num_skipped) for mode in pooling.modes])
    torch.testing.assert_close(torch.tensor(scoring.vector()), expected, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("pipelined", [False, True])
def test_pooling_every_mode_agrees_in_company_and_chunks(model, reference, pipelined):
    """In a pool too small for all, so that some are preempted."""
    rng = random.Random(3)
    requests = []
    for i, modes in enumerate(EVERY):
        for length in (1, 17, 63):
            skipped = 0 if length == 1 else rng.choice([0, 5])
            pooling = PromptPooling(modes=modes, num_skipped=skipped)
            requests.append(asked(random_tokens(rng, length), i, pooling=pooling))
    requests += [asked(random_tokens(rng, n), num_top=0, label_token_ids=(7, 3, 90)) for n in (1, 16, 50)]
    requests += [asked(random_tokens(rng, 40), num_top=2)]
    with Serve(model, pipelined=pipelined, num_blocks=16, prefill_chunk_tokens=7) as serve:
        serve.run(requests)
    for request in requests[:-1]:
        assert_right(reference, request)


@pytest.mark.parametrize(
    ("what", "cached"),
    [
        ({"pooling": PromptPooling(modes=(PoolingMode.LAST,))}, 64),
        ({"num_top": 0, "label_token_ids": (4, 5)}, 64),
        ({"pooling": PromptPooling(num_skipped=33)}, 32),
        ({"pooling": PromptPooling(modes=(PoolingMode.LAST, PoolingMode.MEAN))}, 0),
        ({"pooling": PromptPooling(modes=(PoolingMode.CLS,))}, 0),
    ],
)
def test_pooling_uses_cached_blocks_before_the_first_wanted_row(model, reference, what, cached):
    prompt = random_tokens(random.Random(9), 70)
    with Serve(model, pipelined=False, num_blocks=30, prefill_chunk_tokens=32) as serve:
        for expected in (0, cached):
            request = asked(prompt, **what)
            serve.run([request])
            assert request.num_cached_tokens // ledger.BLOCK * ledger.BLOCK == expected // ledger.BLOCK * ledger.BLOCK
            assert_right(reference, request)


def test_pooling_state_refuses_what_leaves_no_row():
    with pytest.raises(InvariantError, match="5 of 5 tokens are not pooled"):
        PromptScoringState(num_prompt_tokens=5, num_top=None, pooling=PromptPooling(num_skipped=5))
    state = PromptScoringState(num_prompt_tokens=5, num_top=None, pooling=PromptPooling(modes=(PoolingMode.LAST,)))
    assert state.may_reuse
    assert state.pooled_rows(0, 4) == []
    with pytest.raises(InvariantError, match="6 rows scored of 5"):
        state.pool(2, [(0, [1.0])])
