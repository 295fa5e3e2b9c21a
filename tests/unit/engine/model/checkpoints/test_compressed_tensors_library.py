"""What compressed-tensors itself writes is read as it restores it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.model.checkpoints.registry import parse_format
from engine.model.checkpoints.restored import RestoredCheckpoint
from engine.model.checkpoints.safetensors_files import Checkpoint
from engine.model.files import ModelDirectory

pytest.importorskip("compressed_tensors", reason="written by the library itself")

ROWS, COLUMNS = 48, 128
MODULE = "model.layers.0.mlp.up_proj"
NAME = MODULE + ".weight"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("layout", "weights"),
    [
        ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}),
        ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False}),
        ("pack-quantized", {"num_bits": 8, "strategy": "channel"}),
        ("pack-quantized", {"num_bits": 2, "strategy": "group", "group_size": 32}),
        ("pack-quantized", {"num_bits": 3, "strategy": "group", "group_size": 32}),
        ("pack-quantized", {"num_bits": 3, "strategy": "group", "group_size": 64, "symmetric": False}),
        ("pack-quantized", {"num_bits": 5, "strategy": "channel"}),
        ("pack-quantized", {"num_bits": 6, "strategy": "group", "group_size": 32}),
        ("pack-quantized", {"num_bits": 7, "strategy": "group", "group_size": 32, "symmetric": False}),
        ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
        ("int-quantized", {"num_bits": 8, "strategy": "tensor"}),
        ("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False}),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]}),
        ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
    ],
)
def test_compressed_tensors_written_by_the_library_is_read_as_it_restores_it(
    layout: str, weights: dict[str, Any], tmp_path: Path
) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    values = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3))
    height, width = {
        "tensor": (ROWS, COLUMNS),
        "channel": (1, COLUMNS),
        "group": (1, args.group_size or COLUMNS),
        "block": tuple(args.block_structure or (0, 0)),
    }[str(args.strategy)]
    tiles = values.reshape(ROWS // height, height, COLUMNS // width, width)
    scale, zero = calculate_qparams(tiles.amin((1, 3)), tiles.amax((1, 3)), args)
    if args.strategy == "tensor":
        scale, zero = scale.reshape(1), zero.reshape(1)
    compressor = BaseCompressor.get_value_from_registry(layout)
    state = {"weight": values, "weight_scale": scale, "weight_zero_point": zero}
    stored = compressor.compress(state, scheme)
    expected = compressor.decompress(stored, scheme)["weight"]

    save_file(
        {f"{MODULE}.{name}": value.contiguous() for name, value in stored.items()}, tmp_path / "model.safetensors"
    )
    settings = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": json.loads(scheme.model_dump_json())},
    }
    with Checkpoint(ModelDirectory(tmp_path)) as checkpoint:
        source = RestoredCheckpoint(checkpoint, parse_format(settings), {NAME: (ROWS, COLUMNS)}, dtype=torch.float32)
        source.require(NAME, (ROWS, COLUMNS))
        assert source.names == {NAME}
        assert torch.equal(source.tensor(NAME), expected.float())
