"""One step of any mixture: computing, sampling, isolation, tiling and grouping; and the memory budget."""

import random
from itertools import pairwise

import numpy as np
import pytest
import torch

import engine.model.layers.torch_attention as torch_attention
from engine.kv_storage.paged_cache import PagedKVCache
from engine.model.layers.torch_attention import TorchAttention, _split
from engine.model.memory_budget import estimate_workspace_bytes, kv_layout, plan_memory
from engine.runner.model_runner import ModelRunner
from engine.runner.step_input_builder import build_step_inputs
from engine.types.request import Batch, BatchItem
from tandem.errors import ConfigError, InvariantError
from tandem.values.sampling import SamplingParams
from tests.support.engine.paged_harness import Session, random_tokens, reference_model, save_and_load


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    reference = reference_model("MistralForCausalLM", sliding_window=11, num_hidden_layers=2)
    return save_and_load(reference, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def full_model(tmp_path_factory):
    reference = reference_model("LlamaForCausalLM", num_hidden_layers=2)
    return save_and_load(reference, tmp_path_factory.mktemp("full"))


def item(request, start, count, samples=False):
    return BatchItem(request=request, start=start, num_tokens=count, samples=samples)


def test_step_inputs_put_single_rows_first_and_longest_first(model):
    session = Session(model, num_blocks=60)
    a, b, c, d = (session.request(range(10 * i, 10 * i + 20), capacity=20) for i in range(4))
    batch = Batch(items=(item(a, 4, 3, True), item(b, 2, 1, True), item(c, 9, 1), item(d, 0, 2, True)))
    inputs = build_step_inputs(batch, 4)
    assert inputs.token_ids.tolist() == [29, 12, 4, 5, 6, 30, 31]
    assert inputs.positions.tolist() == [9, 2, 4, 5, 6, 0, 1]
    assert inputs.counts.tolist() == [1, 1, 3, 2]
    assert inputs.num_single == 2
    assert inputs.sample_rows.tolist() == [4, 1, 6]
    rows = [(c, 9), (b, 2), (a, 4), (a, 5), (a, 6), (d, 0), (d, 1)]
    assert inputs.slots.tolist() == [r.block_table[p // 4] * 4 + p % 4 for r, p in rows]
    a.token_ids.append(3)
    a.block_table.append(b.block_table[0])  # no view is kept: the arrays can still grow


def test_step_inputs_refuse_missing_blocks_and_tokens(model):
    session = Session(model)
    request = session.request(range(9), capacity=8)
    for start, count in [(0, 9), (8, 1), (0, 0), (5, 40)]:
        with pytest.raises(InvariantError):
            build_step_inputs(Batch(items=(item(request, start, count),)), 4)


def test_model_runner_empty_batch_has_no_samples(model):
    session = Session(model)
    assert session.runner.execute(Batch(items=())) == []
    request = session.request(range(3, 9))
    assert session.runner.execute(Batch(items=(item(request, 0, 3),))) == []


def run_all(model, seed, chunk, params, rng=None, together=True):
    session = Session(model, num_blocks=400, seed=seed)
    prompts = [random_tokens(random.Random(i), 3 + 5 * i) for i in range(6)]
    requests = [session.request(p, params(i), capacity=80) for i, p in enumerate(prompts)]
    for group in [requests] if together else [[r] for r in requests]:
        session.run(group, num_output=7, chunk=chunk, rng=rng)
    return [list(r.token_ids[: r.num_prompt_tokens + 7]) for r in requests]


def sampling(i):
    return SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.1, seed=i)


def test_model_runner_tokens_are_independent_of_batch_and_chunks(model):
    expected = run_all(model, seed=0, chunk=100, params=sampling, together=False)
    assert expected == run_all(model, seed=1, chunk=7, params=sampling)
    assert expected == run_all(model, seed=2, chunk=3, params=sampling, rng=random.Random(0))


def test_model_runner_preempted_request_continues_equally(model):
    session = Session(model, num_blocks=100)
    first, second = (session.request(range(3, 12), sampling(1), capacity=40) for _ in range(2))
    session.run([first], num_output=12, chunk=64)
    session.run([second], num_output=5, chunk=64)
    second.block_table.clear()
    second.num_computed_tokens = 0
    for block in session.request([3], capacity=40).block_table:
        second.block_table.append(block)
    session.run([second], num_output=12, chunk=6)
    assert first.token_ids == second.token_ids


def test_model_runner_ignores_foreign_blocks(full_model):
    tokens = random_tokens(random.Random(0), 21)
    session = Session(full_model)
    request = session.request(tokens, capacity=24)
    clean = torch.cat([session.logits(request, n) for n in (13, 7, 1)])
    session = Session(full_model)
    request = session.request(tokens, capacity=24)
    session.cache.tensor.fill_(1e4)
    dirty = torch.cat([session.logits(request, n) for n in (13, 7, 1)])
    assert torch.equal(clean, dirty)


def test_model_runner_nan_request_leaves_no_nan_in_cache(full_model):
    session = Session(full_model)
    session.runner.model.embedding.weight[5].fill_(float("inf"))
    try:
        session.logits(session.request([5, 5, 5]), 3)
    finally:
        session.runner.model.embedding.weight[5].fill_(0.1)
    assert torch.isfinite(session.cache.tensor).all()


@pytest.mark.parametrize("which", ["model", "full_model"])
def test_model_runner_tiled_attention_gives_same_tokens(which, request, monkeypatch):
    decoder = request.getfixturevalue(which)

    def params(_):
        return SamplingParams(temperature=0.0)

    expected = run_all(decoder, seed=0, chunk=9, params=params)
    monkeypatch.setattr(torch_attention, "MAX_MASK_ELEMENTS", 40)
    monkeypatch.setattr(torch_attention, "_TILE_ELEMENTS", 64)
    monkeypatch.setattr(torch_attention, "_MIN_SPLIT_BLOCKS", 0)
    assert run_all(decoder, seed=0, chunk=9, params=params) == expected
    session = Session(decoder)
    batch = Batch(items=(item(session.request(range(3, 30)), 9, 18),))
    plan = TorchAttention(decoder.attention_spec, session.cache).plan(build_step_inputs(batch, 4))
    chunk = plan.chunks[decoder.config.layer_windows[0]][0]
    assert chunk.mask is None
    assert chunk.tile * chunk.num_keys <= 64


def test_split_covers_all_within_bounds():
    rng = random.Random(0)
    for _ in range(300):
        needed = sorted((rng.randint(1, 200) for _ in range(rng.randint(1, 30))), reverse=True)
        limit = rng.choice([1, 50, 10**6])
        spans = list(_split(needed, limit))
        assert spans[0][0] == 0
        assert spans[-1][1] == len(needed)
        assert all(a[1] == b[0] for a, b in pairwise(spans))
        assert all(max(needed[b:e]) * (e - b) <= limit or e - b == 1 for b, e in spans)


def test_split_bounds_padding():
    assert list(_split([512] + [4] * 15, 10**6)) == [(0, 1), (1, 16)]
    assert list(_split([5, 4, 4, 2], 10**6)) == [(0, 4)]


def test_torch_attention_respects_gather_limit(full_model):
    session = Session(full_model)
    backend = TorchAttention(full_model.attention_spec, session.cache, max_gather_bytes=1)
    runner = ModelRunner(full_model, session.cache, attention=backend)
    requests = [session.request(random_tokens(random.Random(i), 9)) for i in range(2)]
    batch = Batch(items=tuple(item(r, 0, 8) for r in requests))
    assert runner.execute(batch) == []
    batch = Batch(items=tuple(item(r, 8, 1, True) for r in requests))
    assert len(backend.plan(build_step_inputs(batch, 4)).singles[None]) == 2
    assert [t.token_id for t in runner.execute(batch)] == [t.token_id for t in session.runner.execute(batch)]


def test_model_runner_mismatched_cache_is_refused(full_model):
    layout = kv_layout(full_model.config, fingerprint="f", dtype="bfloat16", block_size=4)
    with pytest.raises(ConfigError, match="KV cache is"):
        ModelRunner(full_model, PagedKVCache(layout, num_blocks=2))


def test_step_inputs_slots_cross_blocks(model):
    session = Session(model, num_blocks=40)
    requests = [session.request(range(40), capacity=40) for _ in range(3)]
    spans = [(0, 40), (7, 20), (39, 1)]
    inputs = build_step_inputs(Batch(items=tuple(item(r, s, n) for r, (s, n) in zip(requests, spans, strict=True))), 4)
    flat = [(requests[2], 39), *((requests[1], 7 + i) for i in range(20)), *((requests[0], i) for i in range(40))]
    expected = [r.block_table[p // 4] * 4 + p % 4 for r, p in flat]
    assert np.array_equal(inputs.slots, expected)


def test_plan_memory_divides_limit_or_refuses_with_figures(full_model):
    layout = kv_layout(full_model.config, fingerprint="f", dtype="float32", block_size=16)
    workspace = estimate_workspace_bytes(
        full_model.config, dtype="float32", max_batch_tokens=64, max_num_seqs=4, max_context=128
    )
    common = {
        "weights_bytes": full_model.weights_bytes,
        "workspace_bytes": workspace,
        "layout": layout,
        "max_context": 128,
    }
    budget = plan_memory(limit_bytes=64 * 2**20, **common)
    used = budget.weights_bytes + budget.workspace_bytes + budget.headroom_bytes + budget.kv_bytes
    assert budget.limit_bytes - layout.block_bytes < used <= budget.limit_bytes
    assert f"{budget.num_blocks} blocks of 16 = {budget.num_blocks * 16} tokens" in budget.lines()[-1]
    assert plan_memory(limit_bytes=64 * 2**20, max_blocks=9, **common).num_blocks == 9
    with pytest.raises(ConfigError, match=r"128 tokens: it takes 8 KV blocks .* 7 fit .*Raise engine\.memory_bytes"):
        plan_memory(limit_bytes=64 * 2**20, max_blocks=7, **common)
    with pytest.raises(ConfigError, match=r"0 fit"):
        plan_memory(limit_bytes=2**10, **common)


def test_model_runner_rows_without_sampling_store_kv(full_model):
    tokens = random_tokens(random.Random(4), 30)
    whole, part = Session(full_model), Session(full_model)
    all_rows = whole.logits(whole.request(tokens, capacity=32), 30)
    request = part.request(tokens, capacity=32)
    inputs = build_step_inputs(Batch(items=(item(request, 0, 30),)), 4)
    with torch.inference_mode():
        assert part.runner.compute(inputs) is None
        wanted = np.array([29, 3], dtype=np.int64)
        hidden = part.runner.hidden_states(inputs, wanted)
        torch.testing.assert_close(part.runner.model.logits(hidden), all_rows[wanted], rtol=0, atol=1e-5)
    torch.testing.assert_close(whole.cache.tensor, part.cache.tensor)
