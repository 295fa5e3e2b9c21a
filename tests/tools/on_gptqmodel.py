"""GPTQModel's GPTQ and AWQ. Runs in GPTQModel's own environment.

A way is a method, bits, columns of a group, and more of its settings: `gptq-4-128-desc_act`.
"""

import importlib
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.tools.written import Restored, calibration, write_all

_TORCH_KERNELS = {"gptq": "GPTQ_TORCH", "awq": "AWQ_TORCH"}
_DTYPES = {"gptq": torch.float32, "awq": torch.float16}
"""AWQ's torch kernel refuses float32, and its packing then ends the process."""


def write(source: Path, stored: Path, way: str) -> Restored:
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # its default for two processors is one, which it then refuses
    tool: Any = importlib.import_module("gptqmodel")
    settings: Any = importlib.import_module("gptqmodel.quantization.config")
    method, bits, group, *more = way.split("-")
    options: dict[str, Any] = {"bits": int(bits), "group_size": -1 if group == "row" else int(group)}
    options |= {"desc_act": "desc_act" in more, "sym": "asym" not in more}
    options |= {"quant_method": settings.METHOD(method), "offload_to_disk": False}
    if group == "row":
        options["act_group_aware"] = False  # its default, which wants groups
    options["format"] = settings.FORMAT("gemm" if method == "awq" else "gptq_v2" if "v2" in more else "gptq")
    dtype = _DTYPES[method]
    model = tool.GPTQModel.load(str(source), settings.QuantizeConfig(**options), device="cpu", dtype=dtype)
    samples = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in calibration()]
    model.quantize(samples, batch_size=1, backend=getattr(tool.BACKEND, _TORCH_KERNELS[method]))
    model.save(str(stored))
    loaded = tool.GPTQModel.load(str(stored), device="cpu", backend=getattr(tool.BACKEND, _TORCH_KERNELS[method]))
    scales = {name: value for file in stored.glob("*.safetensors") for name, value in load_file(file).items()}
    return Restored(
        weights={
            f"{name}.weight": _restored(module, method, scales[f"{name}.scales"])
            for name, module in loaded.model.named_modules()
            if hasattr(module, "qweight")
        }
    )


def _restored(module: Any, method: str, scales: Tensor) -> Tensor:
    """As the tool's own code restores it, `[out, in]`, by the scales as it stores them, whose products are not rounded:
    loading rounds them to the model's dtype."""
    module.scales = scales.float()
    if method == "gptq":
        values = module.dequantize_weight()
    else:
        awq: Any = importlib.import_module("gptqmodel.quantization.awq.utils.packing_utils")
        values = awq.dequantize_gemm(module.qweight, module.qzeros, module.scales, module.bits, module.group_size)
    return values.t()


if __name__ == "__main__":
    write_all(write)
