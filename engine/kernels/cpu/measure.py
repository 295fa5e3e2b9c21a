"""Measures this machine's limits and the projections against them: `python -m engine.kernels.cpu.measure`.

Contenders take turns round by round, because memory bandwidth changes within seconds, and each keeps its best round.
Weights are copied until they exceed the caches, as the layers of a model do. A prediction stands beside each figure:
the larger of bytes over read bandwidth and operations over the tile rate, both measured in the same minute.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.cpu.gemm import Arithmetic, Epilogue, PackedLinear, huge_bytes, supports
from engine.kernels.cpu.library import KernelLibrary, load_kernels
from engine.model.checkpoints.on_load import WeightScheme

READ_BYTES = 2**30
TILE_PRODUCTS = 20_000
POOL_BYTES = 400 * 2**20
"""Bytes of weights that a contender cycles through; more than the last-level cache of most machines."""

MAX_LOGITS = 64
"""Rows beyond which the head is not measured: a step computes logits for one row of a sequence."""

Projection = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Limits of the machine."""

    read_gb_s: float
    tile_tflop_s: float  # bf16 tile products with operands in registers; 0 without AMX


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionShape:
    """Shape of one projection of a model; `rows_out` counts gates and values."""

    name: str
    depth: int
    rows_out: int
    epilogue: Epilogue


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionRate:
    """The best time of one contender for one projection."""

    shape: ProjectionShape
    contender: str
    num_rows: int
    seconds: float
    weight_bytes: int

    @property
    def gb_s(self) -> float:
        """Weights read per second."""
        return self.weight_bytes / self.seconds / 1e9

    @property
    def tflop_s(self) -> float:
        """Multiplications and additions per second."""
        return 2 * self.num_rows * self.shape.depth * self.shape.rows_out / self.seconds / 1e12

    def predicted_seconds(self, ceilings: Ceilings) -> float:
        """The roofline: no faster than memory delivers the weights, nor than the tile unit computes."""
        operations = 2 * self.num_rows * self.shape.depth * self.shape.rows_out
        compute = operations / (ceilings.tile_tflop_s * 1e12) if ceilings.tile_tflop_s else 0.0
        return max(self.weight_bytes / (ceilings.read_gb_s * 1e9), compute)


REFERENCE_SHAPES = (
    ProjectionShape(name="qkv", depth=1024, rows_out=2048, epilogue=Epilogue.STORE),
    ProjectionShape(name="gate_up", depth=1024, rows_out=8192, epilogue=Epilogue.GATED),
    ProjectionShape(name="down", depth=4096, rows_out=1024, epilogue=Epilogue.ADD),
    ProjectionShape(name="head", depth=1024, rows_out=65536, epilogue=Epilogue.STORE_FLOAT32),
)
"""The reference model of the benchmarks: hidden 1024, FFN 4096, vocabulary 65,536."""

REFERENCE_ROWS = (1, 4, 16, 64, 512, 2048)


def measure_ceilings(
    library: KernelLibrary, *, num_threads: int, rounds: int = 5, read_bytes: int = READ_BYTES
) -> Ceilings:
    """Measure read bandwidth over `read_bytes` and the rate of the tile unit, the best of `rounds`."""
    memory = huge_bytes(library, read_bytes)
    memory.view(torch.int64).fill_(0x3F80_3F81_3F82_3F83)  # ordinary bf16 values: zeros would compute faster
    read = library.function("tandem_read_bytes", "pii", "i")
    products = library.function("tandem_tile_products", "pii", "i")
    read_s, rate = float("inf"), 0.0
    for _ in range(rounds):
        begin = time.perf_counter()
        read(memory.data_ptr(), read_bytes, num_threads)
        read_s = min(read_s, time.perf_counter() - begin)
        begin = time.perf_counter()
        operations = products(memory.data_ptr(), TILE_PRODUCTS, num_threads)
        rate = max(rate, operations / (time.perf_counter() - begin))
    return Ceilings(read_gb_s=read_bytes / read_s / 1e9, tile_tflop_s=rate / 1e12)


def measure_projection(
    library: KernelLibrary,
    shape: ProjectionShape,
    *,
    rows: Sequence[int],
    num_threads: int,
    rounds: int = 5,
    pool_bytes: int = POOL_BYTES,
) -> list[ProjectionRate]:
    """Measure every contender that runs here, at every number of rows."""
    weight = torch.randn(shape.rows_out, shape.depth).mul_(shape.depth**-0.5).bfloat16()
    copies = max(2, -(-pool_bytes // weight.nbytes))
    contenders = {
        name: (factor, [make() for _ in range(copies)])
        for name, factor, make in _contenders(library, shape, weight, num_threads)
    }
    rates = []
    for num_rows in rows:
        if shape.epilogue is Epilogue.STORE_FLOAT32 and num_rows > MAX_LOGITS:
            continue
        x = torch.randn(num_rows, shape.depth).bfloat16()
        columns = shape.rows_out // 2 if shape.epilogue is Epilogue.GATED else shape.rows_out
        dtype = torch.float32 if shape.epilogue is Epilogue.STORE_FLOAT32 else torch.bfloat16
        out = torch.zeros(num_rows, columns, dtype=dtype)
        calls = copies if num_rows <= 64 else max(2, copies * 64 // num_rows)
        best = dict.fromkeys(contenders, float("inf"))
        for number in range(rounds):
            for name, (_, projections) in contenders.items():
                start = number * calls
                chosen = [projections[(start + index) % copies] for index in range(calls)]
                best[name] = min(best[name], _seconds_per_call(chosen, x, out))
        rates += [
            ProjectionRate(
                shape=shape,
                contender=name,
                num_rows=num_rows,
                seconds=best[name],
                weight_bytes=int(weight.nbytes * factor),
            )
            for name, (factor, _) in contenders.items()
        ]
    return rates


def _seconds_per_call(projections: Sequence[Projection], x: Tensor, out: Tensor) -> float:
    begin = time.perf_counter()
    for projection in projections:
        projection(x, out)
    return (time.perf_counter() - begin) / len(projections)


def _contenders(
    library: KernelLibrary, shape: ProjectionShape, weight: Tensor, num_threads: int
) -> list[tuple[str, float, Callable[[], Projection]]]:
    """Contenders: name, bytes of a weight relative to bf16, and maker of one copy."""
    epilogue = shape.epilogue
    found: list[tuple[str, float, Callable[[], Projection]]] = []
    codes = {
        WeightScheme.FP8: (17 / 32, Arithmetic.FP8),
        WeightScheme.NF4: (9 / 32, Arithmetic.TABLE16),
    }
    for scheme, (factor, arithmetic) in codes.items():
        make = partial(PackedLinear, library, scheme.quantize(weight), arithmetic=arithmetic, epilogue=epilogue)
        found.append((f"codes {scheme.value}", factor, partial(make, num_threads=num_threads)))
    ours = {
        "amx bf16": (1.0, Arithmetic.BF16),
        "dot bf16": (1.0, Arithmetic.BF16_DOT),
        "vectors bf16": (1.0, Arithmetic.BF16_VECTORS),
        "amx int8": (0.5, Arithmetic.INT8),
        "dot int8": (0.5, Arithmetic.INT8_DOT),
        "vectors int8": (0.5, Arithmetic.INT8_VECTORS),
        "groups int4": (9 / 32, Arithmetic.INT4),
    }
    for name, (factor, arithmetic) in ours.items():
        if supports(library.features, arithmetic):
            make = partial(PackedLinear, library, weight, arithmetic=arithmetic, epilogue=epilogue)
            found.append((name, factor, partial(make, num_threads=num_threads)))
    if _onednn_bf16():
        found.append(("oneDNN bf16", 1.0, lambda: _onednn(weight, epilogue)))
        signed = library.features.amx_int8
        found.append(("oneDNN int8", 0.5, lambda: _onednn_int8(weight, epilogue, signed=signed)))
    found.append(("torch int4", 9 / 32, lambda: _torch_int4(weight, epilogue)))
    found.append(("F.linear", 1.0, lambda: _torch_linear(weight.clone(), epilogue)))
    return found


def _torch_linear(weight: Tensor, epilogue: Epilogue) -> Projection:
    return lambda x, out: _finish(F.linear(x, weight), epilogue, out)


def _onednn_bf16() -> bool:
    """Whether this torch runs bf16 through oneDNN."""
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _onednn(weight: Tensor, epilogue: Epilogue) -> Projection:
    """torch's bf16 product with weights reordered once, for a batch of a size that serves all others well."""
    reordered = torch.ops.mkldnn._reorder_linear_weight(weight, 256)
    multiply = torch.ops.mkldnn._linear_pointwise
    return lambda x, out: _finish(multiply(x, reordered, None, "none", [], ""), epilogue, out)


def _onednn_int8(weight: Tensor, epilogue: Epilogue, *, signed: bool) -> Projection:
    """torch's W8A8 with one constant scale for the input, quantized by the cheapest means: a generous comparison.

    Without AMX it multiplies signed inputs by plain loops, a thousand times slower than unsigned ones.
    """
    scales = weight.float().abs().amax(dim=1) / 127
    units = (weight.float() / scales[:, None]).round().to(torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(units, None)
    zeros = torch.zeros(len(scales), dtype=torch.int32)
    dtype, zero_point = (torch.int8, 0) if signed else (torch.uint8, 128)

    def project(x: Tensor, out: Tensor) -> None:
        units = (x * 32 + zero_point).to(dtype)
        product = torch.ops.onednn.qlinear_pointwise(
            units, 1 / 32, zero_point, packed, scales, zeros, None, 1.0, 0, torch.bfloat16, "none", [], ""
        )
        _finish(product, epilogue, out)

    return project


def _torch_int4(weight: Tensor, epilogue: Epilogue) -> Projection:
    """torch's product of bf16 rows and weights in four bits by groups of 32, each with a scale and a zero."""
    group = 32
    groups = weight.float().view(len(weight), -1, group)
    low, high = groups.amin(dim=2), groups.amax(dim=2)
    scale = (high - low) / 15
    codes = ((groups - low[..., None]) / scale[..., None]).round().clamp(0, 15).to(torch.int32).flatten(1)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    scales = torch.stack((scale, low + 8 * scale), dim=2).transpose(0, 1).contiguous().bfloat16()
    multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
    return lambda x, out: _finish(multiply(x, packed, group, scales), epilogue, out)


def _finish(product: Tensor, epilogue: Epilogue, out: Tensor) -> None:
    if epilogue is Epilogue.GATED:
        gate, value = product.chunk(2, dim=-1)
        torch.mul(F.silu(gate), value, out=out)
    elif epilogue is Epilogue.ADD:
        out += product
    else:
        out.copy_(product)


def main() -> None:
    """Print ceilings and rates of the reference model's projections."""
    parser = argparse.ArgumentParser(description="Rates of this machine and of the CPU projections.")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="+", default=list(REFERENCE_ROWS))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    library = load_kernels()
    write = sys.stdout.write
    write(f"{'':34s}{'time':>11s}{'predicted':>11s}{'weights':>12s}{'rate':>15s}\n")
    for shape in REFERENCE_SHAPES:
        ceilings = measure_ceilings(library, num_threads=arguments.threads)
        write(f"ceilings: read {ceilings.read_gb_s:.1f} GB/s, tiles {ceilings.tile_tflop_s:.2f} TFLOP/s\n")
        rates = measure_projection(
            library, shape, rows=arguments.rows, num_threads=arguments.threads, rounds=arguments.rounds
        )
        for rate in rates:
            label = f"{shape.name:8s} rows {rate.num_rows:<5d} {rate.contender:14s}"
            predicted = f"{rate.predicted_seconds(ceilings) * 1e6:8.0f} us" if "bf16" in rate.contender else ""
            figures = f"{rate.seconds * 1e6:8.0f} us{predicted:>11s}{rate.gb_s:7.1f} GB/s{rate.tflop_s:7.2f} TFLOP/s"
            write(f"{label:34s}{figures}\n")


if __name__ == "__main__":
    main()
