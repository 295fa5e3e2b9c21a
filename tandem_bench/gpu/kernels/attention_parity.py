"""The two attention kernels against plain torch: random shapes, ragged batches, windows, quantised caches."""

from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from engine.kernels.triton import reference
from engine.kernels.triton.flash_decode import DecodeCut, DecodeWorkspace, cut_by_length, flash_decode
from engine.kernels.triton.paged_prefill import paged_prefill, row_starts_of
from engine.kernels.triton.pages import LayerPages
from tandem_bench.gpu.kernels.cases import (
    EIGHT_BIT,
    attention_shape,
    case_numbers,
    decode_launches,
    error_share,
    int32,
    naming,
    prefill_launch,
    randn,
    random_pages,
    random_tables,
)
from tandem_bench.gpu.stage import Findings, Stage
from tandem_bench.report import figure

GROUPS, HEAD_DIMS = (1, 2, 3, 4, 5, 7, 8, 16), (32, 64, 80, 96, 128, 256)
_WINDOWS = (None, 20, None, 1, None, 40, 300)
_TOLERANCE = {torch.float32: 3e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
_MOST_CASES = 40


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionCase:
    """Random cache and a ragged batch over it."""

    queries: Tensor  # [num_rows, num_heads, head_dim], strided as in a projection
    layer: LayerPages
    tables: Tensor
    starts: list[int]
    counts: list[int]
    window: int | None
    deterministic: bool

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence, including those of this step."""
        return [start + count for start, count in zip(self.starts, self.counts, strict=True)]

    def expected(self) -> Tensor:
        """Compute the expected result with plain torch, in float32."""
        place = self.queries.device
        starts, counts = int32(self.starts, place), int32(self.counts, place)
        return reference.attention(
            self.queries, self.layer, tables=self.tables, starts=starts, counts=counts, window=self.window
        )

    def __str__(self) -> str:
        pages = self.layer.pages
        return (
            f"queries {list(self.queries.shape)} {self.queries.dtype}, pages {list(pages.shape)} {pages.dtype}, "
            f"starts {self.starts}, counts {self.counts}, window {self.window}, deterministic {self.deterministic}"
        )


def flash_decode_parity(stage: Stage) -> Findings:
    """Compare rows that decode, whole and in parts."""
    for dtype in stage.kernel_dtypes:
        worst, number = 0.0, 0
        for number in case_numbers(stage, 1 / len(stage.kernel_dtypes), _MOST_CASES):
            rng = Random(f"decode:{stage.seed}:{dtype}:{number}")
            case = _case(stage, rng, dtype, number, single=True)
            num_sms = rng.choice([1, 8, 40, 132])
            with naming(f"{case}, {num_sms} multiprocessors"):
                found = _decoded(stage, case, num_sms, rng)
                worst = max(worst, error_share(found, case.expected(), _TOLERANCE[dtype]))
        yield from _rows("flash_decode", dtype, worst, number + 1)


def paged_prefill_parity(stage: Stage) -> Findings:
    """Compare chunks over prefixes, including sequences without rows."""
    for dtype in stage.kernel_dtypes:
        worst, number = 0.0, 0
        for number in case_numbers(stage, 1 / len(stage.kernel_dtypes), _MOST_CASES):
            rng = Random(f"prefill:{stage.seed}:{dtype}:{number}")
            case = _case(stage, rng, dtype, number, single=False)
            with naming(str(case)):
                worst = max(worst, error_share(_prefilled(stage, case), case.expected(), _TOLERANCE[dtype]))
        yield from _rows("paged_prefill", dtype, worst, number + 1)


def _rows(kernel: str, dtype: torch.dtype, worst: float, num_cases: int) -> Findings:
    name = f"parity.{kernel}.{str(dtype).removeprefix('torch.')}"
    yield figure(name, worst, "of tolerance", at_most=1.0)
    yield figure(f"{name}.cases", num_cases, "")


def _case(stage: Stage, rng: Random, dtype: torch.dtype, number: int, *, single: bool) -> AttentionCase:
    """Build a case; group sizes, head sizes and caches alternate, so that few cases cover all of them."""
    place = stage.place
    group, head_dim = GROUPS[number % len(GROUPS)], HEAD_DIMS[number % len(HEAD_DIMS)]
    num_kv_heads, block_size = rng.choice([1, 2, 8]), 16
    cache_dtype = (dtype, *EIGHT_BIT)[number % 3]
    if stage.is_small:
        group, head_dim, num_kv_heads = (2, 3)[number % 2], (32, 48)[number % 2], 2
        cache_dtype = (dtype, torch.int8)[number % 2]
        starts, counts = [0, 37, 5], ([1, 1, 1] if single else [9, 2, 0])
    else:
        num_seqs = rng.randint(1, 24)
        counts = [1] * num_seqs if single else [rng.choice([0, 1, 2, 17, 130, 400]) for _ in range(6)]
        starts = [rng.choice([0, 1, 15, 16, 31, 200, 1023, 3000]) for _ in counts]
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    num_blocks = sum(-(-length // block_size) for length in lengths) + 3
    rows = randn(rng, sum(counts), num_kv_heads * (group + 2), head_dim, dtype=dtype, device=place)
    return AttentionCase(
        queries=rows[:, : num_kv_heads * group],
        layer=random_pages(rng, (num_blocks, num_kv_heads, block_size, head_dim), dtype=cache_dtype, device=place),
        tables=random_tables(rng, lengths, block_size, num_blocks, place),
        starts=starts,
        counts=counts,
        window=_WINDOWS[number % len(_WINDOWS)],
        deterministic=number % 4 == 1,
    )


def _decoded(stage: Stage, case: AttentionCase, num_sms: int, rng: Random) -> Tensor:
    num_rows, num_heads, head_dim = case.queries.shape
    shape = attention_shape(head_dim, case.queries.dtype, case.layer.pages.dtype)
    launch = rng.choice(decode_launches(stage, shape, deterministic=case.deterministic))
    runs = sum((length - 1) // launch.fixed_keys for length in case.lengths) if launch.fixed_keys else 0
    cut = cut_by_length(launch, num_kv_heads=case.layer.num_kv_heads, num_sms=num_sms, further_runs=runs)
    if not launch.fixed_keys and rng.random() < 0.5:
        cut = DecodeCut(launch=launch, num_splits=rng.choice([1, 2, 4, 16]))
    workspace = DecodeWorkspace.allocate(cut.num_parts(num_rows), num_heads, head_dim, stage.place)
    out = torch.full_like(case.queries, float("nan"), memory_format=torch.contiguous_format)
    lengths = int32(case.lengths, stage.place)
    flash_decode(
        case.queries,
        case.layer,
        out,
        tables=case.tables,
        lengths=lengths,
        window=case.window,
        cut=cut,
        workspace=workspace,
    )
    return out


def _prefilled(stage: Stage, case: AttentionCase) -> Tensor:
    shape = attention_shape(case.layer.head_dim, case.queries.dtype, case.layer.pages.dtype)
    out = torch.full_like(case.queries, float("nan"), memory_format=torch.contiguous_format)
    paged_prefill(
        case.queries,
        case.layer,
        out,
        tables=case.tables,
        row_starts=row_starts_of(int32(case.counts, stage.place)),
        starts=int32(case.starts, stage.place),
        window=case.window,
        launch=prefill_launch(stage, shape, deterministic=case.deterministic),
    )
    return out
