"""`deterministic: true` over the whole engine: a request's bits depend on nothing but the request and the model.

Alone, in a crowd, cut otherwise, after losing its blocks, and continued on another worker, a request gets the same
tokens with the same log-probabilities, and leaves the same keys and values in the pool, to the last bit.
"""

import random

import pytest

from tandem.values.sampling import SamplingParams
from tests.integration.engine.test_ranks import spec
from tests.support.engine.determinism_harness import Worker, worker
from tests.support.engine.paged_harness import random_tokens, reference_model

OUTPUT = 24
PROMPT = random_tokens(random.Random(11), 290)
CONTEXT = 512
COMPUTED = len(PROMPT) + OUTPUT - 1
"""Tokens whose keys and values are made: nobody reads the last one's."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, num_logprobs=4)
DRAWN = SamplingParams(
    temperature=0.9,
    top_p=0.95,
    top_k=40,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    seed=5,
    max_tokens=OUTPUT,
    ignore_eos=True,
    num_logprobs=4,
)


@pytest.fixture(scope="module")
def workers(request, tmp_path_factory):
    """Two workers of one model: the second stands for another machine."""
    dtype, size = request.param
    path = tmp_path_factory.mktemp("model")
    geometry = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": CONTEXT}
    reference_model("Qwen3ForCausalLM", tie_word_embeddings=True, **geometry).save_pretrained(path)
    bounds = {"num_blocks": 80, "max_model_len": CONTEXT, "max_waiting_requests": 64, "max_batched_tokens": CONTEXT}
    wanted = spec(path, size, dtype=dtype, deterministic=True, kernels="auto", **bounds)
    with worker(wanted) as here, worker(wanted) as there:
        yield here, there


WAYS = [
    ("float32", 1),
    ("bfloat16", 1),
    ("float32", 2),
    *(pytest.param(way, marks=pytest.mark.slow) for way in (("bfloat16", 2), ("float32", 4), ("bfloat16", 4))),
]
on_every_way = pytest.mark.parametrize("workers", WAYS, indirect=True, ids=lambda way: f"{way[0]}-{way[1]}")
both_kinds = pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])


class Crowd:
    """Requests of all lengths and kinds that arrive now and then."""

    def __init__(self, engine: Worker, seed: int, *, every: int, most: int, **more) -> None:
        self._engine = engine
        self._rng = random.Random(seed)
        self._every = every
        self._left = most
        self._more = more

    def __call__(self, step: int):
        if step % self._every or not self._left:
            return ()
        self._left -= 1
        params = self._rng.choice([GREEDY, DRAWN])
        return [self._engine.request(random_tokens(self._rng, self._rng.randint(1, 60)), params, **self._more)]


@on_every_way
@both_kinds
def test_deterministic_answer_is_independent_of_batch_and_worker(workers, params) -> None:
    here, there = workers
    alone, seen = here.answer(here.request(PROMPT, params), prefill_chunk_tokens=CONTEXT)
    assert seen.num_computed == COMPUTED
    assert len(alone.tokens) == OUTPUT
    assert all(token.logprob is not None for token in alone.tokens)

    for seed, chunk in enumerate((CONTEXT, 19)):
        crowd = Crowd(here, seed, every=2, most=12)
        found, seen = here.answer(here.request(PROMPT, params), company=crowd, prefill_chunk_tokens=chunk)
        assert seen.largest_batch > 3
        assert found == alone, f"in a crowd, chunks of {chunk}"
    for chunk, step in ((5, CONTEXT), (64, 64), (257, 257)):
        found, _ = here.answer(here.request(PROMPT, params), prefill_chunk_tokens=chunk, max_batched_tokens=step)
        assert found == alone, f"in chunks of {chunk}"
    found, _ = there.answer(there.request(PROMPT, params))
    assert found == alone, "on another worker"


@on_every_way
@both_kinds
def test_recomputed_kv_equals_decoded_kv(workers, params) -> None:
    """After a preemption or a takeover, prompts include tokens whose KV was made by decoding."""
    here, there = workers
    alone, _ = here.answer(here.request(PROMPT, params))
    # Who ranks before it takes its blocks, and enough of them that nothing is found again in the cache.
    rivals = Crowd(here, 3, every=3, most=9, priority=-1)
    found, seen = here.answer(here.request(PROMPT, params), company=rivals, num_blocks=25, prefill_chunk_tokens=67)
    assert seen.num_preemptions > 0
    assert seen.num_computed > COMPUTED + 8, "nothing was recomputed"
    assert found == alone, "after a preemption"

    for count in (1, 8, OUTPUT - 1):
        decoded = [token.token_id for token in alone.tokens[:count]]
        resumed = there.request([*PROMPT, *decoded], params, num_prompt_tokens=len(PROMPT))
        found, seen = there.answer(resumed, prefill_chunk_tokens=CONTEXT)
        assert seen.num_computed == COMPUTED
        assert found.tokens == alone.tokens[count:], f"continued after {count} tokens"
        assert found.kv == alone.kv, f"recomputed after {count} tokens"
