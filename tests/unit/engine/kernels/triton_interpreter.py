"""Triton's interpreter for tests: import this module before any kernel, and run each test under `interpreted`.

Triton decides when a function is decorated whether it will be interpreted, and looks at the setting again when it runs,
so it is on while the kernels are imported here and while each test runs, and off otherwise.

bfloat16 is computed here: the interpreter keeps it as 16-bit integers, adds, multiplies and fills these, and cuts
numbers that it converts to it instead of rounding them.

Matrix products are summed here as tensor cores sum them: in an order that does not depend on where a row stands. The
interpreter leaves them to BLAS, whose order depends on that on some processors (AMD Zen 5), which would fake or hide
what tests of fixed bits look for.
"""

import importlib
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

SETTING = "TRITON_INTERPRET"
KERNELS = (
    "activation",
    "flash_decode",
    "gemm_few",
    "gemm_fixed",
    "gemv",
    "norm",
    "paged_prefill",
    "quantized.byte_gemm",
    "quantized.group_gemm",
    "quantized.round_rows",
    "rope_kv",
    "sampling",
)


@contextmanager
def interpreting() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SETTING, "1")
        from triton.runtime import interpreter  # only now: see above

        patch.setattr(interpreter.InterpreterBuilder, "create_dot", _create_dot)
        _compute_bfloat16(patch)
        yield


def _compute_bfloat16(patch: pytest.MonkeyPatch) -> None:
    """Operations of two numbers in float32, rounded, and conversions to the nearest, ties to even."""
    from triton.runtime import interpreter

    bfloat16, float32 = interpreter.tl.bfloat16, interpreter.tl.float32
    convert, operate = interpreter._convert_float, interpreter.InterpreterBuilder.binary_op
    from_type = interpreter.InterpreterBuilder.cast_impl

    def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source != float32 or target != bfloat16:
            return convert(data, source, target, rounding)
        bits = np.ascontiguousarray(data).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)

    def binary_op(builder: Any, left: Any, right: Any, operation: Any) -> Any:
        if left.dtype.scalar != bfloat16:
            return operate(builder, left, right, operation)
        wide = [convert(operand.data, bfloat16, float32, None).view(np.float32) for operand in (left, right)]
        result = operation(*wide)
        if result.dtype == np.bool_:
            return interpreter.TensorHandle(result, interpreter.tl.int1)
        return interpreter.TensorHandle(convert_float(result, float32, bfloat16, None), bfloat16)

    def cast(builder: Any, source: Any, target: Any) -> Any:
        if target.scalar == bfloat16 and source.dtype.scalar.is_int():
            source = from_type(builder, source, float32)
        return from_type(builder, source, target)

    patch.setattr(interpreter, "_convert_float", convert_float)
    patch.setattr(interpreter.InterpreterBuilder, "cast_impl", cast)
    patch.setattr(interpreter.InterpreterBuilder, "binary_op", binary_op)


@contextmanager
def _patched_language() -> Iterator[None]:
    """Replace the language's operations by the interpreter's once for many launches.

    Left alone, the interpreter looks through the whole language again each time that one kernel function calls another,
    which takes as long as all the rest.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(interpreter, "_patch_lang", lambda _fn: interpreter._LangPatchScope())
            _remember_types(patch)
            yield
    finally:
        scope.restore()


def _remember_types(patch: pytest.MonkeyPatch) -> None:
    """Derive once for each type, not at each operation, what follows from a type: half the time of an operation."""
    import triton.language as tl
    from triton.runtime import interpreter

    np_dtypes: dict[str, np.dtype[Any]] = {}
    tensors: dict[str, dict[str, Any]] = {}
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
    get_np_dtype, init_tensor = interpreter._get_np_dtype, tl.tensor.__init__
    init_block = tl.block_type.__init__

    def known_np_dtype(dtype: Any) -> np.dtype[Any]:
        if dtype.name not in np_dtypes:
            np_dtypes[dtype.name] = get_np_dtype(dtype)
        return np_dtypes[dtype.name]

    def init_known_tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors:
            init_tensor(self, handle, type)
            tensors[type.name] = vars(self).copy()
        vars(self).update(tensors[type.name])
        self.handle = handle

    def init_known_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *shape)
        if key not in blocks:
            init_block(self, element_ty, shape)
            blocks[key] = vars(self).copy()
        vars(self).update(blocks[key])

    patch.setattr(interpreter, "_get_np_dtype", known_np_dtype)
    patch.setattr(tl.tensor, "__init__", init_known_tensor)
    patch.setattr(tl.block_type, "__init__", init_known_block)


def _create_dot(_builder: Any, a: Any, b: Any, d: Any, _input_precision: Any, _max_num_imprecise_acc: Any) -> Any:
    """`tl.dot` of the interpreter, one step of the inner dimension after another: so numpy reduces an outer axis."""
    from triton.runtime import interpreter

    operands = []
    for operand in (a, b):
        data = operand.data
        if operand.dtype.primitive_bitwidth == 8 and operand.dtype.is_floating():
            half = interpreter.tl.float16
            data = interpreter._convert_float(data, operand.dtype, half, None).view(np.float16)
        if operand.dtype == interpreter.tl.bfloat16:
            data = interpreter._convert_float(data, operand.dtype, interpreter.tl.float32, None).view(np.float32)
        operands.append(data.astype(d.data.dtype, copy=False))
    left, right = operands
    products = np.multiply(np.moveaxis(left, -1, 0)[..., None], np.moveaxis(right, -2, 0)[..., None, :], order="C")
    return interpreter.TensorHandle(d.data + np.add.reduce(products, axis=0, dtype=products.dtype), d.dtype.scalar)


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    """Import this into a test module to have its kernels interpreted."""
    with interpreting(), _patched_language():
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
