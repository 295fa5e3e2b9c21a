"""What a prompt's KV is at either worker, value by value: converted by the engine's definition, not by the mover."""

from itertools import pairwise

import numpy as np
import torch

from engine.kv_storage.kv_codes import group_codes, head_codes, restored, token_codes
from engine.kv_storage.paged_cache import TORCH_DTYPES
from tandem.values.kv_layout import KVLayout
from tests.proofs.faults.plan import BatchPlan
from tests.support.kv_transfer.plain_worker import PlainWorker, Prompt


class Content:
    """One prompt's cells, whatever blocks they come to lie in."""

    def __init__(self, plan: BatchPlan, num_tokens: int, seed: int) -> None:
        """`num_tokens`: whole units, for cells beyond the last token travel with it."""
        rng = np.random.default_rng(seed)
        self.source = Prompt(plan.source, num_tokens, rng)
        self.num_tokens = num_tokens
        steps = (plan.source.dtype, plan.wire_dtype, plan.destination.dtype)
        if len(set(steps)) == 1:
            self.destination = self.source
            return
        self._draw(plan.source, rng)
        cells, scales = self.source.cells, self.source.scales
        for here, there in pairwise(steps):
            cells, scales = _converted(cells, scales, here, there)
        self.destination = Prompt(plan.destination, num_tokens, rng)
        self.destination.cells, self.destination.scales = cells, scales

    def _draw(self, kv: KVLayout, rng: np.random.Generator) -> None:
        """Values that mean something."""
        shape = self.source.cells.shape[:-1]
        if kv.dtype == "int4":
            values = torch.from_numpy(rng.normal(size=(*shape, kv.head_dim)).astype(np.float32))
            self.source.cells, self.source.scales = _as_stored(*group_codes(values))
            return
        if kv.dtype == "int8":
            self.source.scales = _bytes(torch.from_numpy(rng.uniform(0.001, 2.0, (*shape, 1)).astype(np.float32)))
            return
        values = torch.from_numpy(rng.normal(size=(*shape, kv.head_dim)).astype(np.float32))
        self.source.cells = _bytes(values.to(TORCH_DTYPES[kv.dtype]))


def placed(
    kv: KVLayout, prompt: Prompt, blocks: np.ndarray, first_token: int, end_token: int, *, group: int = 0
) -> np.ndarray:
    """`blocks` `[rank, plane, block, byte]`, the first of which begins with `first_token`, with these cells in them.

    `group`: of the layers that these blocks hold.
    """
    layers = list(kv.groups[group])
    first_block = first_token // kv.block_size
    num_tokens = (first_block + blocks.shape[2]) * kv.block_size
    worker = PlainWorker(kv, pool_blocks=1, num_tokens=1, rng=np.random.default_rng(0))
    # The prompt's first blocks lie elsewhere: no token before `first_token` is put anywhere.
    worker.blocks = [-1] * first_block + list(range(num_tokens // kv.block_size - first_block))
    filled = blocks.copy()
    worker.put(filled[:, : len(layers)], prompt.cells[layers], prompt.scales[layers], first_token, end_token)
    return filled


def _converted(cells: np.ndarray, scales: np.ndarray, here: str, there: str) -> tuple[np.ndarray, np.ndarray]:
    if here == there:
        return cells, scales
    if here in TORCH_DTYPES:
        values = torch.from_numpy(cells).view(TORCH_DTYPES[here])
        if there == "int4":
            return _as_stored(*group_codes(values))
        if there == "int8":
            return _as_stored(*token_codes(values))
        return _bytes(head_codes(values, torch.ones(()))), scales
    if here == "int4":
        codes, factors = torch.from_numpy(cells), torch.from_numpy(scales).view(torch.bfloat16).unflatten(-1, (-1, 2))
    elif here == "int8":
        codes, factors = torch.from_numpy(cells).view(torch.int8), torch.from_numpy(scales).view(torch.float32)[..., 0]
    else:
        codes, factors = torch.from_numpy(cells).view(torch.float8_e4m3fn), torch.ones(())
    return _bytes(restored(codes, factors, TORCH_DTYPES[there])), scales


def _as_stored(codes: torch.Tensor, scales: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    return _bytes(codes), _bytes(scales.reshape(*codes.shape[:-1], -1))


def _bytes(values: torch.Tensor) -> np.ndarray:
    return values.contiguous().view(torch.uint8).numpy().copy()
