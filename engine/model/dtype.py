"""Resolves `model.dtype: auto` to the dtype that a model is computed in.

It is the checkpoint's own, as in vLLM and transformers: `config.json`'s or, where that has none, the dtype that most
of the weights are stored in. A GGUF file has no config.json: its dtype is the one that most of its values are stored
in, bfloat16 where most are quantized. The built-in model is always computed in float32, whatever its file contains, so
that the demo's output stays exact.
"""

from pathlib import Path

from engine.model.config import load_model_config
from engine.model.files import ModelDirectory
from tandem.errors import ConfigError
from tandem.model_path import BUILTIN, BUILTIN_DTYPE, model_directory
from tandem.values.kv_layout import AUTO_DTYPE


def resolve_dtype(dtype: str, model_path: str) -> str:
    """Return `dtype`, or for `auto` the dtype of the model at `model_path`.

    Raises ConfigError when the model cannot be read, or is stored in a dtype that cannot be computed in.
    """
    if dtype != AUTO_DTYPE:
        return dtype
    return BUILTIN_DTYPE if model_path == BUILTIN else stored_dtype(model_directory(model_path))


def stored_dtype(directory: Path) -> str:
    """The dtype of the checkpoint in a model directory. Raises ConfigError."""
    if stated := load_model_config(directory).stored_dtype:
        return stated
    if (path := ModelDirectory(directory).gguf_path()) is not None:
        raise ConfigError(f"config.json: dtype is missing, and {path.name} does not state one: set model.dtype")
    # Imported late: it loads torch, which `tandem up` seldom needs.
    from engine.model.checkpoints.safetensors_files import Checkpoint

    with Checkpoint(ModelDirectory(directory)) as checkpoint:
        return checkpoint.main_dtype
