"""What bitsandbytes itself quantizes is read as it restores it."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.model.checkpoints.on_load import WeightScheme
from engine.model.checkpoints.registry import parse_format
from engine.model.checkpoints.restored import RestoredCheckpoint
from engine.model.checkpoints.safetensors_files import Checkpoint
from engine.model.files import ModelDirectory

functional = pytest.importorskip("bitsandbytes.functional", reason="quantized by the library itself")

MODULE = "model.layers.0.mlp.up_proj"
SHAPE = (64, 320)


def restored(folder: Path, parts: dict[str, Tensor], **settings: object) -> Tensor:
    save_file({f"{MODULE}.{name}": part.contiguous() for name, part in parts.items()}, folder / "model.safetensors")
    read = parse_format({"quant_method": "bitsandbytes", **settings})
    assert read is not None
    with Checkpoint(ModelDirectory(folder)) as checkpoint:
        source = RestoredCheckpoint(checkpoint, read, {f"{MODULE}.weight": SHAPE}, dtype=torch.float32)
        assert source.names == {f"{MODULE}.weight"}
        source.require(f"{MODULE}.weight", SHAPE)
        return source.tensor(f"{MODULE}.weight")


@pytest.mark.parametrize("table", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
def test_bitsandbytes_four_bits_are_read_as_the_library_restores_them(table: str, nested: bool, tmp_path: Path) -> None:
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)) * 0.1
    codes, state = functional.quantize_4bit(values, quant_type=table, compress_statistics=nested, blocksize=64)
    parts = {"weight": codes, **{f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}}
    found = restored(tmp_path, parts, load_in_4bit=True, bnb_4bit_quant_type=table)
    assert torch.equal(found, functional.dequantize_4bit(codes, state))


def test_bitsandbytes_nf4_at_load_has_the_values_of_the_library() -> None:
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(2)) * 0.1
    codes, state = functional.quantize_4bit(values, quant_type="nf4", blocksize=64)
    assert torch.equal(WeightScheme.NF4.quantize(values).dequantized(), functional.dequantize_4bit(codes, state))


def test_bitsandbytes_eight_bits_are_read_as_the_library_restores_them(tmp_path: Path) -> None:
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)) * 0.1
    codes, scale, _ = functional.int8_vectorwise_quant(values.half())
    found = restored(tmp_path, {"weight": codes, "SCB": scale}, load_in_8bit=True)
    # The library multiplies by 1 / 127 last.
    torch.testing.assert_close(found, functional.int8_vectorwise_dequant(codes, scale), atol=0.0, rtol=3e-7)
