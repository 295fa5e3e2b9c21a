"""Quantized checkpoints on CUDA: held in their few bytes, with the logits of restored weights."""

from pathlib import Path

import pytest
import torch

from engine.backends.options import BackendOptions
from engine.backends.select import select_backend
from engine.model.decoder import Decoder
from engine.model.loader import load_model
from tests.support.engine.paged_harness import Session
from tests.support.engine.quantized_writers import FORMATS, PROJECTIONS, write_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOKENS = [5, 17, 3, 80, 41, 8, 8, 96]
HELD = ("gptq-4", "gptq-8", "awq", "w4a16", "w4a16-zeros", "w8a16", "w8a8", "ct-fp8-row", "fp8-tensor", "fp8-powers")


def loaded(path: Path, **options: object) -> Decoder:
    given = {"device": torch.device("cuda", 0), "dtype": "bfloat16"} | options
    return load_model(path, backend=select_backend(BackendOptions(**given)))  # type: ignore[arg-type]


def logits(model: Decoder, *cuts: int) -> torch.Tensor:
    session = Session(model, block_size=16)
    request = session.request(TOKENS)
    return torch.cat([session.logits(request, count).cpu() for count in cuts])


@pytest.mark.parametrize("name", HELD)
def test_checkpoint_on_cuda_is_multiplied_as_stored(name: str, tmp_path: Path) -> None:
    write_llama(tmp_path, FORMATS[name], num_layers=2)
    model = loaded(tmp_path / "quantized", quantization="stored")
    restored = loaded(tmp_path / "quantized", quantization="none")
    assert (model.num_kept, restored.num_kept) == (2 * len(PROJECTIONS), 0)
    found, expected = logits(model, 7, 1), logits(restored, 7, 1)
    assert (found - expected).square().mean().sqrt() < 0.03 * expected.std()


@pytest.mark.parametrize("name", ["awq", "w8a8", "fp8-row"])
def test_deterministic_quantized_logits_on_cuda_do_not_depend_on_chunks(name: str, tmp_path: Path) -> None:
    write_llama(tmp_path, FORMATS[name])
    model = loaded(tmp_path / "quantized", quantization="stored", deterministic=True)
    assert torch.equal(logits(model, 8), logits(model, 3, 1, 4))


@pytest.mark.parametrize(("quantization", "bound"), [("int8", 0.05), ("int4", 0.4)])
def test_float_weights_are_quantized_at_load_on_cuda(quantization: str, bound: float, tmp_path: Path) -> None:
    write_llama(tmp_path, FORMATS["w8a16"])
    expected = logits(loaded(tmp_path / "dense"), 8)
    found = logits(loaded(tmp_path / "dense", quantization=quantization), 8)
    assert (found - expected).square().mean().sqrt() < bound * expected.std()
