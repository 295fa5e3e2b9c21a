"""Models with mixtures of experts in compiled kernels, quantized and not: logits, recorded steps, ranks, memory."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.backends.options import BackendOptions
from engine.backends.plain_torch import TorchBackend
from engine.backends.select import select_backend
from engine.kernels.cpu.gemm import Arithmetic
from engine.kernels.cpu.program import KernelProgram
from engine.model.checkpoints.on_load import WeightScheme
from engine.model.decoder import Decoder
from engine.model.loader import load_model
from engine.model.memory_budget import estimate_workspace_bytes
from tests.support.engine.families import FAMILY_CASES
from tests.support.engine.paged_harness import LoadingRank, Session, load_plain, needs, on_kernels, random_tokens
from tests.support.engine.quantized_writers import EXPERT_MATRICES, FORMATS, write_mixtral

CASE = next(case for case in FAMILY_CASES if case.name == "qwen2-moe")
OPTIONS = BackendOptions(device=torch.device("cpu"), dtype="float32", num_threads=1)
MATRICES = 4 * 4 + 3 * (6 + 1) * 3 + 3
"""Attention's of four layers, six experts and a shared one in three, an MLP in one."""


class QuantizingTorch(TorchBackend):
    """The reference, whose weights are those that quantized ones restore to."""

    def __init__(self, scheme: WeightScheme) -> None:
        super().__init__()
        self.quantizes_to = scheme  # type: ignore[assignment]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen2-moe")
    CASE.save(CASE.model(), path)
    return path


def logits(model: Decoder, count: int = 40) -> torch.Tensor:
    session = Session(model, num_blocks=40, block_size=16)
    request = session.request(random_tokens(random.Random(3), count), capacity=48)
    return torch.cat([session.logits(request, part) for part in (count - 4, 1, 3)])


@pytest.mark.parametrize("scheme", list(WeightScheme))
def test_cpu_mixture_quantized_on_load_has_logits_of_restored_weights(scheme: WeightScheme, directory: Path) -> None:
    needs(Arithmetic.FP8_FLOAT32)
    model = load_model(directory, backend=select_backend(replace(OPTIONS, quantization=scheme.value)))
    assert model.num_kept == MATRICES
    plain = load_model(directory, backend=QuantizingTorch(scheme))
    torch.testing.assert_close(logits(model), logits(plain), atol=1e-4, rtol=1e-4)
    assert model.weights_bytes < load_model(directory, backend=select_backend(OPTIONS)).weights_bytes


@pytest.mark.parametrize(("quantization", "most"), [("none", 0.05), ("int8", 0.08), ("int4", 0.4)])
def test_cpu_mixture_in_bfloat16_stays_near_float32(quantization: str, most: float, directory: Path) -> None:
    """A choice between experts that are nearly as likely may fall otherwise, in some rows."""
    needs(Arithmetic.INT4)
    found, exact = logits(on_kernels(directory, quantization)), logits(load_plain(directory))
    assert ((found - exact).square().mean(dim=1).sqrt() / exact.std()).median() < most


@pytest.mark.parametrize("quantization", ["none", "int8", "int4", "nf4"])
def test_cpu_mixture_recorded_steps_equal_eager_ones(quantization: str, directory: Path) -> None:
    needs(Arithmetic.INT4)
    answers = []
    for records in (False, True):
        session = Session(on_kernels(directory, quantization), num_blocks=60, block_size=16)
        replays: list[KernelProgram] = []
        if records:
            session.runner.record_graphs(max_rows=3, max_tokens=64, max_length=128)
            graphs: Any = session.runner.graphs

            def replay(program: KernelProgram, seen: list[KernelProgram] = replays) -> None:
                seen.append(program)
                program.run()

            graphs.replay = replay
        requests = [session.request(random_tokens(random.Random(i), 5 + 11 * i), capacity=70) for i in range(3)]
        session.run(requests, 20, chunk=13, rng=random.Random(2))
        assert not records or len(replays) > 3
        kv = [session.cache.tensor[:, request.block_table.ids].clone() for request in requests]
        answers.append(([list(request.token_ids) for request in requests], kv))
    assert answers[0][0] == answers[1][0]
    for eager, recorded in zip(answers[0][1], answers[1][1], strict=True):
        assert torch.equal(eager, recorded)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cpu_mixture_row_does_not_depend_on_company(dtype: str, directory: Path) -> None:
    """Nor on how a prompt is cut."""
    options = replace(OPTIONS, dtype=dtype, deterministic=True)
    found = []
    for cuts in ((40,), (17, 1, 1, 21)):
        session = Session(load_model(directory, backend=select_backend(options)), num_blocks=40, block_size=16)
        request = session.request(random_tokens(random.Random(3), 40), capacity=48)
        found.append(torch.cat([session.logits(request, part) for part in cuts]))
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["gptq-4", "awq", "w4a16", "w8a8", "fp8-row", "nf4"])
def test_quantized_mixtral_has_logits_of_restored_weights(name: str, tmp_path: Path) -> None:
    write_mixtral(tmp_path, FORMATS[name])
    found = [logits(load_plain(tmp_path / kind)) for kind in ("quantized", "dense")]
    assert torch.equal(*found)


@pytest.mark.parametrize("name", ["gptq-4", "awq", "w4a16", "w8a8", "fp8-row"])
def test_quantized_mixtral_is_multiplied_as_stored(name: str, tmp_path: Path) -> None:
    needs(Arithmetic.INT4)
    write_mixtral(tmp_path, FORMATS[name])
    model = on_kernels(tmp_path / "quantized", "stored")
    assert model.num_kept == len(EXPERT_MATRICES)
    exact = logits(load_plain(tmp_path / "dense"))
    assert ((logits(model) - exact).square().mean(dim=1).sqrt() / exact.std()).median() < 0.08
    assert on_kernels(tmp_path / "quantized", "stored", rank=1, size=2).num_kept > 0


def test_mixture_ranks_hold_their_parts_of_every_expert(directory: Path) -> None:
    whole = load_plain(directory)
    ranks = [load_plain(directory, group=LoadingRank(rank, 2)) for rank in range(2)]
    for layer, config in enumerate(whole.config.layers):
        if config.moe is None:
            continue
        mixture = whole.layers[layer].down._part  # type: ignore[attr-defined]
        parts = [rank.layers[layer].down._part for rank in ranks]  # type: ignore[attr-defined]
        held = [part.nbytes - mixture._router.nbytes for part in parts]
        assert held == [(mixture.nbytes - mixture._router.nbytes) // 2] * 2
        assert [rank.config.layers[layer].moe.expert_size for rank in ranks] == [24, 24]


def test_workspace_includes_what_a_mixture_takes_for_rows(directory: Path) -> None:
    model = load_model(directory, backend=select_backend(OPTIONS))
    scratch = model.layers[0].down._part._mixture.scratch_bytes - 512  # type: ignore[attr-defined]  # alignment
    bounds = {"dtype": "float32", "max_batch_tokens": 300, "max_num_seqs": 4, "max_context": 128}
    layers = tuple(replace(layer, moe=None, intermediate_size=112) for layer in model.config.layers)
    dense = estimate_workspace_bytes(replace(model.config, layers=layers), **bounds)
    of_rows = (estimate_workspace_bytes(model.config, **bounds) - dense) // 300
    assert of_rows + 4 * 112 * 4 >= scratch
    assert of_rows < scratch
