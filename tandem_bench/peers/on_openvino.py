"""OpenVINO GenAI: its continuous-batching pipeline, stepped here. Runs in OpenVINO's own environment.

The model is converted once with optimum-intel, with weights in 16 bits or as it quantizes them itself, and stored next
to it in the cache.
"""

import importlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_PRECISIONS = {"bfloat16": "bf16", "float32": "f32", "float16": "f16"}


class Adapter:
    """One `ContinuousBatchingPipeline` on the CPU plugin."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._ov: Any = importlib.import_module("openvino")
        self._genai: Any = importlib.import_module("openvino_genai")
        self._numpy: Any = importlib.import_module("numpy")
        folder = _converted(Path(options["model"]), Path(options["converted"]), options.get("bits"))
        scheduler = self._genai.SchedulerConfig()
        scheduler.cache_size = options["kv_gib"]
        scheduler.max_num_seqs = max(options["max_num_seqs"], 8)
        precision = _PRECISIONS[options["dtype"]]
        properties = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": options["num_threads"]}
        if options.get("kv_precision"):
            properties["KV_CACHE_PRECISION"] = options["kv_precision"]
        self._pipeline = self._genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", properties)
        self._next_id = 0
        self.about = {
            "version": self._genai.__version__,
            "kv_precision": options.get("kv_precision") or "its default",
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        }

    def run(self, prompts: list[list[int]], num_tokens: int, newcomers: list[list[int]]) -> dict[str, Any]:
        waiting = list(newcomers)
        started_s = time.perf_counter()
        residents = [self._add(prompt, num_tokens) for prompt in prompts]
        times: list[list[float]] = [[] for _ in residents]
        tokens: list[list[int]] = [[] for _ in residents]
        newcomer, num_newcomers = None, 0
        while any(len(row) < num_tokens for row in times):
            self._pipeline.step()
            now_s = time.perf_counter() - started_s
            for handle, row, ids in zip(residents, times, tokens, strict=True):
                new = _read(handle)
                ids.extend(new)
                row.extend([now_s] * len(new))
            if newcomer is not None and _read(newcomer):
                newcomer, num_newcomers = None, num_newcomers + 1
            if waiting and newcomer is None and all(times):
                newcomer = self._add(waiting.pop(), 1)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return {"arrivals_s": times, "tokens": tokens, "num_newcomers": num_newcomers}

    def _add(self, prompt: list[int], num_tokens: int) -> Any:
        self._next_id += 1
        config = self._genai.GenerationConfig()
        config.max_new_tokens = num_tokens
        config.min_new_tokens = num_tokens
        config.ignore_eos = True
        config.do_sample = False
        ids = self._ov.Tensor(self._numpy.array([prompt], dtype=self._numpy.int64))
        return self._pipeline.add_request(self._next_id, ids, config)

    def close(self) -> None:
        """Do nothing: nothing outlives the process."""


def _read(handle: Any) -> list[int]:
    new: list[int] = []
    while handle.can_read():
        for output in handle.read().values():
            new += output.generated_ids
    return new


def _converted(model: Path, folder: Path, bits: int | None) -> Path:
    """Convert the model and its tokenizer to OpenVINO's IR, once; with 4 bits in groups of 128, its default."""
    if not (folder / "complete").exists():
        optimum: Any = importlib.import_module("optimum.intel")
        # Without `load_in_8bit=False`, models beyond a billion parameters would be quantized by default.
        weights: dict[str, Any] = {"load_in_8bit": bits == 8}
        if bits == 4:
            config = optimum.OVWeightQuantizationConfig(bits=4, sym=True, group_size=128, ratio=1.0)
            weights = {"quantization_config": config}
        optimum.OVModelForCausalLM.from_pretrained(str(model), export=True, compile=False, **weights).save_pretrained(
            str(folder)
        )
        convert = Path(sys.executable).with_name("convert_tokenizer")
        subprocess.run([str(convert), str(model), "--with-detokenizer", "-o", str(folder)], check=True)
        (folder / "complete").touch()
    return folder
