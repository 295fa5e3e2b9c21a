"""Random LoRA adapters in PEFT's form for models of transformers, and the models that they make when merged."""

import copy
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

_PREFIX = "base_model.model."


def write_adapter(
    path: Path,
    model: Any,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    modules: Collection[str] | None = None,
    spread: float = 0.15,
    **config: Any,
) -> Path:
    """Write an adapter with random matrices for every linear module of the model's layers; `modules`: the last parts of
    those names, None for all. `config`: further fields of `adapter_config.json`. Returns `path`.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, module in linear_modules(model).items():
        if modules is None or name.rsplit(".", 1)[1] in modules:
            rows, columns = module.weight.shape
            tensors[f"{_PREFIX}{name}.lora_A.weight"] = torch.randn(rank, columns, generator=generator) * spread
            tensors[f"{_PREFIX}{name}.lora_B.weight"] = torch.randn(rows, rank, generator=generator) * spread
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    raw = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "bias": "none", **config}
    (path / "adapter_config.json").write_text(json.dumps(raw))
    return path


def linear_modules(model: Any) -> dict[str, nn.Linear]:
    """The linear modules of a model's layers that adapters can add to, by name: no router of experts."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and ".layers." in name
        and ".mlp.gate." not in f"{name}."
        and "expert" not in name
    }


def merged(model: Any, path: Path) -> Any:
    """A copy of a model with an adapter's products added to its matrices."""
    raw = json.loads((path / "adapter_config.json").read_text())
    tensors = load_file(path / "adapter_model.safetensors")
    result = copy.deepcopy(model)
    with torch.no_grad():
        for name, module in linear_modules(result).items():
            if (down := tensors.get(f"{_PREFIX}{name}.lora_A.weight")) is None:
                continue
            rank = len(down)
            scale = raw["lora_alpha"] / (rank**0.5 if raw.get("use_rslora") else rank)
            module.weight += scale * tensors[f"{_PREFIX}{name}.lora_B.weight"].float() @ down.float()
    return result
