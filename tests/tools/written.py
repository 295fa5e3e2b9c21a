"""What the tools' scripts have in common: each quantizes a model in several ways and says what its tool makes of them.

`python -m tests.tools.on_TOOL SOURCE OUT WAY …` in the tool's own environment writes, for every way, a folder OUT/WAY:
`stored`, the checkpoint as the tool saves it; `restored.safetensors`, the matrices in float32 as the tool itself
restores them, by their dense names; `logits.safetensors` where the tool computes with rounded activations, what it
computes of OUT/prompts.json; or `error.txt`, where it cannot. All in one process: importing a tool takes the longest.
"""

import json
import shutil
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

GGUF_FILE = "model.gguf"
"""Name of a checkpoint that is a file, in its folder."""
_CALIBRATION_SEED = 5
_FIRST_ORDINARY, _NUM_TOKENS = 300, 2000
_TOKENIZER_FILES = "token*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a tool makes of its own checkpoint."""

    weights: Mapping[str, Tensor]
    """Matrices by their names in a dense checkpoint; without those that the tool left as they were, if it likes."""
    logits: Tensor | None = None
    """Float32 `[num_prompts, num_tokens, vocab_size]`, where activations are rounded."""


Write = Callable[[Path, Path, str], Restored]
"""Source, the folder of the checkpoint to write, and the way."""


def write_all(write: Write) -> None:
    """Write every way that the command line names."""
    source, out, *ways = sys.argv[1:]
    for way in ways:
        folder = Path(out) / way
        folder.mkdir(parents=True)
        try:
            restored = write(Path(source), folder / "stored", way)
        except Exception:  # noqa: BLE001 - the other ways go on, and a test says what was wrong with this one
            (folder / "error.txt").write_text(traceback.format_exc(), encoding="utf-8")
            continue
        for file in Path(source).glob(_TOKENIZER_FILES):
            shutil.copy(file, folder / "stored")
        weights = {name: values.detach().float().contiguous() for name, values in restored.weights.items()}
        save_file(weights, folder / "restored.safetensors")
        if restored.logits is not None:
            save_file({"logits": restored.logits.float().contiguous()}, folder / "logits.safetensors")


def calibration(num_samples: int = 16, num_tokens: int = 128) -> list[list[int]]:
    """Tokens to calibrate with: any will do, as only the layout of what is written is tested."""
    drawn = torch.Generator().manual_seed(_CALIBRATION_SEED)
    return torch.randint(_FIRST_ORDINARY, _NUM_TOKENS, (num_samples, num_tokens), generator=drawn).tolist()


def prompts(stored: Path) -> Tensor:
    """The prompts to compute, `[num_prompts, num_tokens]`."""
    return torch.tensor(json.loads((stored.parents[1] / "prompts.json").read_text(encoding="utf-8")))
