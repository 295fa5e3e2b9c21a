"""Writes a named random shape as a Hugging Face directory: `python -m tandem_bench.make_model --shape 0.5b`.

The weights are made and written shard by shard, so the writer needs the memory of one shard, whatever the model's size.
The tokenizer is a byte-level BPE whose tokens are single bytes, then pairs, then triples of letters and digits: any
program that supports tokenizer.json can load it, and every id has its own text.
"""

import argparse
import hashlib
import json
import os
import shutil
import string
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice, product
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from tandem_bench.cache import cache_dir
from tandem_bench.shapes import END_ID, SHAPES, Shape, random_tensor

SHARD_BYTES = 256 << 20
_VERSION = 1
"""Version of everything below that affects the files."""
_END_TEXT = "<|end|>"
_SYMBOLS = string.ascii_lowercase + string.ascii_uppercase + string.digits
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def cached_model(
    shape: Shape, *, dtype: str = "bfloat16", seed: int = 0, note: Callable[[str], None] = lambda _: None
) -> Path:
    """Return the model's directory in the user's cache, written on first use; never partial."""
    key = hashlib.sha256(json.dumps([_VERSION, seed, shape.name, shape.hf_config(dtype)]).encode()).hexdigest()[:10]
    folder = cache_dir("models") / f"{shape.name}-{dtype}-{key}"
    if not folder.exists():
        note(f"making {shape.name} ({shape.num_parameters / 1e9:.2f} B parameters) in {folder}, once")
        started_s = time.monotonic()
        draft = Path(mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
        try:
            write_model(draft, shape, dtype=dtype, seed=seed)
            draft.replace(folder)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            if not folder.exists():  # otherwise another process was first, with the same content
                raise
        note(f"made in {time.monotonic() - started_s:.1f} s")
    return folder


def write_model(
    folder: Path, shape: Shape, *, dtype: str = "bfloat16", seed: int = 0, device: torch.device | str = "cpu"
) -> None:
    """Write configuration, tokenizer and weights into an existing folder. Raises OSError.

    `device` makes the weights; different kinds of devices make different numbers.
    """
    _write_json(folder / "config.json", shape.hf_config(dtype))
    _write_json(folder / "generation_config.json", {"bos_token_id": END_ID, "eos_token_id": END_ID})
    make_tokenizer(shape.vocab_size).save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": _END_TEXT,
            "bos_token": _END_TEXT,
            "model_max_length": shape.max_positions,
        },
    )
    shards = list(_shards(shape, torch.empty((), dtype=_DTYPES[dtype]).itemsize))
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        sizes = shape.tensors()
        part: dict[str, Tensor] = {
            name: random_tensor(shape, name, sizes[name], seed=seed, dtype=_DTYPES[dtype], device=device).cpu()
            for name in names
        }
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    size_bytes = shape.num_parameters * torch.empty((), dtype=_DTYPES[dtype]).itemsize
    _write_json(
        folder / "model.safetensors.index.json",
        {"metadata": {"total_size": size_bytes}, "weight_map": weight_map},
    )


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """Build a byte-level BPE of exactly `vocab_size` tokens. Raises ValueError if it cannot hold the 256 bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    num_merges = vocab_size - 1 - len(alphabet)
    if num_merges < 0:
        raise ValueError(f"a byte-level vocabulary needs at least {1 + len(alphabet)} tokens, got {vocab_size}")
    merges = list(islice(_merges(), num_merges))
    if len(merges) < num_merges:
        raise ValueError(f"a vocabulary of {vocab_size} tokens is more than bytes, pairs and triples")
    texts = [_END_TEXT, *alphabet, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(texts)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([_END_TEXT])
    return tokenizer


def _merges() -> Iterator[tuple[str, str]]:
    yield from product(_SYMBOLS, _SYMBOLS)
    yield from ((first + second, third) for first, second, third in product(_SYMBOLS, repeat=3))


def _shards(shape: Shape, item_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    size_bytes = 0
    for name, size in shape.tensors().items():
        tensor_bytes = torch.Size(size).numel() * item_bytes
        if names and size_bytes + tensor_bytes > SHARD_BYTES:
            yield names
            names, size_bytes = [], 0
        names.append(name)
        size_bytes += tensor_bytes
    yield names


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    """Write one model and print its directory."""
    parser = argparse.ArgumentParser(
        prog="python -m tandem_bench.make_model", description="Write a seeded random model."
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="0.5b")
    parser.add_argument("--dtype", choices=list(_DTYPES), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="empty directory; default: the user's cache")
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    if options.out is None:
        print(
            cached_model(shape, dtype=options.dtype, seed=options.seed, note=lambda text: print(text, file=sys.stderr))
        )
        return 0
    os.makedirs(options.out, exist_ok=True)
    write_model(options.out, shape, dtype=options.dtype, seed=options.seed)
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
