"""Inputs of kernel tests: random pages and tables, and the launch parameters that the engine would use."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random

import torch
from torch import Tensor

from engine.kernels.triton.pages import LayerPages
from engine.kernels.triton.reference import stored
from engine.kernels.triton.tuning import (
    DEFAULT_TABLE,
    AttentionShape,
    DecodeLaunch,
    GemmLaunch,
    LaunchTable,
    PrefillLaunch,
    load_table,
)
from engine.kv_storage.kv_codes import LARGEST_CODE
from tandem_bench.gpu.stage import Stage

EIGHT_BIT = (torch.int8, torch.float8_e4m3fn)
FOREIGN_BLOCK = 2**30
"""Table entry without a block: a kernel that reads it accesses memory far outside."""
HOPELESS = 1e9
"""Upper bound of the reported share of the tolerance, as JSON has no infinity."""
_DESPERATE_S = 0.8
_TINY = 1e-30


def launches(stage: Stage) -> LaunchTable:
    """Return the launch table of the present GPU."""
    return load_table(torch.cuda.get_device_name(stage.place) if stage.place.type == "cuda" else DEFAULT_TABLE)


def prefill_launch(stage: Stage, shape: AttentionShape, *, deterministic: bool = False) -> PrefillLaunch:
    """Return the launch from the table, or small tiles for the interpreter."""
    if stage.is_small:
        return PrefillLaunch(block_m=16, block_n=16, num_warps=4, num_stages=2, fixed_keys=32 if deterministic else 0)
    return launches(stage).prefill(shape, deterministic=deterministic)


def decode_launches(stage: Stage, shape: AttentionShape, *, deterministic: bool = False) -> tuple[DecodeLaunch, ...]:
    """Return the launches from the table, or one with small tiles for the interpreter."""
    if stage.is_small:
        fixed_keys = 32 if deterministic else 0
        return (DecodeLaunch(block_n=16, num_warps=4, num_stages=2, min_keys=16, fixed_keys=fixed_keys),)
    return launches(stage).decode(shape, deterministic=deterministic)


def gemm_launch(stage: Stage, *, wide: bool) -> GemmLaunch:
    """Return the launch from the table, or small tiles for the interpreter."""
    if stage.is_small:
        return GemmLaunch(block_m=16, block_n=32, block_k=32, num_warps=4, num_stages=2)
    return launches(stage).gemm(wide=wide)


def num_sms(stage: Stage) -> int:
    """Return the GPU's multiprocessors; two on a CPU."""
    return 2 if stage.is_small else int(torch.cuda.get_device_properties(stage.place).multi_processor_count)


def attention_shape(head_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> AttentionShape:
    """Return the shape that determines a launch."""
    return AttentionShape(head_dim=head_dim, eight_bit=cache_dtype in LARGEST_CODE, wide=dtype == torch.float32)


def randn(rng: Random, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Draw from the standard normal distribution, the same numbers on every device."""
    generator = torch.Generator().manual_seed(rng.getrandbits(48))
    return torch.randn(*shape, generator=generator).to(device, dtype)


def random_pages(
    rng: Random, shape: tuple[int, int, int, int], *, dtype: torch.dtype, device: torch.device
) -> LayerPages:
    """Draw pages `(num_blocks, num_kv_heads, block_size, head_dim)`; heads differ in magnitude."""
    num_blocks, num_kv_heads, block_size, head_dim = shape
    values = randn(rng, num_blocks, 2, num_kv_heads, block_size, head_dim, dtype=torch.float32, device=device)
    if dtype in LARGEST_CODE:
        values *= torch.logspace(-1, 0.3, num_kv_heads, device=device)[:, None, None]
    return stored(values, dtype)


def random_tables(
    rng: Random, lengths: Sequence[int], block_size: int, num_blocks: int, device: torch.device
) -> Tensor:
    """Draw shuffled blocks for each length, int32 `[num_seqs, most + 2]`."""
    free = rng.sample(range(num_blocks), num_blocks)
    needed = [-(-length // block_size) for length in lengths]
    rows = [[free.pop() for _ in range(count)] for count in needed]
    width = max(needed, default=0) + 2
    padded = [row + [FOREIGN_BLOCK] * (width - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.int32, device=device)


def int32(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def error_share(found: Tensor, expected: Tensor, tolerance: float) -> float:
    """Return the largest error relative to what is allowed: `tolerance` times the largest expected value of its row.

    Rows are those of the last dimension; rows of zeros must be zeros. The result is at most HOPELESS, also for NaN.
    """
    if not found.numel():
        return 0.0
    found, expected = found.double(), expected.double()
    allowed = tolerance * expected.abs().amax(-1, keepdim=True)
    return _bounded(((found - expected).abs() / allowed.clamp_min(_TINY)).max())


def code_share(found: Tensor, expected: Tensor) -> float:
    """Return the same for eight-bit codes: a value between two codes may get either, but no other."""
    codes, wanted = found.double(), expected.double()
    # Neighbouring integers are one apart, neighbouring floats of three mantissa bits an eighth.
    allowed = torch.full_like(wanted, 1.01) if found.dtype == torch.int8 else 0.13 * wanted.abs() + 2**-9
    return _bounded(((codes - wanted).abs() / allowed).max())


def _bounded(share: Tensor) -> float:
    value = share.item()
    return value if value < HOPELESS else HOPELESS


def case_numbers(stage: Stage, share: float, most: int) -> Iterator[int]:
    """Yield numbers of at least three cases, while `share` of the part's time is left for the parts after them."""
    least, until_s = (2, 0.0) if stage.is_small else (3, stage.left_s * (1 - share))
    for number in range(2 if stage.is_small else most):
        if number >= least and stage.left_s < max(until_s, _DESPERATE_S):
            return
        yield number


@contextmanager
def naming(case: str) -> Iterator[None]:
    """Add the case's name to any exception raised inside."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in {case}")
        raise
