"""Triton's interpreter for tests: import this module before any kernel, and run each test under `interpreted`.

Triton decides when a function is decorated whether it will be interpreted, and looks at the setting again when it runs,
so it is on while the kernels are imported here and while each test runs, and off otherwise. bfloat16 must not be used:
the interpreter computes its products wrongly and says nothing.
"""

import importlib
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

SETTING = "TRITON_INTERPRET"
KERNELS = ("activation", "flash_decode", "gemm_fixed", "norm", "paged_prefill", "rope_kv", "sampling")


@contextmanager
def interpreting() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SETTING, "1")
        yield


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    """Import this into a test module to have its kernels interpreted."""
    with interpreting():
        yield


def _load() -> None:
    if SETTING in os.environ:
        raise RuntimeError(f"unset {SETTING}: only tests of the interpreter use it")
    with interpreting():
        import triton.language as tl
        from triton.runtime.interpreter import InterpretedFunction

        if not isinstance(tl.sum, InterpretedFunction):
            raise RuntimeError("triton was imported before its interpreter was chosen")
        for name in KERNELS:
            importlib.import_module(f"engine.kernels.triton.{name}")


_load()

from engine.kernels.triton.pages import LayerPages  # noqa: E402
from engine.kernels.triton.reference import stored  # noqa: E402


def make_pages(
    rng: random.Random,
    *,
    num_blocks: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
) -> LayerPages:
    """Random pages; heads differ in magnitude, so that scales matter."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    values = torch.randn(num_blocks, 2, num_kv_heads, block_size, head_dim, generator=generator)
    if dtype in (torch.int8, torch.float8_e4m3fn):
        values *= torch.logspace(-1, 0.3, num_kv_heads)[:, None, None]
    return stored(values, dtype)


def make_tables(rng: random.Random, lengths: list[int], block_size: int, num_blocks: int) -> torch.Tensor:
    """Shuffled blocks for each length; entries beyond them name blocks that do not exist, far away."""
    free = list(range(num_blocks))
    rng.shuffle(free)
    needed = [-(-length // block_size) for length in lengths]
    tables = torch.full((len(lengths), max(needed, default=0) + 2), 2**30, dtype=torch.int32)
    for row, count in enumerate(needed):
        tables[row, :count] = torch.tensor([free.pop() for _ in range(count)], dtype=torch.int32)
    return tables


def randn(rng: random.Random, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rng.getrandbits(32))).to(dtype)
