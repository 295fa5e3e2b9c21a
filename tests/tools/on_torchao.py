"""torchao through transformers, in an environment that has torchao. What it writes is refused: nothing is restored.

A way is `int8`: weights alone.
"""

import importlib
from pathlib import Path
from typing import Any

import torch

from tests.tools.written import Restored, write_all


def write(source: Path, stored: Path, _way: str) -> Restored:
    transformers: Any = importlib.import_module("transformers")
    torchao: Any = importlib.import_module("torchao.quantization")
    config = transformers.TorchAoConfig(torchao.Int8WeightOnlyConfig())
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.bfloat16, quantization_config=config, device_map="cpu"
    )
    model.save_pretrained(stored)
    return Restored(weights={})


if __name__ == "__main__":
    write_all(write)
