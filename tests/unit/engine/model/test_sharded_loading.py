"""A rank reads its own slices of the mapped files and touches nothing else."""

import json
import struct
from math import prod

import pytest
import torch
from safetensors.torch import load_file

from engine.model.checkpoints.safetensors_files import Checkpoint, SafetensorsFile
from engine.model.config import load_model_config
from engine.model.parameters import expected_shapes, parameter_table
from engine.model.shard import Shard, TensorSlice
from tests.support.engine.paged_harness import load_plain, reference_model

SIZE = 4


class StillGroup:
    """A rank that only loads."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size = rank, SIZE


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    reference_model(
        "LlamaForCausalLM", num_attention_heads=8, num_key_value_heads=2, attention_bias=True, mlp_bias=True
    ).save_pretrained(path)
    return path


@pytest.fixture
def views(monkeypatch):
    """Every view that was taken of a checkpoint: name and tensor."""
    taken = []
    whole = Checkpoint.tensor

    def tensor(self, name, part=None):
        taken.append((name, whole(self, name, part)))
        return taken[-1][1]

    monkeypatch.setattr(Checkpoint, "tensor", tensor)
    return taken


def test_sharded_loading_rank_reads_its_slices_in_place(directory, views) -> None:
    config = load_model_config(directory)
    stored = load_file(directory / "model.safetensors")
    parts = {part.name: part for parts in parameter_table(config).values() for part in parts}
    read = dict.fromkeys(parts, 0)
    for rank in range(SIZE):
        views.clear()
        model = load_plain(directory, group=StillGroup(rank))
        shard = Shard(config, rank=rank, size=SIZE)
        assert len({name for name, _ in views}) == len(views)
        for name, view in views:
            part = shard.slice(parts[name])
            expected = (
                stored[name] if part is None else stored[name].narrow(part.dim, part.begin, part.end - part.begin)
            )
            assert view.shape == expected.shape
            # The storage is the mapped tensor itself: nothing was copied before the slice was taken.
            assert view.untyped_storage().nbytes() == stored[name].nbytes
            assert view.storage_offset() == (0 if part is None else expected.storage_offset())
            read[name] += view.nbytes
        assert sum(view.nbytes for _, view in views) < sum(tensor.nbytes for tensor in stored.values()) * 0.4
        assert model.config == shard.config
        views.clear()
    for name, num_bytes in read.items():
        copies = 2 if ".k_proj." in name or ".v_proj." in name else SIZE if "norm" in name else 1
        assert num_bytes == stored[name].nbytes * copies, name


def test_sharded_loading_progress_counts_own_bytes(directory) -> None:
    seen = []
    load_plain(directory, group=StillGroup(1), progress=lambda done, total: seen.append((done, total)))
    num_tensors = len(expected_shapes(load_model_config(directory))) - 2 * 3
    assert len(seen) == num_tensors
    held = {total for _, total in seen}
    assert held == {seen[-1][0]}
    assert seen[-1][0] < sum(prod(shape) for shape in expected_shapes(load_model_config(directory)).values())
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sharded_loading_reads_parts_at_any_offset(tmp_path, dtype) -> None:
    name = {torch.float32: "F32", torch.bfloat16: "BF16"}[dtype]
    tensors = {"odd": torch.arange(35).view(5, 7).to(dtype), "flat": torch.arange(9).to(dtype)}
    data, header = b"", {}
    for key, tensor in tensors.items():
        raw = tensor.view(torch.uint8).numpy().tobytes()
        header[key] = {"dtype": name, "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    parts = [
        TensorSlice(dim=0, begin=1, end=4),
        TensorSlice(dim=1, begin=2, end=7),
        TensorSlice(dim=0, begin=2, end=2),
        None,
    ]
    for padding in range(4):
        text = json.dumps(header).encode()
        text += b" " * ((padding - len(text)) % 4)
        path = tmp_path / f"{padding}.safetensors"
        path.write_bytes(struct.pack("<Q", len(text)) + text + data)
        file = SafetensorsFile.mapped(path)
        for entry in file.entries:
            whole = tensors[entry.name]
            for part in parts:
                if part is not None and part.dim >= whole.dim():
                    continue
                expected = whole if part is None else whole.narrow(part.dim, part.begin, part.end - part.begin)
                assert torch.equal(file.tensor(entry, part).clone(), expected), (padding, entry.name, part)
