"""What tools quantize and are compared on: the built-in model and a larger random one, restored models, checkpoints."""

import importlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.model.checkpoints.sources import open_source
from engine.model.config import load_model_config
from engine.model.files import ModelDirectory
from engine.model.parameters import expected_shapes
from tests.support.engine.paged_harness import initialise
from tests.support.oracle import BUILTIN
from tests.tools.written import GGUF_FILE

_SEED = 22
_FOR_TOKENIZERS = "token*"
_PROJECTION = "_proj."


def write_seeded_llama(folder: Path) -> Path:
    """Write a random Llama of two layers (hidden 1,024, FFN 2,048) with the built-in model's tokenizer; the folder."""
    transformers: Any = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=2048,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(_SEED)
    model = transformers.LlamaForCausalLM(config).eval()
    initialise(model)
    model.save_pretrained(folder)
    for file in BUILTIN.glob(_FOR_TOKENIZERS):
        shutil.copy(file, folder)
    return folder


def read_matrices(stored: Path) -> dict[str, Tensor]:
    """The layers' projections of a checkpoint in float32, as Tandem reads them."""
    config = load_model_config(stored)
    shapes = expected_shapes(config)
    with open_source(ModelDirectory(stored), config, shapes, dtype=torch.float32) as source:
        for name, shape in shapes.items():
            source.require(name, shape)
        return {name: source.tensor(name).clone() for name in shapes if _PROJECTION in name}


def checkpoint(folder: Path) -> Path:
    """What a tool wrote in a folder, as `model.path` names it: a directory, or a GGUF file."""
    file = folder / "stored" / GGUF_FILE
    return file if file.exists() else file.parent


def write_restored(source: Path, stored: Path, restored: Mapping[str, Tensor], folder: Path) -> Path:
    """Write `source` as a tool left it, dense, in float32: what it stored so, and what it restores."""
    modules = tuple(f"{name.removesuffix('weight')}" for name in restored)
    tensors = {
        name: values.float()
        for file in stored.glob("*.safetensors")
        for name, values in load_file(file).items()
        if not name.startswith(modules)
    }
    folder.mkdir(parents=True)
    save_file({**tensors, **restored}, folder / "model.safetensors", metadata={"format": "pt"})
    for file in (source / "config.json", *source.glob(_FOR_TOKENIZERS)):
        shutil.copy(file, folder)
    return folder
