"""The cost of lower precision: the built-in model's quality gates through our engine, in every way it can compute.

`python -m training.quality` prints perplexity, needles and JSON objects (training/evaluate.py) for each setting,
and for transformers in float32. A prompt runs as in a worker: in chunks, over the paged cache.
"""

import argparse
import os
import sys
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from engine.backends.options import BackendOptions
from engine.backends.select import select_backend
from engine.kv_storage.paged_cache import PagedKVCache
from engine.model.loader import load_model
from engine.model.memory_budget import kv_layout
from engine.runner.model_runner import ModelRunner
from engine.runner.step_input_builder import build_step_inputs
from engine.types.request import Batch, BatchItem, BlockTable, Request
from tandem.model_path import BUILTIN, model_directory
from tandem.values.ids import BlockHash, BlockId, RequestId
from tandem.values.sampling import SamplingParams
from tandem_bench import report
from tandem_bench.report import Row
from training import evaluate
from training.evaluate import Forward

SETTINGS: Mapping[str, Mapping[str, str | bool]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "int8-kv": {"dtype": "bfloat16", "kv_dtype": "int8"},
    "fp8-kv": {"dtype": "bfloat16", "kv_dtype": "fp8_e4m3"},
    "int8-and-int8-kv": {"dtype": "bfloat16", "quantization": "int8", "kv_dtype": "int8"},
}
TRANSFORMERS = "transformers"
_BLOCK_SIZE = 16
_CHUNK = 512


class EngineForward:
    """Model of the engine as a function from tokens to logits."""

    def __init__(self, folder: Path, settings: Mapping[str, str | bool], *, num_threads: int) -> None:
        """Load the model. Raises ConfigError when the settings are not available here."""
        options = BackendOptions(
            device=torch.device("cpu"),
            dtype=str(settings["dtype"]),
            quantization=str(settings.get("quantization", "none")),
            kv_dtype=str(settings.get("kv_dtype", "auto")),
            num_threads=num_threads,
        )
        model = load_model(folder, backend=select_backend(options))
        context = model.config.max_context
        layout = kv_layout(
            model.config,
            fingerprint=model.fingerprint,
            dtype=options.dtype,
            block_size=_BLOCK_SIZE,
            kv_dtype=options.kv_dtype,
        )
        self._model = model
        self._table = [BlockId(i) for i in range(-(-context // _BLOCK_SIZE))]
        self._runner = ModelRunner(model, PagedKVCache(layout, num_blocks=len(self._table)))

    @torch.inference_mode()
    def __call__(self, ids: list[int]) -> Tensor:
        """Return float32 logits after each token, `[num_tokens, vocab_size]`."""
        request = Request(
            request_id=RequestId("quality"),
            token_ids=array("i", ids),
            num_prompt_tokens=len(ids),
            params=SamplingParams(temperature=0.0),
            hash_root=BlockHash(b""),
            block_table=BlockTable(self._table),
        )
        parts = []
        for start in range(0, len(ids), _CHUNK):
            count = min(_CHUNK, len(ids) - start)
            item = BatchItem(request=request, start=start, num_tokens=count, samples=False)
            hidden = self._runner.hidden_states(build_step_inputs(Batch(items=(item,)), _BLOCK_SIZE))
            parts.append(self._model.logits(hidden).clone())  # the next chunk reuses the buffer
        return torch.cat(parts)


def rows(
    folder: Path, *, settings: Sequence[str], samples: int, lengths: Sequence[int], text: str, num_threads: int
) -> list[Row]:
    """Measure every gate in every setting; the built-in model's guarantees are the goals. Raises ConfigError."""
    found: list[Row] = []
    for name in settings:
        forward: Forward | None = None
        if name != TRANSFORMERS:
            forward = EngineForward(folder, SETTINGS[name], num_threads=num_threads)
        for row in evaluate.evaluate(folder, text, samples, list(lengths), forward):
            goal = None if row.met is None else row.goal
            found.append(Row(name=f"{name}.{row.name}", value=row.value, unit=row.unit, goal=goal, met=row.met))
    return found


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m training.quality", description="Measure the cost of lower precision."
    )
    every = (TRANSFORMERS, *SETTINGS)
    made.add_argument("--settings", nargs="+", choices=every, default=list(every))
    made.add_argument("--samples", type=int, default=100, help="number of questions and stories of each kind")
    made.add_argument("--lengths", type=int, nargs="+", default=[512], help="prompt lengths of the needle test")
    made.add_argument("--text", type=Path, help="text of the training run; its last 5%% is measured")
    made.add_argument("--json", type=Path, metavar="FILE")
    return made


def main() -> int:
    """Print the figures; return 1 when a goal is missed."""
    options = parser().parse_args()
    num_threads = os.cpu_count() or 1
    torch.set_num_threads(num_threads)
    found = rows(
        model_directory(BUILTIN),
        settings=options.settings,
        samples=options.samples,
        lengths=options.lengths,
        text=options.text.read_text(encoding="utf-8") if options.text else "",
        num_threads=num_threads,
    )
    report.print_table(Console(highlight=False, width=120), found)
    if options.json is not None:
        report.write_json(options.json, found)
    return 1 if report.num_missed(found) else 0


if __name__ == "__main__":
    sys.exit(main())
