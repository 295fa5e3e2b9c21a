"""Dense projections with weights packed once for our own kernels: on AMX tiles, or on vectors of any width.

One packing serves every number of rows, and the original weight may be dropped. Every output element is summed over
the depth in one fixed order, so a row's result never depends on the other rows or on the number of threads.
"""

import ctypes
import mmap
from enum import Enum, Flag, IntEnum

import torch
from torch import Tensor

from engine.kernels.cpu.build import KernelsUnavailable
from engine.kernels.cpu.library import CpuFeatures, KernelLibrary
from engine.model.checkpoints.stored_matrix import (
    Fp8Matrix,
    GroupIntMatrix,
    Int8Matrix,
    StoredMatrix,
    Table16Matrix,
    Weight,
    as_tensor,
)

PANEL = 32
"""Output columns packed, and computed, together; csrc/linear.h: kPanel."""

HUGE_PAGE_BYTES = 2**21
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory has huge pages only by another switch
CACHE_LINE_BYTES = 64

# csrc/tile_rows.h: kFewRows, kTileRows, and kTileRowBytes in bf16
FEW_ROWS = 32
TILE_ROWS = 16
TILE_COLUMNS = 32

# csrc/lines.h: kGroup, and its halves; the largest zero that a byte holds; normal numbers of half precision
_GROUP = 32
_HALF_GROUP = 16
_MAX_ZERO = 255
_LEAST_HALF, _LARGEST_HALF = 2.0**-14, 65504.0

# csrc/scaled_codes.h: kGroupDepth; scales that can be multiplied by kScale
_CODES_GROUP = 64
_LARGEST_SCALE = 2.0**100


class Epilogue(IntEnum):
    """Operation applied to the product; the numbers are those of csrc/linear.h."""

    STORE = 0  # out = x @ W.T + bias
    STORE_FLOAT32 = 1  # the same, out in float32 whatever the input: logits
    GATED = 2  # W holds gates above values: out = silu(gate) * value, in float32 until the one rounding
    ADD = 3  # out += x @ W.T + bias, which is rounded before it is added, as `residual += linear(x)` does


class Arithmetic(Enum):
    """Storage and multiplication of weights; the values are parts of the C functions' names."""

    BF16 = "bf16"  # on AMX tiles
    BF16_DOT = "bf16_dot"  # by AVX-512's dot product of pairs, which takes what is below 2^-126 for zero
    BF16_VECTORS = "bf16_vectors"  # multiplied as floats, which is exact
    # Weights per output column, inputs per row, both symmetric; bf16 in and out.
    INT8 = "int8"  # on AMX tiles
    INT8_DOT = "int8_dot"  # by AVX-512's dot product of four: the same bits as on AMX
    INT8_VECTORS = "int8_vectors"  # as short integers; the same bits where there is AVX-512, but for infinite inputs
    # Weights in groups of 32 of the depth, inputs in eight bits by the same groups; bf16 in and out.
    INT4 = "int4"  # around zero
    # Only weights that are stored so:
    INT4_ZEROS = "int4_zeros"  # each group around a code of its own
    INT4_OFFSETS = "int4_offsets"  # a number is added to each product of code and scale
    INT8_GROUPS = "int8_groups"  # eight bits around their middle
    INT8_OFFSETS = "int8_offsets"
    INT8_HALVES = "int8_halves"  # with a scale for each 16 of the depth
    INT8_OFFSET_HALVES = "int8_offset_halves"  # so, and a number for each 32 is added to each product of code and scale
    FLOAT32 = "f32"
    # Only weights that are stored so: codes of floats, which are multiplied as floats, by rows that are not rounded.
    FP8 = "fp8"  # E4M3; bf16 in and out
    FP8_FLOAT32 = "fp8_f32"  # the same packing; float32 in and out
    TABLE16 = "table16"  # places in a table of 16 values; bf16 in and out
    TABLE16_FLOAT32 = "table16_f32"

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights that are packed, and of the rows that are multiplied."""
        is_float32 = self in (Arithmetic.FLOAT32, Arithmetic.FP8_FLOAT32, Arithmetic.TABLE16_FLOAT32)
        return torch.float32 if is_float32 else torch.bfloat16

    @property
    def packing(self) -> str:
        """Beginning of the names of the C functions that pack weights."""
        return "f32" if self is Arithmetic.FLOAT32 else self.value.removesuffix("_f32")

    @property
    def has_groups(self) -> bool:
        """Whether weights have scales by groups of their depth."""
        return self in _GROUPED

    @property
    def has_column_scales(self) -> bool:
        """Whether weights have one scale for each output column."""
        return self in (Arithmetic.INT8, Arithmetic.INT8_DOT, Arithmetic.INT8_VECTORS)

    @property
    def is_of_floats(self) -> bool:
        """Whether weights are codes of floats."""
        return self in _OF_FLOATS


_GROUPED = (
    Arithmetic.INT4,
    Arithmetic.INT4_ZEROS,
    Arithmetic.INT4_OFFSETS,
    Arithmetic.INT8_GROUPS,
    Arithmetic.INT8_OFFSETS,
    Arithmetic.INT8_HALVES,
    Arithmetic.INT8_OFFSET_HALVES,
)
_OF_FLOATS = (Arithmetic.FP8, Arithmetic.FP8_FLOAT32, Arithmetic.TABLE16, Arithmetic.TABLE16_FLOAT32)
_WITH_OFFSETS = (Arithmetic.INT4_OFFSETS, Arithmetic.INT8_OFFSETS, Arithmetic.INT8_OFFSET_HALVES)


class Tiles(Flag):
    """Rows of a bf16 projection of more than `FEW_ROWS` rows that are in tiles (csrc/tile_rows.h): passed from one
    kernel to the next, they need not be packed. The tensor then gives the numbers of rows and columns, not their
    layout; its memory holds whole tiles of 16 rows. Rows are multiples of 32 elements.
    """

    NOTHING = 0
    INPUT = 1
    OUTPUT = 2  # of gates only


class _Linear(ctypes.Structure):
    """The struct `Linear` of csrc/linear.h."""

    _fields_ = (
        ("weights", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("columns", ctypes.c_int64),
        ("depth", ctypes.c_int64),
        ("epilogue", ctypes.c_int64),
        ("takes_tiles", ctypes.c_int64),
        ("gives_tiles", ctypes.c_int64),
    )


class PackedLinear:
    """`x @ weight.T + bias` from a packed copy of `weight`, written into a tensor of the caller."""

    __slots__ = ("_bias", "_embed", "_multiply", "_packed", "_record", "_scales", "_tiles", "arithmetic", "columns",
                 "depth", "dtype", "kernel_address", "num_threads", "out_dtype", "record_address")  # fmt: skip

    def __init__(
        self,
        library: KernelLibrary,
        weight: Weight,
        bias: Tensor | None = None,
        *,
        arithmetic: Arithmetic,
        epilogue: Epilogue = Epilogue.STORE,
        tiles: Tiles = Tiles.NOTHING,
        num_threads: int = 1,
        arena: "Arena | None" = None,
    ) -> None:
        """Pack `weight` `[num_columns, depth]`, or `[2 * num_columns, depth]` for `GATED`; `bias` has as many elements.
        A stored weight is one of which `stored_arithmetic` says `arithmetic`. `arena`: where small matrices are many.

        Raises KernelsUnavailable when the processor lacks the instructions for `arithmetic`, ValueError for a weight or
        bias of another kind.
        """
        self.arithmetic = arithmetic
        if not supports(library.features, arithmetic):
            raise KernelsUnavailable(f"the processor has no instructions for {arithmetic.value} projections")
        if not _fits(library.features, weight, arithmetic):
            kind = weight.dtype if isinstance(weight, Tensor) else "stored"
            raise ValueError(f"{kind} weights cannot be packed for {arithmetic.value}")
        gated = epilogue is Epilogue.GATED
        _check_weight(weight, bias, gated=gated)
        self.columns = weight.shape[0] // 2 if gated else weight.shape[0]
        self.depth = weight.shape[1]
        self._tiles = tiles
        self._check_tiles(gated=gated)
        self.dtype = arithmetic.dtype
        self.out_dtype = torch.float32 if epilogue is Epilogue.STORE_FLOAT32 else self.dtype
        self.num_threads = num_threads
        panels = -(-self.columns // (PANEL // 2 if gated else PANEL))
        self._bias = None if bias is None else _packed_bias(bias, panels, gated=gated)
        self._scales = torch.zeros(panels * PANEL) if arithmetic.has_column_scales else None
        if isinstance(weight, Table16Matrix):
            self._scales = weight.table.float().clone()  # what the codes are places in
        num_bytes = library.function(f"tandem_{arithmetic.packing}_packed_bytes", "ii", "i")(panels, self.depth)
        self._packed = huge_bytes(library, num_bytes) if arena is None else arena.allocate(num_bytes)
        self._pack(library, weight, gated=gated)
        self._record = _Linear(
            weights=self._packed.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            scales=None if self._scales is None else self._scales.data_ptr(),
            columns=self.columns,
            depth=self.depth,
            epilogue=int(epilogue),
            takes_tiles=Tiles.INPUT in tiles,
            gives_tiles=Tiles.OUTPUT in tiles,
        )
        self.record_address = ctypes.addressof(self._record)
        name = self.arithmetic.value
        self._multiply = library.function(f"tandem_{name}_linear", "ppiipii")
        self.kernel_address = library.address(f"tandem_{name}_linear")
        embeds = not arithmetic.has_groups and not arithmetic.is_of_floats and not gated
        signature = "piipipii" if self._scales is None else "ppiipipii"
        self._embed = library.function(f"tandem_{name}_embed", signature, "i") if embeds else None

    @property
    def nbytes(self) -> int:
        """Memory held: packed weights with their padding, bias, scales."""
        return sum(part.nbytes for part in (self._packed, self._bias, self._scales) if part is not None)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Multiply `x` `[num_rows, depth]` into `out` `[num_rows, num_columns]`, which must not overlap it.

        Any row stride, but contiguous elements. Raises ValueError for any other shape, layout or type.
        """
        rows, depth = x.shape
        x_stride, x_step = x.stride()
        out_stride, out_step = out.stride()
        if depth != self.depth or out.shape != (rows, self.columns) or x_step != 1 or out_step != 1:
            raise ValueError(
                f"a projection of rows of {self.depth} to {self.columns}, each contiguous, does not take "
                f"{tuple(x.shape)} with strides {x.stride()} to {tuple(out.shape)} with strides {out.stride()}"
            )
        if x.dtype is not self.dtype or out.dtype is not self.out_dtype:
            raise ValueError(f"this projection takes {self.dtype} to {self.out_dtype}, not {x.dtype} to {out.dtype}")
        if self._tiles and rows > FEW_ROWS:
            if Tiles.INPUT in self._tiles:
                check_whole_tiles(x)
            if Tiles.OUTPUT in self._tiles:
                check_whole_tiles(out)
        self._multiply(self.record_address, x.data_ptr(), x_stride, rows, out.data_ptr(), out_stride, self.num_threads)

    def embed(self, ids: Tensor, out: Tensor) -> None:
        """Copy rows `ids` (int64) of the weight to `out` `[num_ids, depth]`: tied embeddings need no second copy. Rows
        of int8 weights are those that are stored, rounded.

        Raises IndexError for an id that is not a column, ValueError when the packing cannot be looked up (int4, codes
        of floats, gates) or a tensor is of the wrong kind.
        """
        if self._embed is None:
            raise ValueError("int4 weights, codes of floats and gates cannot be looked up")
        if ids.dtype is not torch.int64 or ids.dim() != 1 or ids.stride(0) != 1:
            raise ValueError(f"ids are contiguous int64, not {ids.dtype} with strides {ids.stride()}")
        if out.shape != (ids.shape[0], self.depth) or out.stride(1) != 1 or out.dtype is not self.dtype:
            raise ValueError(f"{out.dtype} {tuple(out.shape)} cannot hold {ids.shape[0]} rows of {self.depth}")
        stored = [part.data_ptr() for part in (self._packed, self._scales) if part is not None]
        found = self._embed(
            *stored, self.columns, self.depth, ids.data_ptr(), ids.shape[0], out.data_ptr(), out.stride(0),
            self.num_threads,
        )  # fmt: skip
        if not found:
            raise IndexError(f"ids must be below {self.columns}")

    def _check_tiles(self, *, gated: bool) -> None:
        if not self._tiles:
            return
        if self.arithmetic is not Arithmetic.BF16 or (Tiles.OUTPUT in self._tiles and not gated):
            raise ValueError("only bf16 projections take tiles, and only gates give them")
        sizes = (self.depth,) * (Tiles.INPUT in self._tiles) + (self.columns,) * (Tiles.OUTPUT in self._tiles)
        if any(size % TILE_COLUMNS for size in sizes):
            raise ValueError(f"tiles hold whole {TILE_COLUMNS} elements of a row, not {sizes}")

    def _pack(self, library: KernelLibrary, weight: Weight, *, gated: bool) -> None:
        name, packed = self.arithmetic.packing, self._packed
        if isinstance(weight, Int8Matrix):
            assert self._scales is not None  # noqa: S101  # narrows: of int8
            codes, scale = weight.codes.contiguous(), weight.scale.contiguous()
            library.function(f"tandem_{name}_pack_stored", "ppiiippi")(
                codes.data_ptr(),
                scale.data_ptr(),
                self.columns,
                self.depth,
                int(gated),
                packed.data_ptr(),
                self._scales.data_ptr(),
                self.num_threads,
            )
            return
        if isinstance(weight, GroupIntMatrix):
            # Kept until the call has returned, which has only their addresses.
            parts = {"codes": weight.codes, "scales": weight.scale.half()}
            if self.arithmetic is Arithmetic.INT4_ZEROS:
                parts["zeros"] = weight.zero.to(torch.uint8)
            if self.arithmetic in _WITH_OFFSETS:
                parts["offsets"] = _offsets(weight).half()
            parts = {part: values.contiguous() for part, values in parts.items()}
            library.function("tandem_groups_pack", "ippppiiiipi")(
                weight.bits,
                *(parts[part].data_ptr() if part in parts else 0 for part in ("codes", "scales", "zeros", "offsets")),
                min(weight.group_size, self.depth),
                self.columns,
                self.depth,
                int(gated),
                packed.data_ptr(),
                self.num_threads,
            )
            return
        if isinstance(weight, Fp8Matrix | Table16Matrix):
            self._pack_floats(library, weight, gated=gated)
            return
        weight = as_tensor(weight)
        source = (weight.data_ptr(), weight.stride(0), self.columns, self.depth, int(gated), packed.data_ptr())
        if self._scales is None:
            library.function(f"tandem_{name}_pack", "piiiipi")(*source, self.num_threads)
        else:
            library.function(f"tandem_{name}_pack", "piiiippi")(*source, self._scales.data_ptr(), self.num_threads)

    def _pack_floats(self, library: KernelLibrary, weight: Fp8Matrix | Table16Matrix, *, gated: bool) -> None:
        if isinstance(weight, Fp8Matrix):
            codes, scale, group_size = weight.codes.view(torch.uint8), weight.row_scales(), weight.block_columns
        else:
            codes, scale, group_size = weight.codes, weight.scale, weight.group_size
        codes, scale = codes.contiguous(), scale.float().contiguous()
        library.function(f"tandem_{self.arithmetic.packing}_pack", "ppiiiipi")(
            codes.data_ptr(),
            scale.data_ptr(),
            group_size,
            self.columns,
            self.depth,
            int(gated),
            self._packed.data_ptr(),
            self.num_threads,
        )


def best_arithmetic(features: CpuFeatures, dtype: torch.dtype, *, quantization: str = "none") -> Arithmetic:
    """The fastest arithmetic here for weights of `dtype`, or for their quantization: "int8" or "int4".

    Raises ValueError for a dtype that has none, and for another quantization.
    """
    if dtype is torch.float32 and quantization == "none":
        return Arithmetic.FLOAT32
    if dtype is not torch.bfloat16:
        raise ValueError(f"{dtype} weights cannot be packed{'' if quantization == 'none' else f' as {quantization}'}")
    match quantization:
        case "none":
            if supports(features, Arithmetic.BF16):
                return Arithmetic.BF16
            return Arithmetic.BF16_DOT if features.fast_bf16_dot else Arithmetic.BF16_VECTORS
        case "int8":
            if supports(features, Arithmetic.INT8):
                return Arithmetic.INT8
            return Arithmetic.INT8_DOT if supports(features, Arithmetic.INT8_DOT) else Arithmetic.INT8_VECTORS
        case "int4":
            return Arithmetic.INT4
        case _:
            raise ValueError(f"weights cannot be quantized as {quantization!r:.40}")


def supports(features: CpuFeatures, arithmetic: Arithmetic) -> bool:
    """Whether the kernels for `arithmetic` can run here."""
    match arithmetic:
        case Arithmetic.BF16:
            return features.amx_bf16
        case Arithmetic.BF16_DOT:
            return features.avx512_bf16
        case Arithmetic.INT8:
            return features.amx_int8
        case Arithmetic.INT8_DOT:
            return features.avx512_vnni
        case _:
            return features.avx2


def stored_arithmetic(
    features: CpuFeatures, matrix: StoredMatrix, dtype: torch.dtype = torch.bfloat16
) -> Arithmetic | None:
    """What multiplies a stored matrix by its very codes, and rows of `dtype`; None where nothing does.

    Signed bytes by row that are meant for rounded inputs. Codes of four or eight bits by runs of a multiple of 32
    columns, those of eight also of 16, whose scales, and what is added to products, half precision holds at least up to
    rounding. Finite codes of floats, E4M3 or of a table, by runs of a multiple of 64 columns; these by rows in float32,
    too.
    """
    if isinstance(matrix, Fp8Matrix | Table16Matrix):
        return _floats_arithmetic(matrix, dtype)
    if dtype is not torch.bfloat16:
        return None
    if isinstance(matrix, Int8Matrix):
        return best_arithmetic(features, torch.bfloat16, quantization="int8") if matrix.rounds_inputs else None
    return _groups_arithmetic(matrix) if isinstance(matrix, GroupIntMatrix) else None


def _groups_arithmetic(matrix: GroupIntMatrix) -> Arithmetic | None:
    if matrix.group_of_column is not None:
        return None
    has_halves = matrix.group_size == _HALF_GROUP < matrix.num_columns
    if (matrix.bits != 8) if has_halves else (matrix.group_size % _GROUP and matrix.group_size < matrix.num_columns):
        return None
    if not _fits_half(matrix.scale):
        return None
    if matrix.offset is None:
        low, high = torch.aminmax(matrix.zero)
        if low == high == 1 << (matrix.bits - 1):
            if has_halves:
                return Arithmetic.INT8_HALVES
            return Arithmetic.INT4 if matrix.bits == 4 else Arithmetic.INT8_GROUPS
        if matrix.bits == 4 and low >= 0 and high <= _MAX_ZERO:
            return Arithmetic.INT4_ZEROS
    if not _fits_half(offsets := _offsets(matrix)):
        return None
    if has_halves:
        return Arithmetic.INT8_OFFSET_HALVES if _are_alike_in_pairs(offsets) else None
    return Arithmetic.INT4_OFFSETS if matrix.bits == 4 else Arithmetic.INT8_OFFSETS


def _floats_arithmetic(matrix: Fp8Matrix | Table16Matrix, dtype: torch.dtype) -> Arithmetic | None:
    if dtype not in (torch.bfloat16, torch.float32):
        return None
    is_bfloat16 = dtype is torch.bfloat16
    if isinstance(matrix, Table16Matrix):
        group_size, arithmetic = matrix.group_size, Arithmetic.TABLE16 if is_bfloat16 else Arithmetic.TABLE16_FLOAT32
        is_exact = True
    else:
        group_size, arithmetic = matrix.block_columns, Arithmetic.FP8 if is_bfloat16 else Arithmetic.FP8_FLOAT32
        is_exact = matrix.codes.dtype is torch.float8_e4m3fn and bool((matrix.scale.abs() < _LARGEST_SCALE).all())
    has_groups = group_size % _CODES_GROUP == 0 or group_size >= matrix.shape[1]
    return arithmetic if is_exact and has_groups else None


def _offsets(matrix: GroupIntMatrix) -> Tensor:
    """The value of the middle code, `[rows, groups]`. It is smaller, so rounded less, than that of code zero."""
    middle = 1 << (matrix.bits - 1)
    values = (middle - matrix.zero.float()) * matrix.scale.float()
    return values if matrix.offset is None else values + matrix.offset


def _are_alike_in_pairs(of_groups: Tensor) -> bool:
    """Whether each two groups, `[rows, groups]`, have the same value; a last one may be alone."""
    count = of_groups.shape[1] // 2 * 2
    return torch.equal(of_groups[:, 0:count:2], of_groups[:, 1:count:2])


def _fits_half(values: Tensor) -> bool:
    """Whether half precision holds numbers exactly, or with all its digits."""
    wide, sizes = values.float(), values.float().abs()
    has_all_digits = (sizes >= _LEAST_HALF) & (sizes <= _LARGEST_HALF)
    return bool((has_all_digits | (wide.half().float() == wide)).all())


def _fits(features: CpuFeatures, weight: Weight, arithmetic: Arithmetic) -> bool:
    if isinstance(weight, Tensor):
        is_stored_only = (arithmetic.has_groups and arithmetic is not Arithmetic.INT4) or arithmetic.is_of_floats
        return weight.dtype is arithmetic.dtype and not is_stored_only
    if isinstance(weight, Int8Matrix):
        return arithmetic.has_column_scales
    return stored_arithmetic(features, weight, arithmetic.dtype) is arithmetic


def _check_weight(weight: Weight, bias: Tensor | None, *, gated: bool) -> None:
    if isinstance(weight, Tensor) and (
        weight.dim() != 2 or weight.stride(1) != 1 or 0 in weight.shape or weight.device.type != "cpu"
    ):
        raise ValueError(
            f"a weight to pack must have contiguous rows on the CPU, got {tuple(weight.shape)}, {weight.stride()}"
        )
    if gated and weight.shape[0] % 2:
        raise ValueError(f"gates and values must be equally many: {weight.shape[0]} rows")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"a bias of {tuple(bias.shape)} does not fit a weight of {tuple(weight.shape)}")


def whole_tiles(num_rows: int) -> int:
    """Number of rows, a multiple of `TILE_ROWS`, whose memory `num_rows` rows in tiles need."""
    return -(-num_rows // TILE_ROWS) * TILE_ROWS


def check_whole_tiles(rows: Tensor) -> None:
    """Raise ValueError unless the memory from a tensor's first element on holds its rows in tiles."""
    room = rows.untyped_storage().nbytes() // rows.element_size() - rows.storage_offset()
    if room < whole_tiles(rows.shape[0]) * rows.shape[1]:
        raise ValueError(f"{tuple(rows.shape)} in tiles does not fit into memory for {room} elements")


def huge_bytes(library: KernelLibrary, num_bytes: int) -> Tensor:
    """An uninitialised uint8 tensor, from 2 MB up on a 2 MB boundary and on huge pages where the system offers them.

    Streaming weights through 4 KB pages costs a page walk every 64 lines. Huge pages are only a request: without
    them everything works, slower. A mapping of its own, since malloc would reuse memory that loading has
    already touched, whose parts skipped by the alignment would stay resident.
    """
    if num_bytes < HUGE_PAGE_BYTES:
        storage = torch.empty(num_bytes + CACHE_LINE_BYTES, dtype=torch.uint8)
        begin = -storage.data_ptr() % CACHE_LINE_BYTES
        return storage[begin : begin + num_bytes]
    storage = torch.frombuffer(mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=_PRIVATE), dtype=torch.uint8)
    begin = -storage.data_ptr() % HUGE_PAGE_BYTES
    tensor = storage[begin : begin + num_bytes]
    library.function("tandem_advise_huge", "pi", "i")(tensor.data_ptr(), num_bytes)
    return tensor


class Arena:
    """Memory of many matrices that are too small for huge pages of their own: there are thousands of experts, and with
    a mapping for each a process would come near the number that it may have.
    """

    _CHUNK_BYTES = 32 * HUGE_PAGE_BYTES

    __slots__ = ("_chunk", "_library", "_used")

    def __init__(self, library: KernelLibrary) -> None:
        self._library = library
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def allocate(self, num_bytes: int) -> Tensor:
        """Allocate an uninitialised uint8 tensor that begins with a cache line. A chunk is freed with the last of its
        tensors; what is left at its end is never touched, so it takes no memory.
        """
        begin = -(-self._used // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
        if begin + num_bytes > self._chunk.nbytes:
            self._chunk, begin = huge_bytes(self._library, max(num_bytes, self._CHUNK_BYTES)), 0
        self._used = begin + num_bytes
        return self._chunk[begin : self._used]


def _packed_bias(bias: Tensor, panels: int, *, gated: bool) -> Tensor:
    """`bias` in the order of the packed columns, float32, zero where a panel is padding."""
    width = PANEL // 2 if gated else PANEL
    parts = [torch.zeros(panels * width) for _ in range(2 if gated else 1)]
    for part, values in zip(parts, bias.float().chunk(len(parts)), strict=True):
        part[: len(values)] = values
    return torch.cat([part.view(panels, width) for part in parts], dim=1).flatten()
