"""Files of a run: a resumable checkpoint, and the export in Hugging Face layout.

Both are safetensors and JSON, written beside the target and renamed, so a reader never sees half.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.optim import Optimizer

from training.model import LlamaModel, ModelConfig
from training.tokenizer import BOS_ID, END_ID, PAD_ID, save_tokenizer


@dataclass(slots=True, kw_only=True)
class Progress:
    """Where a run stands."""

    seed: int
    step: int = 0
    num_tokens: int = 0
    elapsed_s: float = 0.0


def save_checkpoint(path: Path, model: LlamaModel, optimizers: tuple[Optimizer, ...], progress: Progress) -> None:
    """One safetensors file: parameters, optimizer state, and the progress in its metadata."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for i, optimizer in enumerate(optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            for name, tensor in state.items():
                tensors[f"optimizer.{i}.{index}.{name}"] = tensor
    path.parent.mkdir(parents=True, exist_ok=True)
    _save_atomically(tensors, path, {"progress": json.dumps(asdict(progress))})


def load_checkpoint(path: Path, model: LlamaModel, optimizers: tuple[Optimizer, ...]) -> Progress:
    """Put a saved run back into `model` and `optimizers`, which must be built the same way."""
    tensors = load_file(path)
    prefix = "model."
    model.load_state_dict({name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)})
    for i, optimizer in enumerate(optimizers):
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith(f"optimizer.{i}."):
                _, _, index, key = name.split(".", 3)
                state.setdefault(int(index), {})[key] = tensor
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    return Progress(**json.loads(_metadata(path)["progress"]))


def export(folder: Path, model: LlamaModel, config: ModelConfig, tokenizer: Tokenizer) -> None:
    """Write the model in bf16 with its configuration and tokenizer."""
    save_tokenizer(tokenizer, folder, config.max_positions)
    generation = {"bos_token_id": BOS_ID, "eos_token_id": END_ID, "pad_token_id": PAD_ID}
    for name, content in (
        ("config.json", config.to_hugging_face()),
        ("generation_config.json", generation),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    weights = {name: t.to(torch.bfloat16) for name, t in model.state_dict().items()}
    _save_atomically(weights, folder / "model.safetensors", {"format": "pt"})


def _save_atomically(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    partial = path.with_name(path.name + ".partial")
    save_file({name: t.contiguous() for name, t in tensors.items()}, partial, metadata=metadata)
    partial.chmod(0o644)  # safetensors creates private files, but the export is shipped
    os.replace(partial, path)


def _metadata(path: Path) -> dict[str, str]:
    """The JSON header of a safetensors file: eight bytes of length, then the header."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    metadata: dict[str, str] = header["__metadata__"]
    return metadata
