"""bitsandbytes through transformers: NF4, FP4 and LLM.int8. Runs in an environment that has bitsandbytes.

A way is `nf4` or `fp4`, with `-nested` where scales are quantized as well, or `int8`.
"""

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.tools.written import Restored, write_all


def write(source: Path, stored: Path, way: str) -> Restored:
    transformers: Any = importlib.import_module("transformers")
    if way == "int8":
        config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    else:
        config = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=way.removesuffix("-nested"),
            bnb_4bit_use_double_quant=way.endswith("-nested"),
            bnb_4bit_compute_dtype=torch.float32,
        )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, quantization_config=config, device_map="cpu"
    )
    weights = {
        f"{name}.weight": _restored(module.weight)
        for name, module in model.named_modules()
        if type(module).__module__.startswith("bitsandbytes.")
    }
    model.save_pretrained(stored)
    return Restored(weights=weights)


def _restored(weight: Any) -> Tensor:
    functional: Any = importlib.import_module("bitsandbytes.functional")
    if hasattr(weight, "quant_state"):
        restored: Tensor = functional.dequantize_4bit(weight.data, weight.quant_state)
        return restored
    codes = weight.data if weight.CB is None else weight.CB
    found: Tensor = functional.int8_vectorwise_dequant(codes, weight.SCB)
    return found


if __name__ == "__main__":
    write_all(write)
