"""What is written tensor by tensor is read back: by our reader, and by the library."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.model.checkpoints.safetensors_files import STORED_DTYPES, Checkpoint
from engine.model.files import ModelDirectory
from engine.quantize.safetensors_writer import DeclaredTensor, SafetensorsWriter
from tandem.errors import ConfigError

NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}
TENSORS = {
    "bytes": torch.arange(7, dtype=torch.int8),
    "half": torch.randn(3, 5).half(),
    "brain": torch.randn(4, 3).bfloat16(),
    "words": torch.arange(6, dtype=torch.int32).view(2, 3),
    "long": torch.tensor([3, 5]),
    "one": torch.tensor(2.5),
    "none": torch.empty(0, 4),
    "turned": torch.randn(6, 4).t(),
}
DECLARED = [DeclaredTensor(name=n, dtype=NAMES[t.dtype], shape=tuple(t.shape)) for n, t in TENSORS.items()]


@pytest.mark.parametrize("max_bytes", [10**9, 60, 1])
def test_writer_tensors_are_read_back(max_bytes: int, tmp_path: Path) -> None:
    with SafetensorsWriter(tmp_path, DECLARED, max_file_bytes=max_bytes) as writer:
        for name in reversed(TENSORS):
            writer.write(name, TENSORS[name])
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) == 1) == (max_bytes > 1000)
    by_library = {name: tensor for file in files for name, tensor in load_file(file).items()}
    with Checkpoint(ModelDirectory(tmp_path)) as checkpoint:
        assert checkpoint.names == by_library.keys() == TENSORS.keys()
        assert checkpoint.size_bytes == writer.size_bytes
        for name, expected in TENSORS.items():
            for found in (checkpoint.tensor(name), by_library[name]):
                assert found.dtype is expected.dtype
                assert torch.equal(found, expected)
    assert all(entry.begin % STORED_DTYPES[entry.dtype].itemsize == 0 for entry in entries(tmp_path))
    if len(files) > 1:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["metadata"] == {"total_size": writer.size_bytes}


def entries(folder: Path) -> list[object]:
    with Checkpoint(ModelDirectory(folder)) as checkpoint:
        return list(checkpoint.entries.values())


@pytest.mark.parametrize("name", ["long", "half", "unknown"])
def test_writer_undeclared_tensors_are_refused(name: str, tmp_path: Path) -> None:
    with SafetensorsWriter(tmp_path, DECLARED) as writer:
        for declared, tensor in TENSORS.items():
            writer.write(declared, tensor)
        with pytest.raises(ValueError, match="was not declared, or is written twice"):
            writer.write(name, TENSORS["long"])


def test_writer_missing_tensor_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="7 declared tensors were not written"),
        SafetensorsWriter(tmp_path, DECLARED) as writer,
    ):
        writer.write("long", TENSORS["long"])


def test_writer_keeps_the_error_that_ended_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="stop"), SafetensorsWriter(tmp_path, DECLARED):
        raise ConfigError("stop")
