"""A scheduler and a model whose windowed layers have blocks of their own: tokens equal transformers'."""

import random
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.kv_storage.paged_cache import PagedKVCache
from engine.model.decoder import Decoder
from engine.model.memory_budget import kv_layout
from engine.runner.model_runner import ModelRunner
from engine.scheduler.scheduler import Scheduler
from engine.types.request import Request
from engine.types.windows import WindowSpec
from tandem.values.block_hash import BlockHasher, root_hash
from tandem.values.ids import RequestId
from tandem.values.sampling import SamplingParams
from tests.support.engine import ledger
from tests.support.engine.families import FAMILY_CASES, FamilyCase
from tests.support.engine.paged_harness import load_plain, on_kernels, random_tokens, reference_logits

SIZE = 16
CASES = [case for case in FAMILY_CASES if case.name in {"olmo3", "cohere2", "gemma2", "gemma3"}]


class Worker:
    """A scheduler and a runner over one pool."""

    def __init__(self, model: Decoder, *, num_spare_blocks: int, chunk: int = 20, kv_dtype: str = "auto") -> None:
        layout = kv_layout(
            model.config,
            fingerprint=model.fingerprint,
            dtype=str(model.dtype).removeprefix("torch."),
            block_size=SIZE,
            kv_dtype=kv_dtype,
            apart_below=128,
        )
        assert len(layout.groups) > 1
        assert sorted(layer for group in layout.groups for layer in group) == list(range(layout.num_layers))
        windows = WindowSpec(
            window=layout.window, num_groups=len(layout.groups) - 1, block_size=SIZE, ahead_tokens=2 * chunk
        )
        num_blocks = windows.num_blocks(128) + num_spare_blocks
        self.scheduler = Scheduler(
            ledger.config(
                num_blocks=num_blocks,
                max_model_len=128,
                prefill_chunk_tokens=chunk,
                max_batched_tokens=40,
                windows=windows,
            ),
            BlockHasher(b"secret"),
        )
        self.runner = ModelRunner(model, PagedKVCache(layout, num_blocks=num_blocks))
        self._root = root_hash(secret=b"secret", model_fingerprint=model.fingerprint)
        self._num_requests = 0

    def request(self, prompt: Sequence[int], num_output: int) -> Request:
        self._num_requests += 1
        request = Request(
            request_id=RequestId(f"r{self._num_requests}"),
            token_ids=array("i", prompt),
            num_prompt_tokens=len(prompt),
            params=SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True),
            hash_root=self._root,
        )
        self.scheduler.add(request)
        return request

    def run(self) -> None:
        while (batch := self.scheduler.schedule(0.0)) is not None:
            self.scheduler.commit(batch, self.runner.launch(batch).tokens())
            self.scheduler.check_invariants()


def greedy(model: Any, prompt: Sequence[int], num_output: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_output):
        tokens.append(int(reference_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("on_own_kernels", [False, True], ids=["torch", "kernels"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_windowed_layers_apart_choose_transformers_tokens(
    case: FamilyCase, on_own_kernels: bool, tmp_path: Path
) -> None:
    """Several requests in a pool in which blocks change hands all the time: some are preempted, some find prefixes."""
    rng = random.Random(case.name)
    reference = case.model()
    case.save(reference, tmp_path)
    model = on_kernels(tmp_path, "none", dtype="float32") if on_own_kernels else load_plain(tmp_path)
    worker = Worker(model, num_spare_blocks=6)
    common = random_tokens(rng, 50)
    prompts = [common + random_tokens(rng, 20), random_tokens(rng, 9), common + random_tokens(rng, 5), common]
    requests = [worker.request(prompt, 30) for prompt in prompts]
    worker.run()
    again = worker.request([*requests[0].token_ids, *random_tokens(rng, 4)], 10)
    worker.run()
    assert again.num_cached_tokens
    assert any(request.num_preemptions for request in requests)
    for request in (*requests, again):
        prompt, answer = request.token_ids[: request.num_prompt_tokens], request.token_ids[request.num_prompt_tokens :]
        assert [*answer] == greedy(reference, prompt, len(answer))
    ledger.assert_empty(worker.scheduler)
