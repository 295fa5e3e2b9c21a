"""The canonical forms: any part, and any stack of parts, has the values of the whole."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.checkpoints.packing import canonical_codes, pack_nibbles, unpack_nibbles, unpack_words
from engine.model.checkpoints.stored_matrix import (
    DenseMatrix,
    Fp8Matrix,
    GroupIntMatrix,
    Int8Matrix,
    StoredMatrix,
    Table16Matrix,
    stack,
)

SIZES = st.integers(1, 12)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def dense(rows: int, columns: int, seed: int, _group: int) -> DenseMatrix:
    return DenseMatrix(values=torch.randn(rows, columns, generator=generator(seed)))


def int8(rows: int, columns: int, seed: int, _group: int) -> Int8Matrix:
    draw = generator(seed)
    codes = torch.randint(-128, 128, (rows, columns), generator=draw, dtype=torch.int8)
    return Int8Matrix(codes=codes, scale=torch.rand(rows, generator=draw))


def group_int(bits: int, *, offset: bool = False, order: bool = False) -> Callable[..., GroupIntMatrix]:
    def made(rows: int, columns: int, seed: int, group: int) -> GroupIntMatrix:
        draw = generator(seed)
        groups = -(-columns // group)
        codes = torch.randint(0, 2**bits, (rows, columns), generator=draw, dtype=torch.uint8)
        return GroupIntMatrix(
            bits=bits,
            num_columns=columns,
            codes=pack_nibbles(codes) if bits == 4 else codes,
            scale=torch.rand(rows, groups, generator=draw).half(),
            zero=torch.randint(0, 2**bits + 1, (rows, groups), generator=draw, dtype=torch.int16),
            group_size=group,
            offset=torch.randn(rows, groups, generator=draw) if offset else None,
            group_of_column=torch.randint(0, groups, (columns,), generator=draw) if order else None,
        )

    return made


def fp8(block_rows: int | None) -> Callable[..., Fp8Matrix]:
    def made(rows: int, columns: int, seed: int, group: int) -> Fp8Matrix:
        draw = generator(seed)
        tall = block_rows or rows
        return Fp8Matrix(
            codes=torch.randn(rows, columns, generator=draw).to(torch.float8_e4m3fn),
            scale=torch.rand(-(-rows // tall), -(-columns // group), generator=draw),
            block_rows=tall,
            block_columns=group,
        )

    return made


def table16(rows: int, columns: int, seed: int, group: int) -> Table16Matrix:
    draw = generator(seed)
    codes = torch.randint(0, 16, (rows, columns), generator=draw, dtype=torch.uint8)
    return Table16Matrix(
        num_columns=columns,
        codes=pack_nibbles(codes),
        table=torch.linspace(-1.0, 1.0, 16),
        scale=torch.rand(rows, -(-columns // group), generator=draw),
        group_size=group,
    )


FORMS: dict[str, Callable[[int, int, int, int], StoredMatrix]] = {
    "dense": dense,
    "int8": int8,
    "int4": group_int(4),
    "int8-groups": group_int(8, offset=True),
    "int4-order": group_int(4, order=True),
    "fp8": fp8(3),
    "fp8-tensor": fp8(None),
    "table": table16,
}


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=25, deadline=None)
@given(data=st.data(), rows=SIZES, columns=SIZES, group=st.integers(1, 14), seed=st.integers(0, 99))
def test_stored_matrix_parts_of_parts_equal_slices(
    form: str, data: st.DataObject, rows: int, columns: int, group: int, seed: int
) -> None:
    matrix = FORMS[form](rows, columns, seed, group)
    values = matrix.dequantized()
    assert values.shape == matrix.shape == (rows, columns)
    for _ in range(3):
        begin, end = sorted(data.draw(st.lists(st.integers(0, matrix.shape[0]), min_size=2, max_size=2)))
        matrix, values = matrix.rows(begin, end), values[begin:end]
        assert torch.equal(matrix.dequantized(), values)
        begin, end = sorted(data.draw(st.lists(st.integers(0, matrix.shape[1]), min_size=2, max_size=2)))
        matrix, values = matrix.columns(begin, end), values[:, begin:end]
        assert torch.equal(matrix.dequantized(), values)


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=20, deadline=None)
@given(heights=st.lists(SIZES, min_size=1, max_size=3), columns=SIZES, data=st.data())
def test_stack_has_rows_of_all_parts(form: str, heights: list[int], columns: int, data: st.DataObject) -> None:
    groups = [data.draw(st.integers(1, 14)) for _ in heights]
    parts = [
        FORMS[form](rows, columns, seed, group) for seed, (rows, group) in enumerate(zip(heights, groups, strict=True))
    ]
    stacked = stack(parts)
    assert torch.equal(stacked.dequantized(), torch.cat([part.dequantized() for part in parts]))
    if form != "int4-order":
        assert type(stacked) is type(parts[0])


def test_stack_of_four_and_eight_bits_has_eight() -> None:
    """With a zero in the middle, and groups of the size that divides all."""
    parts = [
        group_int(4)(3, 24, 0, 12),
        group_int(8, offset=True)(2, 24, 1, 8),
        group_int(4, offset=True)(4, 24, 2, 24),
    ]
    for order in (parts, parts[::-1]):
        stacked = stack(order)
        assert isinstance(stacked, GroupIntMatrix)
        assert (stacked.bits, stacked.group_size) == (8, 4)
        assert torch.equal(stacked.dequantized(), torch.cat([part.dequantized() for part in order]))
    far = replace(parts[0], zero=parts[0].zero - 200)
    for other in (far, group_int(4, order=True)(3, 24, 0, 12)):
        dense_stack = stack([other, parts[1]])
        assert isinstance(dense_stack, DenseMatrix), "a code would not fit, or is in another order"
        assert torch.equal(dense_stack.dequantized(), torch.cat([other.dequantized(), parts[1].dequantized()]))


def test_stack_in_one_activation_order_keeps_its_form() -> None:
    whole = group_int(4, order=True)(9, 24, 0, 8)
    parts = [whole.rows(0, 2), whole.rows(2, 5), whole.rows(5, 9)]
    stacked = stack(parts)
    assert isinstance(stacked, GroupIntMatrix)
    assert torch.equal(stacked.dequantized(), whole.dequantized())
    other = group_int(4, order=True)(2, 24, 1, 8)
    assert isinstance(stack([whole, other]), DenseMatrix), "another order"


def test_stack_of_different_forms_is_dense() -> None:
    parts = [int8(3, 8, 0, 4), table16(2, 8, 1, 4)]
    stacked = stack(parts)
    assert isinstance(stacked, DenseMatrix)
    assert torch.equal(stacked.dequantized(), torch.cat([part.dequantized() for part in parts]))
    with pytest.raises(ValueError, match="cannot stack"):
        stack([int8(3, 8, 0, 4), int8(3, 7, 0, 4)])
    with pytest.raises(ValueError, match="cannot stack"):
        stack([])


def test_dequantized_in_blocks_of_rows_equals_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = group_int(4)(11, 6, 0, 4)
    whole = matrix.dequantized()
    monkeypatch.setattr("engine.model.checkpoints.stored_matrix._BLOCK_VALUES", 13)
    assert torch.equal(matrix.dequantized(), whole)


@settings(max_examples=30, deadline=None)
@given(bits=st.integers(1, 8), count=st.integers(1, 70), seed=st.integers(0, 99))
def test_unpack_words_reads_a_stream_of_bits(bits: int, count: int, seed: int) -> None:
    codes = torch.randint(0, 2**bits, (2, count), generator=generator(seed)).tolist()
    words = []
    for row in codes:
        stream = sum(code << (bits * index) for index, code in enumerate(row))
        signed = [(stream >> (32 * word)) & 0xFFFFFFFF for word in range(-(-count * bits // 32))]
        words.append([word - 2**32 if word >= 2**31 else word for word in signed])
    packed = torch.tensor(words, dtype=torch.int32)
    assert unpack_words(packed, bits, count).tolist() == codes
    if bits <= 4 or bits == 8:
        canonical = canonical_codes(packed, bits, count)
        assert (canonical if bits == 8 else unpack_nibbles(canonical, count)).tolist() == codes
        assert canonical.is_contiguous()
    with pytest.raises(ValueError, match="hold fewer than"):
        unpack_words(torch.zeros(1, 1, dtype=torch.int32), bits, 33)


@given(columns=st.integers(0, 9), seed=st.integers(0, 9))
def test_nibbles_round_trip(columns: int, seed: int) -> None:
    codes = torch.randint(0, 16, (3, columns), generator=generator(seed), dtype=torch.uint8)
    assert torch.equal(unpack_nibbles(pack_nibbles(codes), columns), codes)
