"""Which dtype a model is computed in when `model.dtype` is `auto`.

The checkpoint's own, as vLLM and transformers choose it: what `config.json` says, or, where it says nothing, the dtype
that most of the weights are stored in. The built-in model is always computed in float32, whatever its file holds, so
that the demo's output stays exact.
"""

from pathlib import Path

from engine.model.config import load_model_config
from engine.model.files import ModelDirectory
from tandem.model_path import BUILTIN, BUILTIN_DTYPE, model_directory
from tandem.values.kv_layout import AUTO_DTYPE


def resolve_dtype(dtype: str, model_path: str) -> str:
    """`dtype` itself, or what `auto` stands for with the model at `model.path`.

    Raises ConfigError when the model cannot be read, or is stored in a dtype that cannot be computed in.
    """
    if dtype != AUTO_DTYPE:
        return dtype
    return BUILTIN_DTYPE if model_path == BUILTIN else stored_dtype(model_directory(model_path))


def stored_dtype(directory: Path) -> str:
    """The dtype of the checkpoint in a model directory. Raises ConfigError."""
    if stated := load_model_config(directory).stored_dtype:
        return stated
    from engine.model.checkpoint import Checkpoint  # here: it loads torch, which `tandem up` seldom needs

    with Checkpoint(ModelDirectory(directory)) as checkpoint:
        return checkpoint.main_dtype
