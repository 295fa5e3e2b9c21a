"""Every architecture over several ranks equals one rank: logits close, greedy tokens equal, in float32."""

import queue
import random
import threading

import pytest
import torch

from engine.distributed.torch_group import TorchGroup
from engine.distributed.wire.steps import decode_step, encode_step
from engine.model.config import load_model_config
from engine.runner.model_runner import ModelRunner
from engine.runner.step_input_builder import build_step_inputs
from engine.types.request import Batch, BatchItem
from tests.support.engine.paged_harness import (
    ARCHITECTURES,
    Session,
    load_plain,
    random_tokens,
    reference_model,
)
from tests.support.engine.thread_ranks import TIMEOUT_S, run_ranks

TOLERANCE = 1e-4
OUTPUT = 8
KV_HEADS = {"LlamaForCausalLM": 1, "MistralForCausalLM": 2, "Qwen2ForCausalLM": 4, "Qwen3ForCausalLM": 8}


@pytest.fixture(scope="module", params=ARCHITECTURES)
def directory(request, tmp_path_factory):
    """A model whose heads are replicated, or not; with biases everywhere that its architecture has them."""
    more = {"attention_bias": True} if request.param in ("LlamaForCausalLM", "Qwen3ForCausalLM") else {}
    if request.param == "LlamaForCausalLM":
        more["mlp_bias"] = True
    if request.param == "MistralForCausalLM":
        more["sliding_window"] = 9
    reference = reference_model(
        request.param,
        num_attention_heads=8,
        num_key_value_heads=KV_HEADS[request.param],
        head_dim=8,
        num_hidden_layers=2,
        tie_word_embeddings=request.param in ("LlamaForCausalLM", "Qwen2ForCausalLM"),
        **more,
    )
    path = tmp_path_factory.mktemp(request.param)
    reference.save_pretrained(path)
    return path


def say(session: Session) -> list[list[int]]:
    """Greedy continuations of prompts of different lengths, in chunks and batches."""
    rng = random.Random(5)
    requests = [session.request(random_tokens(rng, n), capacity=60) for n in (1, 7, 30, 41)]
    session.run(requests, num_output=OUTPUT, chunk=16, rng=rng)
    return [list(request.token_ids) for request in requests]


@pytest.mark.parametrize("size", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_sharded_model_equals_single_rank(directory, size: int) -> None:
    alone = Session(load_plain(directory), num_blocks=80)
    tokens = random_tokens(random.Random(9), 33)
    expected = alone.logits(alone.request(tokens, capacity=40), len(tokens))
    steps = [queue.SimpleQueue() for _ in range(size)]

    def work(group):
        session = Session(load_plain(directory, group=group), num_blocks=80)
        logits = session.logits(session.request(tokens, capacity=40), len(tokens))
        if group.rank:
            while (step := steps[group.rank].get()) is not None:
                session.runner.compute(decode_step(step))
            return None

        def announce(inputs):
            for others in steps[1:]:
                others.put(encode_step(inputs))

        session.runner = ModelRunner(session.runner.model, session.cache, announce=announce)
        try:
            return logits, say(session), session.runner.model.weights_bytes
        finally:
            for others in steps[1:]:
                others.put(None)

    logits, sampled, weights_bytes = run_ranks(size, work)[0]
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0.0)
    assert sampled == say(alone)
    assert weights_bytes < alone.runner.model.weights_bytes * (0.5 if size == 4 else 0.7)


class CountingGroup:
    """A rank that counts what it sends."""

    def __init__(self, group: TorchGroup) -> None:
        self.rank, self.size = group.rank, group.size
        self._group = group
        self.counts = {"sums": 0, "gathers": 0, "barriers": 0, "rows": 0}

    def all_reduce_(self, tensor: torch.Tensor) -> torch.Tensor:
        self.counts["sums"] += 1
        self.counts["rows"] += tensor.shape[0]
        return self._group.all_reduce_(tensor)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.counts["gathers"] += 1
        return self._group.gather(tensor)

    def barrier(self) -> None:
        self.counts["barriers"] += 1
        self._group.barrier()

    def spent(self) -> dict[str, int]:
        """Bytes since the last call."""
        spent, self.counts = self.counts, dict.fromkeys(self.counts, 0)
        return spent


def test_sharded_step_has_expected_number_of_collectives(directory) -> None:
    layers = load_model_config(directory).num_layers

    def work(group):
        counting = CountingGroup(group)
        session = Session(load_plain(directory, group=counting), num_blocks=80)
        assert not any(counting.spent().values()), "loading says nothing to others"
        tokens = random_tokens(random.Random(4), 20)
        spent = []
        requests = [session.request(tokens, capacity=40) for _ in range(2)]
        for spans in (((0, 9), (0, 4)), ((9, 11), (4, 16)), ((19, 1), (19, 1))):
            items = [
                BatchItem(request=request, start=start, num_tokens=count, samples=start + count == len(tokens))
                for request, (start, count) in zip(requests, spans, strict=True)
            ]
            session.runner.compute(build_step_inputs(Batch(items=tuple(items)), session.cache.block_size))
            spent.append(counting.spent())
        return spent

    sums = 1 + 2 * layers
    for spent in run_ranks(2, work):
        # What samples nothing ends behind the last layer's keys and values; what samples drops the other rows there.
        assert spent == [
            {"sums": sums - 2, "gathers": 0, "barriers": 1, "rows": 13 * (sums - 2)},
            {"sums": sums, "gathers": 1, "barriers": 0, "rows": 27 * (sums - 2) + 2 * 2},
            {"sums": sums, "gathers": 1, "barriers": 0, "rows": 2 * sums},
        ]


class LateKeys:
    """A rank's attention, which leaves the last layer's keys and values only once rank 0 has gone as far as it can."""

    def __init__(self, attention, last_layer: int, may_write: threading.Event, written: threading.Event) -> None:
        self._attention = attention
        self._last_layer = last_layer
        self._may_write = may_write
        self._written = written

    def plan(self, inputs):
        self._plan = self._attention.plan(inputs)
        return self

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        if layer == self._last_layer:
            assert self._may_write.wait(TIMEOUT_S)
        attended = self._plan.attend(layer, qkv)
        if layer == self._last_layer:
            self._written.set()
        return attended


class RecordingGroup(CountingGroup):
    """Rank 0, which records that it waits for the others."""

    def __init__(self, group: TorchGroup, waits: threading.Event) -> None:
        super().__init__(group)
        self._waits = waits

    def barrier(self) -> None:
        self._waits.set()
        super().barrier()


def test_sharded_step_without_sample_ends_after_last_keys(directory) -> None:
    """Rank 0 sends the KV of such a step to decode workers at once, from all ranks' parts of the pool."""
    last_layer = load_model_config(directory).num_layers - 1
    as_far_as_it_can, written = threading.Event(), threading.Event()

    def work(group):
        heard = RecordingGroup(group, as_far_as_it_can) if group.rank == 0 else group
        session = Session(load_plain(directory, group=heard), num_blocks=80)
        request = session.request(random_tokens(random.Random(4), 20), capacity=40)
        batch = Batch(items=(BatchItem(request=request, start=0, num_tokens=9, samples=False),))
        runner = session.runner
        if group.rank:
            attention = runner.model.backend.attention(runner.model.attention_spec, session.cache)
            late = LateKeys(attention, last_layer, as_far_as_it_can, written)
            runner = ModelRunner(runner.model, session.cache, attention=late)
        runner.compute(build_step_inputs(batch, session.cache.block_size))
        was_written = written.is_set()
        as_far_as_it_can.set()
        return was_written

    assert all(run_ranks(2, work))
