"""The dry run's steps are the largest possible ones, and their memory is what is reported."""

import gc

import pytest
import torch

from engine.model.memory_budget import kv_layout
from engine.runner.dry_run import PeakMemory, _decode_steps, _prefill_spans, measure_workspace_bytes
from engine.runner.model_runner import ModelRunner
from tests.support.engine.paged_harness import load_plain, reference_model

MB = 1 << 20


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_dry_run_decode_rows_share_pool_evenly(rows: int) -> None:
    (step,) = _decode_steps(rows, 500, 1000, compiles=False)
    assert step == [(min(500, 1000 // rows) - 1, 1)] * rows


def test_dry_run_compiled_kernels_cover_each_batch_size_once() -> None:
    steps = _decode_steps(20, 500, 1000, compiles=True)
    alike, uneven = steps[:6], steps[6:]
    assert [len(step) for step in alike] == [20, 16, 8, 4, 2, 1]
    assert [step[0][0] for step in alike] == [49, 61, 124, 249, 499, 499]
    assert all(len(set(step)) == 1 for step in alike)
    assert uneven == [[(499, 1), *[(0, 1)] * (size - 1)] for size in (2, 4, 8, 16, 20)]
    assert _decode_steps(20, 500, 1000, compiles=False) == [[(49, 1)] * 20]


def test_dry_run_covers_last_chunk_of_longest_context() -> None:
    assert _prefill_spans(64, 40, 8, 100) == [(60, 40), *[(0, 1)] * 7]
    assert _prefill_spans(44, 40, 8, 100) == [(60, 40), *[(0, 1)] * 4]
    assert _prefill_spans(64, 40, 8, 30) == [(0, 30), *[(0, 1)] * 7]


@pytest.mark.alone
def test_peak_memory_growth_is_largest_simultaneous_use() -> None:
    peak = PeakMemory(torch.device("cpu"))
    gc.collect()  # what other tests have left behind must not be counted, nor go meanwhile
    if not peak.start():
        pytest.skip("this system does not let a process watch itself")
    for _ in range(3):
        torch.ones(64 * MB, dtype=torch.uint8)  # one at a time
    assert 60 * MB < peak.growth_bytes() < 120 * MB


@pytest.mark.parametrize(("max_tokens", "num_drafts"), [(32, 9), (11, 5), (6, 0)])
def test_dry_run_records_graphs_within_measured_memory(tmp_path, monkeypatch, max_tokens: int, num_drafts: int) -> None:
    """Graphs are recorded at their final size before the budget is computed, and a step has as many drafts as fit."""
    reference_model("LlamaForCausalLM").save_pretrained(tmp_path)
    model = load_plain(tmp_path)
    recorded, batches = [], []
    launch = ModelRunner.launch
    monkeypatch.setattr(ModelRunner, "record_graphs", lambda _self, **options: recorded.append(options))
    monkeypatch.setattr(ModelRunner, "launch", lambda self, batch: batches.append(batch) or launch(self, batch))
    layout = kv_layout(model.config, fingerprint=model.fingerprint, dtype="float32", block_size=16)
    measure_workspace_bytes(
        model,
        layout,
        max_batched_tokens=max_tokens,
        prefill_chunk_tokens=6,
        max_running_requests=6,
        max_draft_rows=9,
        max_context=96,
        max_pool_tokens=640,
    )
    assert recorded == [{"max_rows": 15, "max_tokens": max_tokens, "max_length": 96}]
    assert [batch.num_draft_tokens for batch in batches if batch.num_draft_tokens] == (
        [num_drafts] if num_drafts else []
    )
    assert max(batch.num_samples for batch in batches) == min(15, max_tokens)
    assert all(batch.num_tokens <= max_tokens for batch in batches)
