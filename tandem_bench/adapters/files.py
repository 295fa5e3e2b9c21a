"""Random adapters in PEFT's form that add to every matrix of a model which adapters can add to."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.adapters.packing import adapted_parts, pack_adapter
from engine.adapters.peft_files import read_pairs
from engine.model.config import load_model_config
from engine.model.shard import Shard
from engine.model.spec import ModelSpec
from tandem.adapters.files import ADAPTER_WEIGHTS, read_adapter_content
from tandem.adapters.lora_config import ADAPTER_CONFIG
from tandem.model_path import model_directory

RANK = 8
_SPREAD = 0.02
_MAX_BYTES = 1 << 30


def write_adapters(model: str, folder: Path, count: int, *, seed: int = 0) -> dict[str, Path]:
    """Write adapters of rank RANK in bfloat16; returns their directories by name."""
    spec = load_model_config(model_directory(model))
    shapes = {part.name: part.shape for parts in adapted_parts(spec).values() for part in parts}
    written = {}
    for number in range(count):
        name = f"a{number:03}"
        written[name] = folder / name
        _write(written[name], shapes, seed=seed + number)
    return written


def packed_bytes(model: str, path: Path, dtype: torch.dtype) -> int:
    """Memory that a worker of one rank needs for an adapter, in bytes."""
    spec = load_model_config(model_directory(model))
    sites = adapted_parts(spec)
    content = read_adapter_content(path, max_bytes=_MAX_BYTES)
    pairs = read_pairs(content, (part for parts in sites.values() for part in parts), max_rank=RANK)
    return pack_adapter(pairs, sites, _whole(spec), dtype).values.nbytes


def _whole(spec: ModelSpec) -> Shard:
    return Shard(spec, rank=0, size=1)


def _write(path: Path, shapes: dict[str, tuple[int, ...]], *, seed: int) -> None:
    drawn = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=drawn) * _SPREAD).to(torch.bfloat16)

    tensors = {}
    for name, (rows, columns) in shapes.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{module}.lora_A.weight"] = values(RANK, columns)
        tensors[f"{module}.lora_B.weight"] = values(rows, RANK)
    path.mkdir(parents=True)
    save_file(tensors, path / ADAPTER_WEIGHTS)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "bias": "none"}
    (path / ADAPTER_CONFIG).write_text(json.dumps(config), encoding="utf-8")
