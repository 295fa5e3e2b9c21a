"""llm-compressor's one-shot quantization, written as compressed-tensors. Runs in llm-compressor's own environment.

A way is a preset scheme, behind the modifier that chooses the codes where it is not rounding: `GPTQ-`, with activation
order `GPTQ-ORDER-`, or `AWQ-`.
"""

import importlib
from pathlib import Path
from typing import Any

import torch

from tests.tools.written import Restored, calibration, prompts, write_all

_MODIFIERS = {
    "GPTQ-ORDER-": ("GPTQModifier", {"actorder": "group"}),
    "GPTQ-": ("GPTQModifier", {"actorder": None}),
    "AWQ-": ("AWQModifier", {}),
    "": ("QuantizationModifier", {}),
}
_FOLDERS = {"AWQModifier": "llmcompressor.modifiers.awq"}
_NEEDS_TEXT = ("GPTQ-", "AWQ-")
_STATIC_INPUTS = "FP8"


def write(source: Path, stored: Path, way: str) -> Restored:
    transformers: Any = importlib.import_module("transformers")
    datasets: Any = importlib.import_module("datasets")
    compressor: Any = importlib.import_module("llmcompressor")
    prefix = next(prefix for prefix in _MODIFIERS if way.startswith(prefix))
    name, options = _MODIFIERS[prefix]
    modifiers: Any = importlib.import_module(_FOLDERS.get(name, "llmcompressor.modifiers.quantization"))
    recipe = getattr(modifiers, name)(targets="Linear", scheme=way.removeprefix(prefix), ignore=["lm_head"], **options)
    text: dict[str, Any] = {}
    if way.startswith(_NEEDS_TEXT) or way == _STATIC_INPUTS:
        ids = calibration()
        rows = {"input_ids": ids, "attention_mask": [[1] * len(one) for one in ids]}
        text = {"dataset": datasets.Dataset.from_dict(rows), "num_calibration_samples": len(ids)}
        text["max_seq_length"] = len(ids[0])
    # In float32, so that its scales are: what it restores is then no rounded product.
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    compressor.oneshot(model=model, recipe=recipe, **text)
    with torch.no_grad():
        logits = model(prompts(stored)).logits
    model.save_pretrained(stored, save_compressed=True)
    config = transformers.CompressedTensorsConfig(run_compressed=False)
    restored = transformers.AutoModelForCausalLM.from_pretrained(
        stored, dtype=torch.float32, quantization_config=config
    )
    weights = {name: values for name, values in restored.state_dict().items() if name.endswith("_proj.weight")}
    return Restored(weights=weights, logits=logits)


if __name__ == "__main__":
    write_all(write)
