"""llm-compressor's one-shot quantization, written as compressed-tensors. Runs in llm-compressor's own environment.

A way is a preset scheme, behind `GPTQ-` where codes are not chosen by rounding. AWQ pins memory, for which it needs an
accelerator; and groups in activation order, which files of earlier versions have, it no longer makes.
"""

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.tools.written import Restored, calibration, prompts, write_all

_GPTQ = "GPTQ-"
_STATIC_INPUTS = "FP8"
_ROUNDED_INPUTS = "W8A8"


def write(source: Path, stored: Path, way: str) -> Restored:
    transformers: Any = importlib.import_module("transformers")
    datasets: Any = importlib.import_module("datasets")
    compressor: Any = importlib.import_module("llmcompressor")
    modifiers: Any = importlib.import_module("llmcompressor.modifiers.quantization")
    modifier = modifiers.GPTQModifier if way.startswith(_GPTQ) else modifiers.QuantizationModifier
    recipe = modifier(targets="Linear", scheme=way.removeprefix(_GPTQ), ignore=["lm_head"])
    text: dict[str, Any] = {}
    if way.startswith(_GPTQ) or way == _STATIC_INPUTS:
        ids = calibration()
        rows = {"input_ids": ids, "attention_mask": [[1] * len(one) for one in ids]}
        text = {"dataset": datasets.Dataset.from_dict(rows), "num_calibration_samples": len(ids)}
        text["max_seq_length"] = len(ids[0])
    # In float32, so that its scales are: what it restores is then no rounded product.
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    compressor.oneshot(model=model, recipe=recipe, **text)
    logits = None
    if way.endswith(_ROUNDED_INPUTS):
        with torch.no_grad():
            logits = model(prompts(stored)).logits
    model.save_pretrained(stored, save_compressed=True)
    nvfp4: Any = importlib.import_module("compressed_tensors.compressors.nvfp4.base")
    helpers: Any = importlib.import_module("compressed_tensors.compressors.nvfp4.helpers")
    # It restores these codes in bfloat16, whatever the model's dtype.
    nvfp4.unpack_fp4_from_uint8 = partial(helpers.unpack_fp4_from_uint8, dtype=torch.float32)
    config = transformers.CompressedTensorsConfig(run_compressed=False)
    restored = transformers.AutoModelForCausalLM.from_pretrained(
        stored, dtype=torch.float32, quantization_config=config
    )
    weights = {name: values for name, values in restored.state_dict().items() if name.endswith("_proj.weight")}
    return Restored(weights=weights, logits=logits)


if __name__ == "__main__":
    write_all(write)
