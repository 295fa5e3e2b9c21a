"""Checkpoints that were quantized: the built-in model's matrices, rounded carelessly or with care.

They load like any other and answer as fast; the careless one is worse, and nothing but its answers says so.
"""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tandem.model_path import BUILTIN, model_directory
from tandem_bench.cache import cache_dir

CARELESS_BITS, CAREFUL_BITS = 4, 8
_WEIGHTS = "model.safetensors"


def rounded_folder(bits: int) -> Path:
    """Where it is, made or not."""
    return cache_dir("models") / f"tandem-tiny-{bits}-bits"


def make_rounded() -> None:
    """Both: four bits with one scale for a whole matrix, and eight bits with a scale for each row."""
    for bits in (CARELESS_BITS, CAREFUL_BITS):
        source, folder = model_directory(BUILTIN), rounded_folder(bits)
        if not (folder / _WEIGHTS).exists():
            shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(_WEIGHTS))
            tensors = {name: _rounded(tensor, bits) for name, tensor in load_file(source / _WEIGHTS).items()}
            half_written = folder / "half-written"
            save_file(tensors, half_written)
            half_written.replace(folder / _WEIGHTS)


def _rounded(tensor: torch.Tensor, bits: int) -> torch.Tensor:
    if tensor.dim() < 2:
        return tensor
    levels = 2 ** (bits - 1) - 1
    largest = tensor.abs().max() if bits == CARELESS_BITS else tensor.abs().amax(dim=-1, keepdim=True)
    scale = (largest / levels).clamp_min(1e-12)
    rounded: torch.Tensor = (tensor / scale).round() * scale
    return rounded.to(tensor.dtype)
