"""Times launch candidates on the GPU at hand and writes its table: `python -m engine.kernels.triton.tune [--out FILE]`.

Every attention entry of the GPU's present table is tried with neighbouring tiles, warps and stages, on shapes of an
8B model: prefill of 4,096 tokens, and decoding of 16 sequences of 4,096, with the second and third launch of a shape
of 32 and 64. What cannot fit by its numbers alone is left out, the others are compiled by all processors at once, and
what then does not compile or fit is skipped. A candidate's time is the median of repeated launches, warm, by
`triton.testing.do_bench`. Entries of float32, which nobody serves in, are copied; so are those of the deterministic
mode and of products, whose tiles affect results, which tables must not change.
"""

import argparse
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from engine.kernels.triton.flash_decode import DecodeWorkspace, cut_evenly, flash_decode
from engine.kernels.triton.paged_prefill import paged_prefill
from engine.kernels.triton.reference import stored
from engine.kernels.triton.tuning import TABLES, AttentionShape, DecodeLaunch, LaunchTable, PrefillLaunch, load_table

_HEADS, _KV_HEADS, _BLOCK_SIZE = 32, 8, 16
_TOKENS = 4096
_SEQUENCES = (16, 32, 64)
"""By the number of a launch among those of its shape."""


_SHARED_BYTES = 227 * 1024
"""Most shared memory of one program, on the GPUs that have most."""
_REGISTERS = 255
"""Most registers of a thread."""
_UNFIT = (triton.runtime.errors.OutOfResources, triton.compiler.errors.CompilationError)


class _Bench:
    """One attention shape's tensors on the device."""

    def __init__(self, shape: AttentionShape, device: torch.device, num_tokens: int = _TOKENS) -> None:
        """`num_tokens`: of each sequence; few where kernels are only compiled."""
        self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._num_tokens = num_tokens
        dtype = torch.float32 if shape.wide else torch.bfloat16
        num_blocks = max(_SEQUENCES) * num_tokens // _BLOCK_SIZE
        pages = torch.randn(num_blocks, 2, _KV_HEADS, _BLOCK_SIZE, shape.head_dim, device=device)
        if shape.eight_bit:
            self._layer = stored(pages, torch.float8_e4m3fn)
        else:
            self._layer = stored(pages, dtype)
        rows = max(num_tokens, *_SEQUENCES)
        self._queries = torch.randn(rows, _HEADS, shape.head_dim, device=device).to(dtype)
        self._out = torch.empty_like(self._queries)
        order = torch.randperm(num_blocks, device=device, dtype=torch.int32)
        self._tables = order.view(max(_SEQUENCES), -1)

    def prefill(self, launch: PrefillLaunch) -> Callable[[], None]:
        """Prefill attention for one sequence without a cached prefix."""
        rows = slice(self._num_tokens)

        def run() -> None:
            paged_prefill(
                self._queries[rows],
                self._layer,
                self._out[rows],
                tables=self._tables[:1],
                row_starts=self._int32(0, self._num_tokens),
                starts=self._int32(0),
                window=None,
                launch=launch,
            )

        return run

    def decode(self, launch: DecodeLaunch, batch: int) -> Callable[[], None]:
        """Decode attention for `batch` long sequences, cut as 4,096 tokens are."""
        head_dim, device = self._queries.shape[2], self._queries.device
        cut = cut_evenly((launch,), batch=batch, num_kv_heads=_KV_HEADS, max_length=_TOKENS, num_sms=self._num_sms)
        workspace = DecodeWorkspace.allocate(cut.num_parts(batch), _HEADS, head_dim, device)
        lengths = torch.full((batch,), self._num_tokens, dtype=torch.int32, device=device)

        def run() -> None:
            flash_decode(
                self._queries[:batch],
                self._layer,
                self._out[:batch],
                tables=self._tables[:batch],
                lengths=lengths,
                window=None,
                cut=cut,
                workspace=workspace,
            )

        return run

    def prefill_ms(self, launch: PrefillLaunch) -> float:
        return _median_ms(self.prefill(launch))

    def decode_ms(self, launch: DecodeLaunch, batch: int) -> float:
        return _median_ms(self.decode(launch, batch))

    def _int32(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self._queries.device)


def _median_ms(run: Callable[[], None]) -> float:
    return float(triton.testing.do_bench(run, return_mode="median"))


def prefill_candidates(launch: PrefillLaunch, shape: AttentionShape) -> Iterator[PrefillLaunch]:
    """The table's own launch first, then its neighbours that may fit."""
    yield launch
    for block_m, block_n, num_warps, num_stages in itertools.product((64, 128, 256), (32, 64, 128), (4, 8), (2, 3, 4)):
        found = replace(launch, block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages)
        if found != launch and _may_fit(found, shape):
            yield found


def decode_candidates(launch: DecodeLaunch, shape: AttentionShape) -> Iterator[DecodeLaunch]:
    """The table's own launch first, then its neighbours that may fit."""
    yield launch
    for block_n, num_warps, num_stages in itertools.product((32, 64, 128), (2, 4, 8), (2, 3, 4, 5)):
        found = replace(launch, block_n=block_n, num_warps=num_warps, num_stages=num_stages)
        if found != launch and _may_fit(found, shape):
            yield found


def _may_fit(launch: PrefillLaunch | DecodeLaunch, shape: AttentionShape) -> bool:
    """Whether the tiles under way fit into shared memory, and sums and scores into registers; both are least sizes, so
    that what could be launched is never left out.
    """
    key_bytes = shape.head_dim * (1 if shape.eight_bit else 4 if shape.wide else 2)
    shared_bytes = (launch.num_stages - 1) * launch.block_n * key_bytes
    registers = launch.block_m * (shape.head_dim + launch.block_n) / (32 * launch.num_warps)
    return shared_bytes <= _SHARED_BYTES and registers <= _REGISTERS


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchCandidate:
    """A launch to be compiled and timed."""

    shape: AttentionShape
    launch: PrefillLaunch | DecodeLaunch
    batch: int = 0
    """Sequences that decode."""


def candidates_of(table: LaunchTable) -> list[LaunchCandidate]:
    """All that `tuned_table` times, each once."""
    raw, found = table.as_json(), []
    for shape in _tuned_shapes(raw["prefill"]):
        found += [LaunchCandidate(shape=shape, launch=c) for c in prefill_candidates(table.prefill(shape), shape)]
    for shape in _tuned_shapes(raw["decode"]):
        for launch, batch in zip(table.decode(shape), _SEQUENCES, strict=False):
            found += [LaunchCandidate(shape=shape, launch=c, batch=batch) for c in decode_candidates(launch, shape)]
    return list(dict.fromkeys(found))


def compile_ahead(candidates: Sequence[LaunchCandidate], num_processes: int) -> None:
    """Compile them into triton's cache, in processes of their own; those that cannot be launched are left."""
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        for _ in pool.map(_compile, candidates):
            pass


def _compile(candidate: LaunchCandidate) -> None:
    bench = _Bench(candidate.shape, torch.device("cuda"), _BLOCK_SIZE)
    launch = candidate.launch
    try:
        if isinstance(launch, PrefillLaunch):
            bench.prefill(launch)()
        else:
            bench.decode(launch, candidate.batch)()
    except _UNFIT:
        return
    torch.cuda.synchronize()


def fastest(candidates: Iterator[Any], time_ms: Callable[[Any], float]) -> tuple[Any, float]:
    """The fastest candidate, and its time in milliseconds. Raises ValueError when none can be launched."""
    best, best_ms = None, float("inf")
    for candidate in candidates:
        try:
            taken_ms = time_ms(candidate)
        except _UNFIT:
            continue
        if taken_ms < best_ms:
            best, best_ms = candidate, taken_ms
    if best is None:
        raise ValueError("no candidate can be launched on this GPU")
    return best, best_ms


def tuned_table(table: LaunchTable, gpu: str, bench: Callable[[AttentionShape], Any]) -> dict[str, Any]:
    """A table for `gpu`, with the fastest launch found for every attention entry of `table`; progress goes to
    stderr.
    """
    raw = table.as_json()
    made: dict[str, Any] = {"gpu": gpu, "source": f"timed on {gpu} with triton {triton.__version__}"}
    for kernel in ("prefill", "decode"):
        made[kernel] = [entry for entry in raw[kernel] if entry.get("wide")]
        for shape in _tuned_shapes(raw[kernel]):
            timer = bench(shape)
            if kernel == "prefill":
                found = [fastest(prefill_candidates(table.prefill(shape), shape), timer.prefill_ms)]
            else:
                found = [
                    fastest(decode_candidates(launch, shape), partial(timer.decode_ms, batch=batch))
                    for launch, batch in zip(table.decode(shape), _SEQUENCES, strict=False)
                ]
            for launch, taken_ms in found:
                sys.stderr.write(f"{kernel} {shape}: {taken_ms:.4f} ms with {launch}\n")
                made[kernel].append({**asdict(shape), **asdict(launch), "timed": True})
    return made | {name: raw[name] for name in ("fixed", "gemm", "few_rows", "one_row", "quantized") if name in raw}


def _tuned_shapes(entries: Sequence[dict[str, Any]]) -> list[AttentionShape]:
    """The shapes of a table's entries, each once, in their order; without float32."""
    shapes = (
        AttentionShape(head_dim=entry["head_dim"], eight_bit=bool(entry.get("eight_bit")))
        for entry in entries
        if not entry.get("wide")
    )
    return list(dict.fromkeys(shapes))


def main(arguments: Sequence[str] | None = None) -> int:
    """Tune and write the table. Returns 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m engine.kernels.triton.tune", description="tune launch tables")
    parser.add_argument("--out", type=Path, help="default: the GPU's name among the shipped tables")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.stderr.write("tuning needs a GPU, and torch sees none\n")
        return 2
    gpu = torch.cuda.get_device_name()
    device = torch.device("cuda")
    table = load_table(gpu)
    candidates = candidates_of(table)
    sys.stderr.write(f"compiling {len(candidates)} candidates\n")
    compile_ahead(candidates, os.cpu_count() or 1)
    made = tuned_table(table, gpu, lambda shape: _Bench(shape, device))
    path = options.out or TABLES / f"{gpu.lower().replace(' ', '-')}.json"
    path.write_text(json.dumps(made, indent=2) + "\n")
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
