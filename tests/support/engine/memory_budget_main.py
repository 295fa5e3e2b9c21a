"""A process that serves as much as its memory budget allows, and says how much it took: see test_memory_budget."""

import itertools
import json
import re
import sys
from array import array
from pathlib import Path
from random import Random

import torch

from engine.assembly import EngineParts, assemble
from engine.types.request import Request
from tandem.model_path import model_directory
from tandem.values.block_hash import root_hash
from tandem.values.ids import RequestId
from tandem.values.sampling import SamplingParams
from tests.integration.engine.test_ranks import spec

MEMORY_BYTES = 160 << 20
MAX_MODEL_LEN = 2048
_ROWS = 64
_STEPS = 160
_ODD = SamplingParams(
    temperature=1.1,
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    seed=1,
    max_tokens=MAX_MODEL_LEN,
    ignore_eos=True,
    num_logprobs=20,
)


def status_bytes(field: str) -> int:
    """A line of proc(5)'s status."""
    return int(re.search(rf"^{field}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)[1]) * 1024


def overload(parts: EngineParts) -> int:
    """More prompts than the pool holds, of all lengths, with all that sampling can be asked; the most blocks in use."""
    rng = Random(5)
    root = root_hash(secret=b"test", model_fingerprint=parts.layout.model_fingerprint)
    most_used = 0
    for number in itertools.count():
        if number < _ROWS:
            length = rng.choice([3, 100, 700, MAX_MODEL_LEN - 200])
            request = Request(
                request_id=RequestId(f"r{number}"),
                token_ids=array("i", [rng.randrange(3, parts.model.vocab_size) for _ in range(length)]),
                num_prompt_tokens=length,
                params=_ODD,
                hash_root=root,
            )
            parts.scheduler.add(request)
        batch = parts.scheduler.schedule(float(number))
        if batch is None or number >= _STEPS:
            return most_used
        most_used = max(most_used, parts.scheduler.load().num_used_blocks)
        parts.scheduler.commit(batch, parts.runner.execute(batch))


def main() -> None:
    """As a worker: one engine for the life of the process."""
    kernels, dtype = sys.argv[1:]
    torch.ones(512, 512).mm(torch.ones(512, 512))  # what torch and its libraries take for themselves
    before = status_bytes("VmRSS")
    parts = assemble(
        spec(
            model_directory("builtin"),
            1,
            kernels=kernels,
            dtype=dtype,
            memory_bytes=MEMORY_BYTES,
            num_blocks=None,
            max_model_len=MAX_MODEL_LEN,
            max_batched_tokens=1024,
            prefill_chunk_tokens=512,
            max_running_requests=_ROWS,
            max_waiting_requests=_ROWS,
        )
    )
    assembled = status_bytes("VmRSS") - before
    most_used = overload(parts)
    found = {
        "assembled": assembled,
        "grown": status_bytes("VmHWM") - before,
        "limit": parts.budget.limit_bytes,
        "kv": parts.budget.kv_bytes,
        "workspace": parts.budget.workspace_bytes,
        "weights": parts.budget.weights_bytes,
        "num_blocks": parts.budget.num_blocks,
        "most_used": most_used,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
