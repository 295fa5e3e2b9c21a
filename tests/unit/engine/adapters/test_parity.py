"""Adapters of every family against transformers with the same adapters merged into its matrices, in float32.

Batches mix two adapters and none, in chunks, so that each row must get its own, and only wanted rows leave the last
layer.
"""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.adapters.store import AdapterStore
from engine.backends.options import BackendOptions
from engine.backends.select import select_backend
from engine.distributed.ranks.ranks import SoloRanks
from engine.kernels.cpu.gemm import Arithmetic
from engine.model.config import load_model_config
from engine.model.decoder import Decoder
from engine.model.loader import load_model
from tandem.adapters.files import AdapterContent, read_adapter_content
from tests.support.engine.families import FAMILY_CASES, FamilyCase
from tests.support.engine.lora import merged, write_adapter
from tests.support.engine.paged_harness import Session, needs, random_tokens, reference_logits
from tests.support.engine.thread_ranks import ThreadRanks


def load(path: Path, *, kernels: str = "torch", group: Any = None) -> Decoder:
    options = BackendOptions(
        device=torch.device("cpu"), dtype="float32", kernels=kernels, num_threads=2, takes_adapters=True
    )
    return load_model(path, backend=select_backend(options), group=group)


class Group:
    """Ranks as AdapterStore sees them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.rank = 0


class LoadedRanks(SoloRanks):
    """Ranks that hold nothing: their parts are put by hand."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.group = Group(size)  # type: ignore[assignment]


def store(path: Path, model: Decoder, size: int = 1) -> AdapterStore:
    assert model.adapters is not None
    config = load_model_config(path)
    return AdapterStore(config, model.adapters, LoadedRanks(size), dtype="float32", capacity_bytes=1 << 24, max_rank=16)


def content(path: Path) -> AdapterContent:
    return read_adapter_content(path, max_bytes=1 << 24)


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def check_mixed_batches(case: FamilyCase, kernels: str, folder: Path) -> None:
    rng = random.Random(case.name)
    reference = case.model()
    case.save(reference, folder / "model")
    # One that adds to everything, and one to queries alone, or to all where these are fused with keys.
    adapters = [
        write_adapter(folder / "one", reference, rank=5, seed=1),
        write_adapter(folder / "two", reference, rank=3, seed=2, modules={"q_proj", "qkv_proj", "down_proj"}),
    ]
    model = load(folder / "model", kernels=kernels)
    held = store(folder / "model", model)
    for slot, path in zip((3, 9), adapters, strict=True):
        held.put(slot, held.read(content(path)))
    session = Session(model, seed=3, num_blocks=80)
    if kernels != "torch":
        session.runner.record_graphs(max_rows=8, max_tokens=16, max_length=64)
    models = [reference, *(merged(reference, path) for path in adapters)]
    prompts = [random_tokens(rng, length) for length in (21, 9, 14)]
    requests = [session.request(prompt, capacity=40) for prompt in prompts]
    for request, slot in zip(requests, (-1, 3, 9), strict=True):
        request.adapter_slot = slot
    session.run(requests, num_output=8, chunk=6, rng=rng)
    for prompt, request, whole in zip(prompts, requests, models, strict=True):
        assert list(request.token_ids[len(prompt) :]) == greedy(whole, prompt, 8)


@pytest.mark.parametrize("case", FAMILY_CASES, ids=lambda case: case.name)
def test_adapters_equal_merged_weights(case: FamilyCase, tmp_path: Path) -> None:
    check_mixed_batches(case, "torch", tmp_path)


@pytest.mark.parametrize("case", FAMILY_CASES, ids=lambda case: case.name)
def test_adapters_on_kernels_equal_merged_weights(case: FamilyCase, tmp_path: Path) -> None:
    needs(Arithmetic.FLOAT32)
    check_mixed_batches(case, "auto", tmp_path)


@pytest.mark.parametrize("size", [2, 4])  # 4 ranks share 2 key-value heads
@pytest.mark.parametrize("case", FAMILY_CASES, ids=lambda case: case.name)
def test_adapters_of_ranks_sum_to_the_whole(case: FamilyCase, size: int, tmp_path: Path) -> None:
    reference = case.model()
    case.save(reference, tmp_path / "model")
    path = write_adapter(tmp_path / "one", reference, seed=5)
    tokens = random_tokens(random.Random(case.name), 30)
    shared: list[Tensor | None] = [None] * size
    meeting = Barrier(size)

    def run(rank: int) -> Tensor:
        model = load(tmp_path / "model", group=ThreadRanks(rank, shared, meeting))
        assert model.adapters is not None
        model.adapters.put(0, store(tmp_path / "model", model, size).read(content(path)).ranks[rank])
        session = Session(model, seed=7)
        request = session.request(tokens, capacity=32)
        request.adapter_slot = 0
        return torch.cat([session.logits(request, count) for count in (17, 12, 1)])

    with ThreadPoolExecutor(size) as pool:
        logits = list(pool.map(run, range(size)))
    torch.testing.assert_close(logits[0], reference_logits(merged(reference, path), tokens), atol=2e-4, rtol=0.0)
