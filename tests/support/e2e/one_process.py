"""What a cluster says whose prompts and answers are computed in other arithmetic than that of `transformers`: computed
here by one process, each prompt alone and in one chunk, its KV converted as the hand-off does."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.backends.options import BackendOptions
from engine.backends.select import select_backend
from engine.kv_storage.kv_codes import group_codes, head_codes, restored, token_codes
from engine.kv_storage.paged_cache import TORCH_DTYPES, PagedKVCache
from engine.model.decoder import Decoder
from engine.model.loader import load_model
from tests.support.engine.paged_harness import Session, load_plain


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolDtypes:
    """How one pool computes and what its cache holds."""

    dtype: str = "float32"
    quantization: str = "none"
    kv_dtype: str = "auto"

    def model(self, path: Path) -> Decoder:
        """Load the model: in plain torch where that is how it is served, or all that there is."""
        if self.dtype != "bfloat16":
            return load_plain(path, dtype=self.dtype)
        options = BackendOptions(
            device=torch.device("cpu"),
            dtype=self.dtype,
            quantization=self.quantization,
            kv_dtype=self.kv_dtype,
            deterministic=True,
            num_threads=1,
        )
        return load_model(path, backend=select_backend(options))


@torch.inference_mode()
def answers(
    path: Path,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    prefill: PoolDtypes,
    decode: PoolDtypes,
    wire_dtype: str | None = None,
) -> list[list[int]]:
    """Greedy tokens: the first, and the prompt's KV, by the one pool, the others by the other.

    `wire_dtype`: what KV is rounded to on its way.
    """
    first = prefill.model(path)
    rest = first if prefill == decode else decode.model(path)
    made = []
    for prompt in prompts:
        begun, continued = (
            Session(model, num_blocks=32, block_size=16, kv_dtype=one.kv_dtype)
            for model, one in ((first, prefill), (rest, decode))
        )
        request = begun.request(prompt, capacity=512)
        begun.run([request], 1, chunk=1024)
        if prefill == decode and wire_dtype is None:
            continued = begun
        else:
            for layer in range(begun.cache.layout.num_layers):
                _write(continued.cache, layer, _rounded(_read(begun.cache, layer), wire_dtype))
        continued.run([request], max_tokens, chunk=1)
        made.append(list(request.token_ids)[len(prompt) : len(prompt) + max_tokens])
    return made


def _read(cache: PagedKVCache, layer: int) -> Tensor:
    codes, scales = cache.layer(layer), cache.layer_scales(layer)
    return codes.float() if scales is None else restored(codes, scales, torch.float32)


def _write(cache: PagedKVCache, layer: int, values: Tensor) -> None:
    cells, scales = cache.layer(layer), cache.layer_scales(layer)
    if scales is not None:
        codes, kept = (token_codes if cells.dtype is torch.int8 else group_codes)(values)
        cells.copy_(codes)
        scales.copy_(kept)
    elif cells.dtype is torch.float8_e4m3fn:
        cells.copy_(head_codes(values, torch.ones(())))
    else:
        cells.copy_(values)


def _rounded(values: Tensor, wire_dtype: str | None) -> Tensor:
    if wire_dtype is None:
        return values
    if wire_dtype == "int8":
        return restored(*token_codes(values), torch.float32)
    if wire_dtype == "int4":
        return restored(*group_codes(values), torch.float32)
    if wire_dtype == "fp8_e4m3":
        return head_codes(values, torch.ones(())).float()
    return values.to(TORCH_DTYPES[wire_dtype]).float()
