"""Every kernel with the types and sizes of arguments with which it is launched, for ahead-of-time compilation.

Sizes are those of the launchers in this package; a case names a kernel, its variant, the types of its arguments, its
constants and its launch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from engine.kernels.triton.activation import silu_mul_kernel
from engine.kernels.triton.flash_decode import flash_decode_kernel, merge_parts_kernel
from engine.kernels.triton.gemm_few import MAX_ROWS, gemm_few_kernel
from engine.kernels.triton.gemm_fixed import gemm_fixed_kernel
from engine.kernels.triton.gemv import gemv_kernel
from engine.kernels.triton.norm import add_rms_norm_kernel
from engine.kernels.triton.paged_prefill import paged_prefill_kernel
from engine.kernels.triton.pages import power_of_two
from engine.kernels.triton.quantized.byte_gemm import byte_gemm_kernel
from engine.kernels.triton.quantized.epilogue import ROW_TILES_TOGETHER
from engine.kernels.triton.quantized.group_gemm import group_gemm_kernel
from engine.kernels.triton.quantized.round_rows import round_rows_kernel
from engine.kernels.triton.rope_kv import rope_kv_kernel
from engine.kernels.triton.sampling import edit_kernel, select_kernel, survey_kernel
from engine.kernels.triton.tuning import AttentionShape, DecodeLaunch, LaunchTable, QuantizedLaunch
from tandem.values.kv_layout import KVLayout

_FLOATS = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}


class _EightBit(NamedTuple):
    code: str
    largest: float
    scales: str
    """Name of the argument that passes the scales."""


_EIGHT_BIT = {
    "int8": _EightBit("i8", 127.0, "scales_ptr"),
    "fp8": _EightBit("fp8e4nv", 448.0, "head_scales_ptr"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AotCase:
    """One specialisation of one kernel."""

    name: str
    kernel: Any
    types: dict[str, str]
    """Triton's type names of arguments that are not constants, `*bf16` for a pointer."""
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    representative: bool = False
    """True when it is compiled in every test run; other cases nightly."""
    timed: bool = False
    """True when the launch was timed on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Variant:
    """One shape of attention to compile for."""

    dtype: str
    cache: str
    head_dim: int
    group: int
    window: int = 0
    soft_cap: float = 0.0
    deterministic: bool = False
    representative: bool = False

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(head_dim=self.head_dim, eight_bit=self.cache != "same", wide=self.dtype == "fp32")

    @property
    def name(self) -> str:
        parts = [self.dtype, self.cache, f"d{self.head_dim}", f"g{self.group}"]
        parts += [f"w{self.window}"] * bool(self.window) + ["capped"] * bool(self.soft_cap)
        parts += ["fixed"] * self.deterministic
        return "-".join(parts)

    @property
    def pages(self) -> dict[str, str]:
        if self.cache == "same":
            return {"pages_ptr": f"*{self.dtype}"}
        return {"pages_ptr": f"*{_EIGHT_BIT[self.cache].code}", _EIGHT_BIT[self.cache].scales: "*fp32"}

    @property
    def geometry(self) -> dict[str, Any]:
        constants = {"GROUP": self.group, "NUM_KV_HEADS": 8, "HEAD_DIM": self.head_dim, "BLOCK_SIZE": 16}
        constants |= {"WINDOW": self.window, "BLOCK_D": power_of_two(self.head_dim, 16)}
        return constants | _strides(self.cache, self.head_dim) | _absent(self.cache)


def all_cases(table: LaunchTable) -> Iterator[AotCase]:
    """All kernels and dtypes with representative shapes, launched as in `table`."""
    for variant in _variants():
        yield _prefill(variant, table)
        yield from _decode(variant, table)
    for dtype in _FLOATS:
        yield from _elementwise(dtype, table)
        if dtype != "fp32":
            yield from _few_rows(dtype, table)
            yield from _grouped(dtype, table)
            yield from _bytes(dtype, table)
        for cache in ("same", *_EIGHT_BIT):
            for head_dim in (64, 80, 128, 256):
                yield _rope(dtype, cache, head_dim)
    yield from _sampling()


def _variants() -> Iterator[_Variant]:
    for dtype in _FLOATS:
        for cache in ("same", *_EIGHT_BIT):
            for head_dim in (32, 64, 80, 96, 128, 256):
                main = dtype == "bf16" and head_dim == 128
                yield _Variant(dtype=dtype, cache=cache, head_dim=head_dim, group=4, representative=main)
                if head_dim in (64, 128, 256):
                    yield _Variant(dtype=dtype, cache=cache, head_dim=head_dim, group=4, deterministic=True)
            yield _Variant(dtype=dtype, cache=cache, head_dim=128, group=4, window=4096)
            yield _Variant(dtype=dtype, cache=cache, head_dim=256, group=2, window=4096, soft_cap=72.0)
        for group in (1, 7, 8, 16):
            yield _Variant(dtype=dtype, cache="same", head_dim=128, group=group)
    yield _Variant(dtype="fp32", cache="same", head_dim=64, group=2, deterministic=True, representative=True)


def _prefill(v: _Variant, table: LaunchTable) -> AotCase:
    launch = table.prefill(v.shape, deterministic=v.deterministic)
    types = {"queries_ptr": f"*{v.dtype}", **v.pages, "out_ptr": f"*{v.dtype}", "tables_ptr": "*i32"}
    types |= {"row_starts_ptr": "*i32", "starts_ptr": "*i32", "query_stride": "i32", "out_stride": "i32"}
    types |= {"table_stride": "i32", "num_seqs": "i32", "score_scale": "fp32"}
    return AotCase(
        name=f"paged_prefill {v.name}",
        kernel=paged_prefill_kernel,
        types=types,
        constants=v.geometry
        | {
            "FIXED_KEYS": launch.fixed_keys,
            "BLOCK_M": max(launch.block_m, power_of_two(v.group, 16)),
            "BLOCK_N": launch.block_n,
            "SOFT_CAP": v.soft_cap,
        },
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        representative=v.representative,
        timed=launch.timed,
    )


def _decode(v: _Variant, table: LaunchTable) -> Iterator[AotCase]:
    launches = table.decode(v.shape, deterministic=v.deterministic)
    for number, launch in enumerate(launches):
        yield from _decode_with(launch, v, f"{v.name}-{number + 1}" if number else v.name)


def _decode_with(launch: DecodeLaunch, v: _Variant, name: str) -> Iterator[AotCase]:
    types = {"queries_ptr": f"*{v.dtype}", **v.pages, "out_ptr": f"*{v.dtype}", "sums_ptr": "*fp32"}
    types |= {"stats_ptr": "*fp32", "tables_ptr": "*i32", "lengths_ptr": "*i32", "query_stride": "i32"}
    types |= {"out_stride": "i32", "table_stride": "i32", "score_scale": "fp32", "num_seqs": "i32"}
    types |= {"even_parts": "i32", "uneven_parts": "i32"}
    parts = {
        "NUM_SPLITS": 0,
        "SEQS": 64,
        "MIN_KEYS": launch.min_keys,
        "FIXED_KEYS": launch.fixed_keys,
        "BLOCK_N": launch.block_n,
    }
    case = AotCase(
        name=f"flash_decode {name}",
        kernel=flash_decode_kernel,
        types=types,
        constants=v.geometry
        | parts
        | {"BLOCK_M": max(launch.block_m, power_of_two(v.group, 16)), "SOFT_CAP": v.soft_cap, "PDL": True},
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        representative=v.representative,
    )
    yield case
    if not v.deterministic and v.cache == "same":
        yield replace(case, name=f"{case.name}-even", constants=case.constants | {"NUM_SPLITS": 16, "SEQS": 1})
    if v.representative:
        absent = {"sums_ptr": None, "stats_ptr": None}
        kept = {name: found for name, found in types.items() if name not in absent}
        constants = case.constants | {"NUM_SPLITS": 1, "SEQS": 1} | absent
        yield replace(case, name=f"{case.name}-whole", types=kept, constants=constants)
    if v.cache != "int8":
        arguments = ["out_ptr", "head_scales_ptr", "sums_ptr", "stats_ptr", "lengths_ptr", "out_stride", "num_seqs"]
        arguments += ["even_parts", "uneven_parts"]
        names = ("GROUP", "HEAD_DIM", "WINDOW", "BLOCK_D", "head_scales_ptr")
        yield AotCase(
            name=f"merge_parts {name}",
            kernel=merge_parts_kernel,
            types={name: types[name] for name in arguments if name in types},
            constants={name: v.geometry[name] for name in names if name in v.geometry}
            | parts
            | {"BLOCK_P": 16, "PDL": True},
            representative=v.representative,
        )


def _rope(dtype: str, cache: str, head_dim: int) -> AotCase:
    types = {name: f"*{dtype}" for name in ("qkv_ptr", "pages_ptr", "query_norm_ptr", "key_norm_ptr")}
    types |= {"cos_ptr": "*fp32", "sin_ptr": "*fp32", "slots_ptr": "*i64"}
    types |= {"qkv_stride": "i32", "angle_stride": "i32", "eps": "fp32"}
    constants: dict[str, Any] = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HALF": head_dim // 2, "BLOCK_SIZE": 16}
    constants |= {"LARGEST": 0.0, "BLOCK_HALF": power_of_two(head_dim // 2), "BLOCK_HEADS": 8, "PDL": True}
    constants |= _strides(cache, head_dim) | _absent(cache)
    if cache != "same":
        constants["LARGEST"] = _EIGHT_BIT[cache].largest
        types |= {"pages_ptr": f"*{_EIGHT_BIT[cache].code}", _EIGHT_BIT[cache].scales: "*fp32"}
    return AotCase(
        name=f"rope_kv {dtype}-{cache}-d{head_dim}",
        kernel=rope_kv_kernel,
        types=types,
        constants=constants,
        num_warps=2,
        representative=dtype == "bf16" and head_dim == 128,
    )


def _strides(cache: str, head_dim: int) -> dict[str, int]:
    """Strides from block to block, for eight heads in blocks of 16."""
    layout = KVLayout(
        model_fingerprint="",
        dtype="int8" if cache == "int8" else "fp8_e4m3",
        num_layers=1,
        num_kv_heads=8,
        head_dim=head_dim,
        block_size=16,
    )
    size = layout.layer_block_bytes
    return {"BLOCK_STRIDE": size, "SCALE_STRIDE": 0 if layout.scale_offset is None else size // 4}


def _absent(cache: str) -> dict[str, None]:
    """Scale arguments that are None for this cache."""
    given = _EIGHT_BIT[cache].scales if cache != "same" else ""
    return {name: None for name in ("scales_ptr", "head_scales_ptr") if name != given}


def _elementwise(dtype: str, table: LaunchTable) -> Iterator[AotCase]:
    main = dtype == "bf16"
    pointer = f"*{dtype}"
    for size in (1024, 4096, 8192):
        types = {name: pointer for name in ("residual_ptr", "delta_ptr", "weight_ptr", "out_ptr")}
        yield AotCase(
            name=f"add_rms_norm {dtype}-{size}",
            kernel=add_rms_norm_kernel,
            types=types | {"delta_stride": "i32", "eps": "fp32"},
            constants={"SIZE": size, "BLOCK": size, "PDL": True},
            num_warps=min(16, size // 512),
            representative=main and size == 4096,
        )
    yield AotCase(
        name=f"silu_mul {dtype}",
        kernel=silu_mul_kernel,
        types={"stacked_ptr": pointer, "out_ptr": pointer, "stacked_stride": "i32", "size": "i32"},
        constants={"BLOCK": 1024},
        representative=main,
    )
    launch = table.gemm(wide=dtype == "fp32")
    types = {name: pointer for name in ("x_ptr", "weight_ptr", "bias_ptr", "out_ptr")}
    constants = {"OUT": 6144, "DEPTH": 4096, "BLOCK_M": launch.block_m, "BLOCK_N": launch.block_n, "TOGETHER": 8}
    yield AotCase(
        name=f"gemm_fixed {dtype}",
        kernel=gemm_fixed_kernel,
        types=types | {"num_rows": "i32", "x_stride": "i32"},
        constants=constants | {"BLOCK_K": launch.block_k},
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        representative=main,
    )


_MATRICES = {"qkv": (6144, 4096), "output": (4096, 4096), "gate_up": (14_336, 4096), "down": (4096, 14_336)}
"""Output features and depth of an 8B model's products."""
_NUM_SMS = 132
"""Multiprocessors of an H100 and of an H200, by which depths are split."""


def _few_rows(dtype: str, table: LaunchTable) -> Iterator[AotCase]:
    for name, (features, depth) in (_MATRICES | {"head": (128_256, 4096)}).items():
        types = {key: f"*{dtype}" for key in ("x_ptr", "weight_ptr")}
        types["out_ptr"] = "*fp32" if name == "head" else f"*{dtype}"
        constants: dict[str, Any] = {"OUT": features, "DEPTH": depth, "GATED": name == "gate_up", "PDL": True}
        constants["bias_ptr"] = None
        if name in ("output", "down"):
            types["residual_ptr"] = f"*{dtype}"
        else:
            constants["residual_ptr"] = None
        if (one := table.one_row(features, depth, gated=name == "gate_up")) is not None:
            yield AotCase(
                name=f"gemv {dtype}-{name}",
                kernel=gemv_kernel,
                types=types,
                constants=constants | {"BLOCK_N": one.block_n, "BLOCK_K": one.block_k},
                num_warps=one.num_warps,
                representative=dtype == "bf16",
            )
        if (few := table.few_rows(features, depth, gated=name == "gate_up")) is None:
            continue
        parts: dict[str, Any] = {"parts_ptr": "*fp32", "arrivals_ptr": "*i32"} if few.num_splits > 1 else {}
        absent = dict.fromkeys({"parts_ptr", "arrivals_ptr"} - set(parts))
        tiles = {"BLOCK_M": MAX_ROWS, "BLOCK_N": few.block_n, "BLOCK_K": few.block_k, "NUM_SPLITS": few.num_splits}
        yield AotCase(
            name=f"gemm_few {dtype}-{name}",
            kernel=gemm_few_kernel,
            types=types | parts | {"num_rows": "i32", "x_stride": "i32"},
            constants=constants | absent | tiles | {"LINES": few.prefetch_lines},
            num_warps=few.num_warps,
            num_stages=few.num_stages,
            representative=dtype == "bf16",
        )


class _Codes(NamedTuple):
    """A stored form of weights by groups of columns."""

    bits: int
    group: int
    lanes: int = 32
    zeros: str = ""
    offsets: str = ""
    is_float: bool = False


_GROUPED = {
    "int4-g128": _Codes(4, 128),
    "int4-g128-zeros": _Codes(4, 128, zeros="*i8"),
    "int4-g32": _Codes(4, 32),
    "int4-g32-offsets": _Codes(4, 32, offsets="*fp32"),
    "int4-row": _Codes(4, 0),
    "int8-g128": _Codes(8, 128),
    "int8-g16": _Codes(8, 16, lanes=16),
    "int8-row": _Codes(8, 0),
    "fp8-g128": _Codes(8, 128, is_float=True),
}


class _Tiles(NamedTuple):
    """A launch of a product of quantized weights, and a matrix that it multiplies by."""

    matrix: str
    launch: QuantizedLaunch
    name: str

    @property
    def is_gated(self) -> bool:
        return self.matrix == "gate_up"

    def arguments(self, arithmetic: str, dtype: str, step: int) -> tuple[dict[str, str], dict[str, Any]]:
        """Types and constants that all such kernels have; `step`: depth that they multiply at a time."""
        features, depth = _MATRICES[self.matrix]
        launch = self.launch
        splits = 1 if self.is_gated else launch.num_splits(features, -(-depth // step), _NUM_SMS)
        types = {"out_ptr": f"*{dtype}", "num_rows": "i32"}
        types |= {} if self.is_gated else {"residual_ptr": f"*{dtype}"}
        if splits > 1:
            types |= {"parts_ptr": "*i32" if arithmetic == "bytes" else "*fp32", "arrivals_ptr": "*i32"}
        constants: dict[str, Any] = {"OUT": features, "DEPTH": depth, "GATED": self.is_gated, "NUM_SPLITS": splits}
        constants |= {"BLOCK_M": launch.block_m, "BLOCK_N": launch.block_n, "TOGETHER": ROW_TILES_TOGETHER}
        return types, constants | {"LINES": launch.prefetch_lines, "PDL": True}


def _tiles(arithmetic: str, table: LaunchTable) -> Iterator[_Tiles]:
    """Every launch with the deepest matrix, and gates, which are for few rows."""
    launches = table.quantized(arithmetic)
    yield _Tiles("gate_up", launches[0], "gated")
    for launch in launches:
        yield _Tiles("down", launch, f"m{launch.block_m}")
    for launch in table.quantized(arithmetic, deterministic=True):
        yield _Tiles("down", launch, "fixed")


def _grouped(dtype: str, table: LaunchTable) -> Iterator[AotCase]:
    for codes, form in _GROUPED.items():
        for tiles in _tiles("groups", table):
            types, constants = tiles.arguments("groups", dtype, 16 // form.bits * form.lanes)
            types |= {"x_ptr": f"*{dtype}", "x_stride": "i32", "words_ptr": "*i16"}
            types |= {"scale_ptr": "*fp32" if form.is_float else "*fp16"}
            types |= {"zero_ptr": form.zeros} if form.zeros else {}
            types |= {"offset_ptr": form.offsets} if form.offsets else {}
            constants |= {"GROUP": form.group or constants["DEPTH"], "BITS": form.bits, "LANES": form.lanes}
            yield _quantized_case(
                f"group_gemm {dtype}-{codes}-{tiles.name}",
                group_gemm_kernel,
                types,
                constants | {"IS_FLOAT": form.is_float},
                tiles.launch,
                is_main=dtype == "bf16" and codes == "int4-g128-zeros" and tiles.name != "m64",
            )


def _bytes(dtype: str, table: LaunchTable) -> Iterator[AotCase]:
    for tiles in _tiles("bytes", table):
        types, constants = tiles.arguments("bytes", dtype, tiles.launch.block_k)
        types |= {"codes_ptr": "*i8", "row_scale_ptr": "*fp32", "weight_ptr": "*i8", "scale_ptr": "*fp32"}
        yield _quantized_case(
            f"byte_gemm {dtype}-{tiles.name}",
            byte_gemm_kernel,
            types,
            constants | {"BLOCK_K": tiles.launch.block_k},
            tiles.launch,
            is_main=dtype == "bf16" and tiles.name in ("m16", "m128"),
        )
    for depth in (4096, 14_336):
        yield AotCase(
            name=f"round_rows {dtype}-{depth}",
            kernel=round_rows_kernel,
            types={"x_ptr": f"*{dtype}", "codes_ptr": "*i8", "scale_ptr": "*fp32", "x_stride": "i32"},
            constants={"DEPTH": depth, "BLOCK": 4096, "PDL": True},
            num_warps=8,
            representative=dtype == "bf16" and depth == 4096,
        )


def _quantized_case(
    name: str,
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    launch: QuantizedLaunch,
    *,
    is_main: bool,
) -> AotCase:
    """A case whose other arguments are None."""
    return AotCase(
        name=name,
        kernel=kernel,
        types=types,
        constants=constants | dict.fromkeys(set(kernel.arg_names) - types.keys() - constants.keys()),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        representative=is_main,
    )


def _sampling() -> Iterator[AotCase]:
    edits = {"logits_ptr": "*fp32", "rows_ptr": "*i32", "token_ids_ptr": "*i32", "values_ptr": "*fp32"}
    yield AotCase(
        name="sampling edit",
        kernel=edit_kernel,
        types=edits | {"count": "i32", "vocab_size": "i32"},
        constants={"BLOCK": 128},
    )
    floats = ("temperature_ptr", "min_p_ptr", "top_p_ptr")
    draws = {name: "*fp32" for name in floats} | {
        name: "*i64" for name in ("top_k_ptr", "seed_ptr", "position_ptr", "choice_ptr")
    }
    marks = {"counts_ptr": "*i32", "slots_ptr": "*i32"}
    factors = {name: "*fp32" for name in ("repetition_ptr", "presence_ptr", "frequency_ptr")}
    survey = {name: "*fp32" for name in ("logits_ptr", "maxima_ptr")} | {"vocab_size": "i32"}
    select = survey | {"out_ptr": "*i64"}
    sections, listed = {"sections_ptr": "*fp32"}, {"listed_ptr": "*i32"}
    read = {"GROUP": 32, "BLOCK": 2048}
    chosen = read | {"PER_SECTION": 64, "BLOCK_GROUPS": 4096}
    surveys = {
        "penalised": survey | sections | draws | marks | factors | {"adjusted_ptr": "*fp32"},
        "drawn": survey | sections | draws,
        "greedy": survey,
    }
    selects = {
        "penalised": select | sections | listed | draws | marks,
        "drawn": select | sections | listed | draws,
        "greedy": select,
    }
    for name, types in surveys.items():
        yield _with_absent(f"sampling survey-{name}", survey_kernel, types, read, 4)
    for name, types in selects.items():
        yield _with_absent(f"sampling select-{name}", select_kernel, types, chosen, 8)


def _with_absent(name: str, kernel: Any, types: dict[str, str], constants: dict[str, Any], num_warps: int) -> AotCase:
    """A case whose other arguments are None."""
    absent = dict.fromkeys(set(kernel.arg_names) - types.keys() - constants.keys())
    return AotCase(
        name=name,
        kernel=kernel,
        types=types,
        constants=constants | absent,
        num_warps=num_warps,
        representative="penalised" in name,
    )
