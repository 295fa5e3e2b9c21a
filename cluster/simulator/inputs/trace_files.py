"""Readers of public traces of real load.

- Mooncake (Qin et al., FAST 2025): JSON lines with `timestamp` in ms, lengths, and `hash_ids` of 512-token blocks, the
  last of which may be partly filled.
- Azure LLM inference trace 2023 (Patel et al., Splitwise, ISCA 2024): CSV with time and lengths. Nothing is shared.
"""

import csv
import io
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from cluster.simulator.inputs.block_names import own_name, trace_name
from cluster.simulator.inputs.trace import Trace, TraceRequest
from tandem.config.source.regular_file import read_regular_text
from tandem.errors import ConfigError

MOONCAKE_BLOCK_TOKENS = 512
AZURE_BLOCK_TOKENS = 64
_MAX_TAIL = 2**31
_MAX_FILE_BYTES = 1 << 30


def load_trace(path: Path) -> Trace:
    """Load a trace by its suffix: `.jsonl` is Mooncake's, `.csv` Azure's. ConfigError if it cannot be read."""
    readers: dict[str, Callable[[Path], list[TraceRequest]]] = {".jsonl": _mooncake, ".csv": _azure}
    reader = readers.get(path.suffix)
    if reader is None:
        raise ConfigError(f"{path}: a trace must be a .jsonl (Mooncake) or .csv (Azure) file")
    try:
        requests = reader(path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: invalid trace: {error}") from error
    if not requests:
        raise ConfigError(f"{path}: the trace has no requests")
    requests.sort(key=lambda request: request.arrival_s)
    block_tokens = MOONCAKE_BLOCK_TOKENS if reader is _mooncake else AZURE_BLOCK_TOKENS
    return Trace(name=path.stem, block_tokens=block_tokens, requests=tuple(requests))


def _mooncake(path: Path) -> list[TraceRequest]:
    lines = io.StringIO(read_regular_text(path, max_bytes=_MAX_FILE_BYTES))
    return [_mooncake_request(json.loads(line)) for line in lines if line.strip()]


def _mooncake_request(row: dict[str, Any]) -> TraceRequest:
    num_tokens, ids = int(row["input_length"]), [int(block) for block in row["hash_ids"]]
    num_full = num_tokens // MOONCAKE_BLOCK_TOKENS
    if len(ids) < num_full or num_tokens < 1:
        raise ValueError(f"{len(ids)} blocks for a prompt of {num_tokens} tokens")
    return TraceRequest(
        arrival_s=float(row["timestamp"]) / 1e3,
        num_prompt_tokens=num_tokens,
        num_output_tokens=max(1, int(row["output_length"])),
        names=tuple(map(trace_name, ids[:num_full])),
        tail=ids[num_full] % _MAX_TAIL if len(ids) > num_full else 0,
    )


def _azure(path: Path) -> list[TraceRequest]:
    requests: list[TraceRequest] = []
    with io.StringIO(read_regular_text(path, max_bytes=_MAX_FILE_BYTES), newline="") as lines:
        for number, row in enumerate(csv.DictReader(lines)):
            num_tokens = max(1, int(row["ContextTokens"]))
            names = tuple(own_name(number, index) for index in range(num_tokens // AZURE_BLOCK_TOKENS))
            requests.append(
                TraceRequest(
                    # Timestamps have seven decimal places, of which datetime parses six.
                    arrival_s=datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp(),
                    num_prompt_tokens=num_tokens,
                    num_output_tokens=max(1, int(row["GeneratedTokens"])),
                    names=names,
                    tail=number % _MAX_TAIL,
                )
            )
    return requests
