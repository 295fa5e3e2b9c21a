"""Prompt logprobs equal `transformers`': in any chunks, batch and pool, and with any cache."""

import random

import pytest
import torch

import engine.runner.prompt_logprobs as row_reader
from engine.backends.options import BackendOptions
from engine.backends.select import select_backend
from engine.model.loader import load_model
from engine.types.prompt_logprobs import PromptScoringState
from engine.types.request import FinishReason
from tandem.errors import ContextLengthExceeded, InvariantError
from tandem.values.sampling import SamplingParams
from tests.support.engine import ledger
from tests.support.engine.paged_harness import random_tokens, reference_model
from tests.support.engine.serve import Serve, every_way_to_sample

KERNELS = ("torch", "auto")
LENGTHS = (1, 2, 16, 17, 40, 63, 100)


@pytest.fixture(scope="module")
def reference():
    return reference_model("Qwen3ForCausalLM", num_hidden_layers=2)


@pytest.fixture(scope="module", params=KERNELS)
def model(request, reference, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    reference.save_pretrained(path)
    options = BackendOptions(device=torch.device("cpu"), dtype="float32", kernels=request.param, num_threads=1)
    return load_model(path, backend=select_backend(options))


def scored_request(prompt, num_top, number=0):
    """A request whose prompt is scored; even ones score and odd ones pool, unless `num_top` says."""
    request = ledger.request(prompt, params=SamplingParams(max_tokens=1, temperature=0.0), arrival_s=float(number))
    request.scoring = PromptScoringState(num_prompt_tokens=len(prompt), num_top=num_top)
    return request


def assert_scored(reference, request):
    """`transformers` on the whole prompt at once says the same."""
    prompt = torch.tensor([list(request.token_ids[: request.num_prompt_tokens])])
    with torch.no_grad():
        out = reference(prompt, output_hidden_states=True)
    scoring = request.scoring
    assert scoring.num_scored == scoring.num_wanted
    if scoring.num_top is None:
        mean = out.hidden_states[-1][0].mean(0)
        torch.testing.assert_close(torch.tensor(scoring.vector()), mean, atol=2e-5, rtol=1e-4)
        return
    logprobs = out.logits[0, :-1].log_softmax(-1)
    own = logprobs.gather(-1, prompt[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(scoring.logprobs), own, atol=2e-5, rtol=1e-5)
    assert list(scoring.ranks) == ((logprobs > own[:, None]).sum(-1) + 1).tolist()
    top = logprobs.topk(scoring.num_top)
    assert list(scoring.top_ids) == top.indices.flatten().tolist()
    torch.testing.assert_close(torch.tensor(scoring.top_logprobs), top.values.flatten(), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("pipelined", [False, True])
def test_scores_agree_in_company_and_chunks(model, reference, pipelined, monkeypatch):
    """Beside requests that decode, in a pool too small for all; logits are made for three rows at a time."""
    monkeypatch.setattr(row_reader, "_SLICE_LOGITS", {"cpu": 3 * 97})
    rng = random.Random(7)
    to_score = [
        scored_request(random_tokens(rng, length), num_top, number=i)
        for i, (length, num_top) in enumerate((length, num_top) for length in LENGTHS for num_top in (0, None, 5))
    ]
    long = SamplingParams(max_tokens=90, ignore_eos=True)
    company = [ledger.request(random_tokens(rng, 10), params=long) for _ in range(2)]
    with Serve(model, pipelined=pipelined, num_blocks=14, prefill_chunk_tokens=5) as serve:
        outputs = serve.run(company + to_score)
    assert {answer.reason for answer in outputs[len(company) :]} <= {FinishReason.LENGTH, FinishReason.STOP}
    for request in to_score:
        assert_scored(reference, request)


@pytest.mark.parametrize("num_top", [None, 4])
def test_prompt_logprobs_preempted_request_continues(model, reference, num_top):
    """It reuses those of its own blocks that are still cached."""
    serve = Serve(model, pipelined=False, num_blocks=10, prefill_chunk_tokens=20)
    rng = random.Random(5)
    scored, urgent = (
        scored_request(random_tokens(rng, 110), num_top),
        ledger.request(random_tokens(rng, 70), priority=-1),
    )
    serve.scheduler.add(scored)
    advance(serve, 3)
    assert scored.scoring.num_scored == 60
    serve.scheduler.add(urgent)
    advance(serve, 1)
    assert (scored.num_preemptions, scored.num_computed_tokens) == (1, 0)
    advance(serve, 200)
    assert scored.finish_reason is not None
    assert urgent.finish_reason is not None
    assert_scored(reference, scored)


def advance(serve, most):
    """So many steps, or until nothing can run."""
    for step in range(most):
        if (batch := serve.scheduler.schedule(float(step))) is not None:
            serve.scheduler.commit(batch, serve.runner.launch(batch).tokens())


def test_prompt_logprobs_do_not_affect_other_requests(model):
    """Their tokens equal those of an engine without prompt logprobs."""
    rng = random.Random(3)
    answers = []
    for to_score in ([], [scored_request(random_tokens(rng, 50), top, number=i) for i, top in enumerate((3, None, 0))]):
        with Serve(model, pipelined=False, num_blocks=30, prefill_chunk_tokens=20) as serve:
            outputs = serve.run(every_way_to_sample(random.Random(4), 8) + to_score)
        answers.append([(answer.ids, answer.reason) for answer in outputs[: len(outputs) - len(to_score)]])
    assert answers[0] == answers[1]


def test_prompt_logprobs_skip_cache_and_fill_it(model, reference):
    prompt = random_tokens(random.Random(9), 70)
    with Serve(model, pipelined=False, num_blocks=30, prefill_chunk_tokens=32) as serve:
        for _ in range(2):
            again = scored_request(prompt, 2)
            serve.run([again])
            assert again.num_cached_tokens == 0
            assert_scored(reference, again)
        plain = ledger.request(prompt, params=SamplingParams(max_tokens=2, temperature=0.0))
        serve.run([plain])
        assert plain.num_cached_tokens == 64
        others = [scored_request(prompt, 1, number=1), scored_request(prompt, None, number=2)]
        serve.run([ledger.request(prompt, params=SamplingParams(max_tokens=3)), *others])
        for request in others:
            assert_scored(reference, request)


def test_prompt_logprobs_prompt_of_full_context_is_scored(model, reference):
    prompt = random_tokens(random.Random(2), 120)
    with Serve(model, pipelined=False, num_blocks=30) as serve:
        whole = scored_request(prompt, 1)
        serve.run([whole])
        assert_scored(reference, whole)
        with pytest.raises(ContextLengthExceeded):
            serve.run([ledger.request(prompt)])


def test_prompt_logprobs_after_preemption_continue():
    scoring = PromptScoringState(num_prompt_tokens=10, num_top=0)
    assert list(scoring.rows(0, 6)) == [0, 1, 2, 3, 4, 5]
    scoring.scored(6, logprobs=[-1.0] * 6, ranks=[1] * 6, top_ids=[], top_logprobs=[])
    assert (list(scoring.rows(0, 4)), list(scoring.rows(4, 6))) == ([], [6, 7, 8])
    with pytest.raises(InvariantError):
        scoring.scored(1, logprobs=[-1.0], ranks=[1], top_ids=[3], top_logprobs=[-1.0])
    with pytest.raises(InvariantError):
        scoring.scored(4, logprobs=[-1.0] * 4, ranks=[1] * 4, top_ids=[], top_logprobs=[])
