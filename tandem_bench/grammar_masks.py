"""Processor time of a grammar parser for each token of an answer, without a model.

`python -m tandem_bench.grammar_masks` follows answers of random tokens of the built-in vocabulary like a decode worker,
and shows the maximum time of a mask, the mean per token, and after how many tokens a guide gave up, if it did. Times
are those of the thread itself.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from random import Random
from time import thread_time
from types import MappingProxyType
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from engine.sampling.grammar import LlGuides
from engine.types.token_guide import num_words
from tandem.model_path import model_directory

_VOCAB_SIZE, _END = 2048, 0
_CACHE_BYTES = 256 << 20
_STRING = {"type": "string"}
_CLOSED = {"additionalProperties": False}


def _object(properties: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": dict(properties), **_CLOSED, **more}


def _nested(num_levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = _STRING
    for level in range(num_levels):
        schema = _object({f"k{level}": schema, "x": _STRING}, required=["x"])
    return schema


def _json(schema: Any) -> str:
    return json.dumps({"grammars": [{"json_schema": {**schema, "x-guidance": {"whitespace_flexible": False}}}]})


def _lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


_NAMES = [f"p{i}" for i in range(400)]
_ENUMS = {name: {"enum": [f"{name}-{j}" for j in range(40)]} for name in _NAMES[:100]}
GRAMMARS: Mapping[str, str] = MappingProxyType(
    {
        "schema of 400 properties": _json(_object(dict.fromkeys(_NAMES, _STRING))),
        "schema of 100 enums of 40": _json(_object(_ENUMS, required=list(_ENUMS))),
        "schema of 40 levels": _json(_nested(40)),
        "any object": _json({"type": "object"}),
        "enum of 1,500": _json({"enum": [f"choice number {i}" for i in range(1500)]}),
        "choice of 4,096": _lark("start: " + " | ".join(json.dumps(f"choice number {i}") for i in range(4096))),
        "regex of 4,000 characters": _lark(r"start: /[\w .,'-]{1,4000}\.(com|org)/"),
        "arithmetic": _lark('start: e\ne: e "+" e | e "*" e | "(" e ")" | /[0-9]+/'),
        "ambiguous: one letter": _lark('start: s\ns: s s s | s s | "a"'),
        "ambiguous: any letter": _lark("start: s\ns: s s s | s s | /[a-z]/"),
        "ambiguous: spaces": _lark('start: s\ns: s s s | s s | " "'),
    }
)


def follow(grammar: str, *, num_tokens: int, seed: int) -> tuple[float, float, int | None]:
    """Return milliseconds of the longest mask and per token on average, and the token at which the guide gave up."""
    path = Path(model_directory("builtin")) / "tokenizer.json"
    guides = LlGuides(path, vocab_size=_VOCAB_SIZE, eos_token_ids=[_END], cache_bytes=_CACHE_BYTES)
    guide, random = guides.guide(grammar), Random(seed)
    bits = np.zeros(num_words(_VOCAB_SIZE), np.int32)
    longest_s = total_s = 0.0
    for number in range(num_tokens):
        begun_s = thread_time()
        guide.allow(bits)
        mask_s = thread_time() - begun_s
        longest_s = max(longest_s, mask_s)
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        going_on = [int(token_id) for token_id in allowed if token_id != _END]
        begun_s = thread_time()
        is_accepted = guide.accept(random.choice(going_on or [_END]))
        total_s += mask_s + thread_time() - begun_s
        if not is_accepted:
            return 1e3 * longest_s, 1e3 * total_s / (number + 1), number
        if guide.is_over:
            return 1e3 * longest_s, 1e3 * total_s / (number + 1), None
    return 1e3 * longest_s, 1e3 * total_s / num_tokens, None


def main() -> int:
    """Print the table; return 1 when a schema or a choice was given up."""
    parser = argparse.ArgumentParser(prog="tandem_bench.grammar_masks")
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    table = Table("grammar", "longest mask, ms", "token, ms", "given up at token")
    has_failed = False
    for name, grammar in GRAMMARS.items():
        found = [follow(grammar, num_tokens=options.tokens, seed=seed) for seed in range(options.seeds)]
        given_up = [at for _, _, at in found if at is not None]
        has_failed |= bool(given_up) and not name.startswith(("ambiguous", "regex"))
        longest_ms, mean_ms = max(ms for ms, _, _ in found), max(ms for _, ms, _ in found)
        table.add_row(name, f"{longest_ms:.2f}", f"{mean_ms:.3f}", ", ".join(map(str, given_up)) or "-")
    Console().print(table)
    return 1 if has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
