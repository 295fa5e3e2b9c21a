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


def reader(prompt, num_top, number=0):
    """A scoring request; even ones score and odd ones pool, unless `num_top` is given."""
    request = ledger.request(prompt, params=SamplingParams(max_tokens=1, temperature=0.0), arrival_s=float(number))
    request.reading = PromptScoringState(num_prompt_tokens=len(prompt), num_top=num_top)
    return request


def assert_read(reference, request):
    """Equal to `transformers` on the whole prompt at once."""
    prompt = torch.tensor([list(request.token_ids[: request.num_prompt_tokens])])
    with torch.no_grad():
        out = reference(prompt, output_hidden_states=True)
    reading = request.reading
    assert reading.num_read == reading.num_wanted
    if reading.num_top is None:
        mean = out.hidden_states[-1][0].mean(0)
        torch.testing.assert_close(torch.tensor(reading.mean()), mean, atol=2e-5, rtol=1e-4)
        return
    logprobs = out.logits[0, :-1].log_softmax(-1)
    own = logprobs.gather(-1, prompt[0, 1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(reading.logprobs), own, atol=2e-5, rtol=1e-5)
    assert list(reading.ranks) == ((logprobs > own[:, None]).sum(-1) + 1).tolist()
    top = logprobs.topk(reading.num_top)
    assert list(reading.top_ids) == top.indices.flatten().tolist()
    torch.testing.assert_close(torch.tensor(reading.top_logprobs), top.values.flatten(), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("pipelined", [False, True])
def test_prompt_logprobs_are_independent_of_batch_and_chunks(model, reference, pipelined, monkeypatch):
    """Beside decoding requests, in a pool too small for all; logits are computed for three rows at a time."""
    monkeypatch.setattr(row_reader, "_SLICE_LOGITS", {"cpu": 3 * 97})
    rng = random.Random(7)
    readers = [
        reader(random_tokens(rng, length), num_top, number=i)
        for i, (length, num_top) in enumerate((length, num_top) for length in LENGTHS for num_top in (0, None, 5))
    ]
    long = SamplingParams(max_tokens=90, ignore_eos=True)
    company = [ledger.request(random_tokens(rng, 10), params=long) for _ in range(2)]
    with Serve(model, pipelined=pipelined, num_blocks=14, prefill_chunk_tokens=5) as serve:
        outputs = serve.run(company + readers)
    assert {answer.reason for answer in outputs[len(company) :]} <= {FinishReason.LENGTH, FinishReason.STOP}
    for request in readers:
        assert_read(reference, request)


@pytest.mark.parametrize("num_top", [None, 4])
def test_prompt_logprobs_preempted_request_continues(model, reference, num_top):
    """It reuses those of its own blocks that are still cached."""
    serve = Serve(model, pipelined=False, num_blocks=10, prefill_chunk_tokens=20)
    rng = random.Random(5)
    read, urgent = reader(random_tokens(rng, 110), num_top), ledger.request(random_tokens(rng, 70), priority=-1)
    serve.scheduler.add(read)
    advance(serve, 3)
    assert read.reading.num_read == 60
    serve.scheduler.add(urgent)
    advance(serve, 1)
    assert (read.num_preemptions, read.num_computed_tokens) == (1, 0)
    advance(serve, 200)
    assert read.finish_reason is not None
    assert urgent.finish_reason is not None
    assert_read(reference, read)


def advance(serve, most):
    """So many steps, or until nothing can run."""
    for step in range(most):
        if (batch := serve.scheduler.schedule(float(step))) is not None:
            serve.scheduler.commit(batch, serve.runner.launch(batch).tokens())


def test_prompt_logprobs_do_not_affect_other_requests(model):
    """Their tokens equal those of an engine without prompt logprobs."""
    rng = random.Random(3)
    answers = []
    for readers in ([], [reader(random_tokens(rng, 50), top, number=i) for i, top in enumerate((3, None, 0))]):
        with Serve(model, pipelined=False, num_blocks=30, prefill_chunk_tokens=20) as serve:
            outputs = serve.run(every_way_to_sample(random.Random(4), 8) + readers)
        answers.append([(answer.ids, answer.reason) for answer in outputs[: len(outputs) - len(readers)]])
    assert answers[0] == answers[1]


def test_prompt_logprobs_skip_cache_and_fill_it(model, reference):
    prompt = random_tokens(random.Random(9), 70)
    with Serve(model, pipelined=False, num_blocks=30, prefill_chunk_tokens=32) as serve:
        for _ in range(2):
            again = reader(prompt, 2)
            serve.run([again])
            assert again.num_cached_tokens == 0
            assert_read(reference, again)
        plain = ledger.request(prompt, params=SamplingParams(max_tokens=2, temperature=0.0))
        serve.run([plain])
        assert plain.num_cached_tokens == 64
        others = [reader(prompt, 1, number=1), reader(prompt, None, number=2)]
        serve.run([ledger.request(prompt, params=SamplingParams(max_tokens=3)), *others])
        for request in others:
            assert_read(reference, request)


def test_prompt_logprobs_prompt_of_full_context_is_scored(model, reference):
    prompt = random_tokens(random.Random(2), 120)
    with Serve(model, pipelined=False, num_blocks=30) as serve:
        whole = reader(prompt, 1)
        serve.run([whole])
        assert_read(reference, whole)
        with pytest.raises(ContextLengthExceeded):
            serve.run([ledger.request(prompt)])


def test_prompt_logprobs_after_preemption_continue():
    reading = PromptScoringState(num_prompt_tokens=10, num_top=0)
    assert list(reading.rows(0, 6)) == [0, 1, 2, 3, 4, 5]
    reading.scored(6, logprobs=[-1.0] * 6, ranks=[1] * 6, top_ids=[], top_logprobs=[])
    assert (list(reading.rows(0, 4)), list(reading.rows(4, 6))) == ([], [6, 7, 8])
    with pytest.raises(InvariantError):
        reading.scored(1, logprobs=[-1.0], ranks=[1], top_ids=[3], top_logprobs=[-1.0])
    with pytest.raises(InvariantError):
        reading.scored(4, logprobs=[-1.0] * 4, ranks=[1] * 4, top_ids=[], top_logprobs=[])
