"""Each format: the matrix that its stored tensors mean, exactly, whole and in parts.

The stored tensors come from tests.support.engine.quantized_writers, which writes the documented layouts.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine.model.checkpoints.registry import parse_format
from engine.model.checkpoints.restored import RestoredCheckpoint
from engine.model.checkpoints.safetensors_files import Checkpoint
from engine.model.checkpoints.stored_matrix import DenseMatrix
from engine.model.files import ModelDirectory
from engine.model.shard import TensorSlice
from tests.support.engine.quantized_writers import FORMATS, WrittenFormat

MODULE = "model.layers.0.mlp.up_proj"
NAME = MODULE + ".weight"


def written(folder: Path, form: WrittenFormat, rows: int, columns: int, seed: int) -> torch.Tensor:
    parts, values = form.matrix(np.random.default_rng(seed), rows, columns)
    save_file({f"{MODULE}.{name}": part for name, part in parts.items()}, folder / "model.safetensors")
    return values


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("rows", "columns"), [(24, 64), (40, 160), (8, 32)])
def test_format_restored_matrix_and_its_parts_equal_reference(
    name: str, rows: int, columns: int, tmp_path: Path
) -> None:
    form = FORMATS[name]
    expected = written(tmp_path, form, rows, columns, seed=rows)
    with Checkpoint(ModelDirectory(tmp_path)) as checkpoint:
        read = parse_format(form.config)
        source = RestoredCheckpoint(checkpoint, read, {NAME: (rows, columns)}, dtype=torch.float32)
        assert source.names == {NAME}
        source.require(NAME, (rows, columns))
        assert torch.equal(source.tensor(NAME), expected)
        for size in (2, 4):
            for rank in range(size):
                for dim, count in enumerate((rows, columns)):
                    begin, end = rank * count // size, (rank + 1) * count // size
                    part = source.tensor(NAME, TensorSlice(dim=dim, begin=begin, end=end))
                    assert part.is_contiguous()
                    assert torch.equal(part, expected.narrow(dim, begin, end - begin)), (size, rank, dim)
        matrix = source.matrix(NAME)
        assert matrix.shape == (rows, columns)
        assert matrix.nbytes < expected.nbytes or isinstance(matrix, DenseMatrix)
        source.forget(NAME)
        assert torch.equal(source.tensor(NAME), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_restored_matrix_is_rounded_once(dtype: torch.dtype, tmp_path: Path) -> None:
    form = FORMATS["gptq-4"]
    expected = written(tmp_path, form, 16, 64, seed=1)
    with Checkpoint(ModelDirectory(tmp_path)) as checkpoint:
        source = RestoredCheckpoint(checkpoint, parse_format(form.config), {NAME: (16, 64)}, dtype=dtype)
        assert torch.equal(source.tensor(NAME), expected.to(dtype))


def test_bitsandbytes_blocks_across_rows_are_restored(tmp_path: Path) -> None:
    # Blocks of 64 values of the flattened matrix, and rows of 21 or 40.
    for columns in (21, 40):
        folder = tmp_path / str(columns)
        folder.mkdir()
        expected = written(folder, FORMATS["nf4-nested"], 7, columns, seed=columns)
        with Checkpoint(ModelDirectory(folder)) as checkpoint:
            read = parse_format(FORMATS["nf4-nested"].config)
            source = RestoredCheckpoint(checkpoint, read, {NAME: (7, columns)}, dtype=torch.float32)
            assert torch.equal(source.tensor(NAME), expected)
            part = TensorSlice(dim=1, begin=5, end=16)
            assert torch.equal(source.tensor(NAME, part), expected[:, 5:16])
