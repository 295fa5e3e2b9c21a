"""Quantized checkpoints on the CUDA backend, in Triton's interpreter: held as they are stored, with restored logits."""

import logging
import random
from pathlib import Path

import pytest
import torch

from tests.unit.engine.kernels.triton_interpreter import interpreted  # isort: skip
from engine.backends.cuda.backend import CudaBackend
from engine.backends.options import BackendOptions
from engine.model.backend import ProjectionRole
from engine.model.loader import load_model
from engine.model.spec import Activation
from tandem.errors import ConfigError
from tests.support.engine.paged_harness import LoadingRank, Session
from tests.support.engine.quantized_writers import FORMATS, PROJECTIONS, write_llama
from tests.unit.engine.kernels.test_triton_group_gemm import group_int, int8_rows

__all__ = ["interpreted"]

TOKENS = [5, 17, 3, 80, 41, 8, 8, 96]
NUM_KEPT = {
    **dict.fromkeys(("gptq-3", "gptq-4", "gptq-8", "awq", "w4a16-zeros", "w8a16", "w8a8", "w8", "fp8-row"), 7),
    "gptq-order": 2,  # queries and keys, gates and values differ in their order
    "fp8-powers": 7,
    "fp8-block": 0,  # of 40 columns
    "fp8-e5m2": 0,
    "nf4": 0,
}


def backend(**options):
    return CudaBackend(BackendOptions(device=torch.device("cpu"), **{"dtype": "float16", **options}))


def loaded(path, *, rank=0, size=1, **options):
    group = LoadingRank(rank, size) if size > 1 else None
    return load_model(path / "quantized", backend=backend(**options), group=group)


def logits(model, cuts=(8,)):
    session = Session(model, block_size=16)
    request = session.request(TOKENS)
    return torch.cat([session.logits(request, count).clone() for count in cuts])


@pytest.mark.in_turns
@pytest.mark.parametrize("name", NUM_KEPT)
def test_cuda_backend_multiplies_checkpoint_as_stored(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_llama(tmp_path, FORMATS[name])
    with caplog.at_level(logging.INFO):
        model = loaded(tmp_path, quantization="auto")
    restored = loaded(tmp_path, quantization="none")
    assert (model.num_kept, restored.num_kept) == (NUM_KEPT[name], 0)
    if NUM_KEPT[name] == len(PROJECTIONS):
        assert f"but {len(PROJECTIONS)} matrices are multiplied as they are stored" in caplog.messages
        assert model.weights_bytes < 0.8 * restored.weights_bytes
    # Both round what stands between projections to half precision; the restored ones their weights, and W8A8 its rows.
    close = 0.2 if name == "w8a8" else 3e-2
    torch.testing.assert_close(logits(model), logits(restored), atol=close, rtol=close)


def test_cuda_backend_in_float32_restores_weights(tmp_path: Path) -> None:
    write_llama(tmp_path, FORMATS["awq"])
    assert loaded(tmp_path, dtype="float32", quantization="stored").num_kept == 0


@pytest.mark.parametrize("name", ["w4a16", "w8a8"])
def test_cuda_backend_deterministic_quantized_logits_do_not_depend_on_chunks(name: str, tmp_path: Path) -> None:
    write_llama(tmp_path, FORMATS[name])
    model = loaded(tmp_path, quantization="stored", deterministic=True)
    assert model.num_kept == len(PROJECTIONS)
    assert torch.equal(logits(model), logits(model, cuts=(3, 1, 4)))


def test_cuda_backend_ranks_hold_their_parts_as_stored(tmp_path: Path) -> None:
    write_llama(tmp_path, FORMATS["awq"])
    whole, ranks = (
        loaded(tmp_path, quantization="stored"),
        [loaded(tmp_path, rank=rank, size=2, quantization="stored") for rank in range(2)],
    )
    # The second one's part of `down` begins within a group: its groups would be too small for a word's part.
    assert [rank.num_kept for rank in ranks] == [len(PROJECTIONS), len(PROJECTIONS) - 1]
    x = torch.randn(5, 64).half()
    heads = [model.layers[0].qkv(x) for model in (whole, *ranks)]
    head_dim = whole.config.head_dim
    queries, keys = whole.config.num_heads * head_dim, whole.config.num_kv_heads * head_dim
    parts = [found.split([queries // 2, keys // 2, keys // 2], dim=1) for found in heads[1:]]
    assert torch.equal(heads[0], torch.cat([part for pair in zip(*parts, strict=True) for part in pair], dim=1))


@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("ordered", [False, True])
def test_cuda_projections_of_quantized_weights_equal_restored_ones(rows: int, ordered: bool) -> None:
    """Alone, added to the residual, gated with and without a bias; in activation order, too."""
    rng = random.Random(rows)
    matrix = group_int(rng, 4, 96, 128, 32, ordered=ordered)
    torch.manual_seed(rows)
    x, bias, residual = torch.randn(rows, 128).half(), torch.randn(96).half(), torch.randn(rows, 96).half()
    ours = backend(quantization="stored")
    assert ours.keeps(matrix)
    expected = x.float() @ matrix.dequantized().T
    close = {"atol": 2e-2, "rtol": 5e-3}
    projection = ours.projection(matrix, bias, ProjectionRole.QKV)
    assert projection.nbytes < 96 * 128
    torch.testing.assert_close(projection(x).float(), expected + bias.float(), **close)
    added = residual.float() + expected
    assert ours.closing(matrix, None, ProjectionRole.DOWN)(x, residual) is None
    torch.testing.assert_close(residual.float(), added, **close)
    gate, up = expected.chunk(2, 1)
    silu = torch.nn.functional.silu
    torch.testing.assert_close(ours.gated(matrix, None)(x).float(), silu(gate) * up, **close)
    gate, up = (expected + bias.float()).chunk(2, 1)
    torch.testing.assert_close(ours.gated(matrix, bias)(x).float(), silu(gate) * up, **close)
    gelu = torch.nn.functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(ours.gated(matrix, bias, Activation.GELU_TANH)(x).float(), gelu, **close)


@pytest.mark.parametrize(("quantization", "bound"), [("int8", 0.05), ("int4", 0.4)])
def test_cuda_backend_quantizes_float_weights_at_load(quantization: str, bound: float, tmp_path: Path) -> None:
    write_llama(tmp_path, FORMATS["w8a16"])
    dense = load_model(tmp_path / "dense", backend=backend())
    model = load_model(tmp_path / "dense", backend=backend(quantization=quantization))
    assert model.backend.name == f"triton-{quantization}"
    assert model.weights_bytes < 0.75 * dense.weights_bytes
    expected = logits(dense)
    assert (logits(model) - expected).square().mean().sqrt() < bound * expected.std()


def test_cuda_backend_int4_of_ragged_depth_has_eight_bits() -> None:
    ours, weight, x = backend(quantization="int4"), torch.randn(8, 40).half(), torch.randn(2, 40).half()
    projection = ours.projection(weight, None, ProjectionRole.QKV)
    torch.testing.assert_close(projection(x).float(), x.float() @ weight.float().T, atol=0.2, rtol=0.02)


def test_cuda_backend_tied_head_is_quantized_beside_embedding() -> None:
    table = torch.randn(40, 64).half()
    embedding, head = backend(quantization="int8").tied(table)
    assert (embedding.nbytes, head.nbytes) == (table.nbytes, 40 * 64 + 40 * 4)
    assert torch.equal(embedding(torch.tensor([3, 7])), table[[3, 7]])


def test_cuda_backend_quantization_in_float32_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.quantization is int8.*set model\.dtype to bfloat16"):
        backend(dtype="float32", quantization="int8")


def test_cuda_backend_keeps_nothing_when_all_is_to_be_restored() -> None:
    matrix = int8_rows(random.Random(0), 8, 32)
    assert not backend(quantization="none").keeps(matrix)
    assert backend(quantization="auto").keeps(matrix)
