"""Weights quantized to codes of floats while they are loaded: against plain torch, whole and cut for ranks."""

import json
import logging
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.backends.options import BackendOptions
from engine.backends.plain_torch import TorchBackend
from engine.backends.select import select_backend
from engine.kernels.cpu.gemm import Arithmetic
from engine.model.checkpoints.on_load import NF4_VALUES, WeightScheme
from engine.model.config import load_model_config
from engine.model.loader import load_model
from engine.model.parameters import expected_shapes
from engine.model.shard import TensorSlice
from tandem.errors import ConfigError
from tests.support.engine.paged_harness import LoadingRank, Session, needs, random_tokens

SCHEMES = tuple(WeightScheme)
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "torch_dtype": "float32",
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "attention_bias": True,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
OPTIONS = BackendOptions(device=torch.device("cpu"), dtype="float32", num_threads=1)


class QuantizingTorch(TorchBackend):
    """Plain torch with the restored values of quantized weights: the reference."""

    def __init__(self, scheme: WeightScheme) -> None:
        super().__init__()
        self.quantizes_to = scheme  # type: ignore[assignment]


def random_weight(rows: int, columns: int) -> Tensor:
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).bfloat16()
    weight[1] = 0.0
    weight[2, 3], weight[3, 5] = 40.0, -40.0
    weight[4] *= 1e-30
    return weight


def reference_fp8(weight: Tensor) -> Tensor:
    scale = weight.float().abs().amax(dim=1, keepdim=True) / 448
    return torch.where(scale > 0, (weight.float() / scale).to(torch.float8_e4m3fn).float() * scale, 0.0)


def reference_nf4(weight: Tensor) -> Tensor:
    """By rows in blocks of 64: of the 16 values the nearest."""
    table, blocks = torch.tensor(NF4_VALUES), []
    for block in weight.float().split(64, dim=1):
        largest = block.abs().amax(dim=1, keepdim=True)
        scaled = torch.where(largest > 0, block / largest, 0.0)
        blocks.append(table[(scaled[:, :, None] - table).abs().argmin(dim=2)] * largest)
    return torch.cat(blocks, dim=1)


@pytest.mark.parametrize("columns", [64, 100, 320])
@pytest.mark.parametrize(("scheme", "reference"), [(SCHEMES[0], reference_fp8), (SCHEMES[1], reference_nf4)])
def test_on_load_values_equal_those_of_plain_torch(scheme, reference, columns: int) -> None:
    weight = random_weight(50, columns)
    assert torch.equal(scheme.quantize(weight).dequantized(), reference(weight))
    assert torch.equal(scheme.quantize(weight.float()).dequantized(), reference(weight))


def test_on_load_takes_8_and_4_and_a_half_bits() -> None:
    weight = random_weight(64, 1024)
    assert WeightScheme.FP8.quantize(weight).nbytes == weight.numel() + 64 * 4
    assert WeightScheme.NF4.quantize(weight).nbytes == weight.numel() * 9 // 16 + 16 * 4


def test_on_load_of_many_rows_equals_that_of_its_parts() -> None:
    weight = torch.randn(9000, 256, generator=torch.Generator().manual_seed(1))  # in more blocks than one
    for scheme in SCHEMES:
        assert torch.equal(scheme.quantize(weight).dequantized()[8000:], scheme.quantize(weight[8000:]).dequantized())


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_on_load_of_values_that_are_not_finite_is_refused(scheme: WeightScheme, bad: float) -> None:
    weight = random_weight(8, 64)
    weight[6, 50] = bad
    with pytest.raises(ConfigError, match="has values that are not finite"):
        scheme.quantize(weight)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("dim", "begin", "end"), [(0, 7, 30), (1, 64, 128), (1, 0, 40), (1, 100, 200), (1, 160, 200)])
def test_on_load_part_has_the_values_of_the_whole(scheme: WeightScheme, dim: int, begin: int, end: int) -> None:
    weight = random_weight(40, 200)
    read = scheme.needed(weight.shape, TensorSlice(dim=dim, begin=begin, end=end))
    first = 0 if read is None else read.begin
    values = weight if read is None else weight.narrow(read.dim, read.begin, read.end - read.begin)
    part = scheme.quantize(values).part(TensorSlice(dim=dim, begin=begin - first, end=end - first))
    expected = scheme.quantize(weight).dequantized().narrow(dim, begin, end - begin)
    assert torch.equal(part.dequantized(), expected)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(LLAMA))
    generator = torch.Generator().manual_seed(2)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.15 + (1.0 if "norm" in name else 0.0)
        for name, shape in expected_shapes(load_model_config(path)).items()
    }
    save_file(tensors, path / "model.safetensors")
    return path


def restored_directory(directory: Path, scheme: WeightScheme, path: Path) -> Path:
    """The same model with the restored values of quantized projections."""
    path.mkdir()
    stored = load_file(directory / "model.safetensors")
    for name, value in stored.items():
        if "_proj.weight" in name:
            stored[name] = scheme.quantize(value).dequantized()
    save_file(stored, path / "model.safetensors")
    (path / "config.json").write_text((directory / "config.json").read_text())
    return path


@pytest.mark.parametrize("scheme", SCHEMES)
def test_on_load_tokens_and_logits_equal_those_of_restored_weights_in_float32(
    scheme: WeightScheme, directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    needs(Arithmetic.FP8_FLOAT32)
    with caplog.at_level(logging.INFO):
        ours = load_model(directory, backend=select_backend(replace(OPTIONS, quantization=scheme.value)))
    assert f"{7 * 2} matrices are quantized as {scheme.value}, and multiplied so" in caplog.messages
    assert ours.num_kept == 7 * 2
    restored = load_model(restored_directory(directory, scheme, tmp_path / "dense"), backend=select_backend(OPTIONS))
    plain = load_model(directory, backend=QuantizingTorch(scheme))
    prompts = [random_tokens(random.Random(i), 5 + 17 * i) for i in range(3)]
    answers, logits = [], []
    for model in (ours, restored, plain):
        session = Session(model, num_blocks=80, block_size=16)
        requests = [session.request(prompt) for prompt in prompts]
        session.run(requests, 12, chunk=25, rng=random.Random(1))
        answers.append([list(request.token_ids) for request in requests])
        logits.append(session.logits(session.request(prompts[-1]), len(prompts[-1])).clone())
    assert answers[0] == answers[1] == answers[2]
    assert torch.equal(logits[0], logits[1])
    torch.testing.assert_close(logits[0], logits[2], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_load_weights_take_less_memory(dtype: str, directory: Path) -> None:
    needs(Arithmetic.FP8)
    sizes = {
        name: load_model(directory, backend=select_backend(replace(OPTIONS, dtype=dtype, quantization=name)))
        for name in ("none", "fp8", "nf4")
    }
    for part in ("qkv", "output", "gate_up", "down"):
        whole, fp8, nf4 = (getattr(model.layers[0], part).nbytes for model in sizes.values())
        bits = 32 if dtype == "float32" else 16
        assert fp8 <= whole * 8.6 / bits + 4096
        assert nf4 <= whole * 4.6 / bits + 4096
    whole, fp8, nf4 = (model.weights_bytes for model in sizes.values())
    assert nf4 < fp8 < whole, "which is what the memory budget counts"
    heads = [model.head.nbytes for model in sizes.values()]
    assert (heads[1] < 0.6 * heads[0]) == (dtype == "bfloat16"), "eight bits, as with int8 and int4; none in float32"


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("size", [2, 4])
def test_on_load_ranks_have_their_parts_of_the_whole(scheme: WeightScheme, size: int, directory: Path) -> None:
    whole = load_model(directory, backend=QuantizingTorch(scheme))
    ranks = [
        load_model(directory, backend=QuantizingTorch(scheme), group=LoadingRank(rank, size)) for rank in range(size)
    ]
    for index, layer in enumerate(whole.layers):
        for name in ("output", "down"):
            parts = [getattr(rank.layers[index], name)._part.weight for rank in ranks]
            assert torch.equal(torch.cat(parts, dim=1), getattr(layer, name).projection.weight)
        gates = [rank.layers[index].gate_up.weight.chunk(2) for rank in ranks]
        stacked = torch.cat([part for half in zip(*gates, strict=True) for part in half])
        assert torch.equal(stacked, layer.gate_up.weight)
        heads = whole.config.num_heads // size * whole.config.head_dim
        queries = torch.cat([rank.layers[index].qkv.weight[:heads] for rank in ranks])
        assert torch.equal(queries, layer.qkv.weight[: len(queries)])


def test_on_load_ranks_multiply_codes_too(directory: Path) -> None:
    needs(Arithmetic.FP8)
    backend = select_backend(replace(OPTIONS, quantization="nf4"))
    assert load_model(directory, backend=backend, group=LoadingRank(1, 2)).num_kept == 7 * 2


@pytest.mark.parametrize("scheme", SCHEMES)
def test_on_load_checkpoint_with_values_that_are_not_finite_is_refused_by_name(
    scheme: WeightScheme, directory: Path, tmp_path: Path
) -> None:
    path = restored_directory(directory, scheme, tmp_path / "damaged")
    stored = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    stored[name][3, 4] = float("nan")
    save_file(stored, path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"checkpoint: {name} has values that are not finite"):
        load_model(path, backend=QuantizingTorch(scheme))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_on_load_where_nothing_multiplies_codes_is_refused(scheme: WeightScheme) -> None:
    for options in (replace(OPTIONS, kernels="torch"), replace(OPTIONS, dtype="float16")):
        with pytest.raises(ConfigError, match=r"engine\.quantization needs compiled kernels"):
            select_backend(replace(options, quantization=scheme.value))
