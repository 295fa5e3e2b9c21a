"""Which workers can be paired, and the reason if not."""

from itertools import permutations, product

import pytest

from tandem.values.kv_agreement import CONVERSIONS, agree, cannot_travel_as
from tandem.values.kv_layout import DTYPE_BITS
from tests.support.kv_transfer.plain_worker import layout


def test_kv_agreement_pairs_unequal_layouts_of_one_model():
    for tp, size, dtype in product((1, 2, 4, 8), (16, 32, 64), ("bfloat16", "int8", "fp8_e4m3", "int4")):
        for heads in (1, 2, 4, 8, 16):
            assert agree(layout(heads=heads), layout(dtype, heads=heads, tp=tp, block_size=size)) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "other"}, "model_fingerprint: m at the source, other at the destination"),
        ({"layers": 3}, "num_layers: 2 at the source, 3 at the destination"),
        ({"heads": 4}, "num_kv_heads: 2 at the source, 4 at the destination"),
        ({"head_dim": 8}, "head_dim: 4 at the source, 8 at the destination"),
        ({"dtype": "float32"}, "dtype: no conversion from bfloat16 to float32"),
        ({"dtype": "int3"}, "dtype: no conversion from bfloat16 to int3"),
        ({"block_size": 24}, "block_size: 16 at the source, 24 at the destination, neither divides the other"),
        ({"block_size": 0}, "block_size: 16 at the source, 0 at the destination, neither divides the other"),
        ({"tp": 3}, "tp_size: 3 at the destination neither divides nor is a multiple of 2 heads"),
        ({"tp": 0}, "tp_size: 0 at the destination neither divides nor is a multiple of 2 heads"),
    ],
)
def test_kv_agreement_reason_begins_with_field(change, reason):
    assert agree(layout(), layout(**change)) == reason
    assert agree(layout(**change), layout()).split(":")[0] == reason.split(":")[0]


def test_kv_agreement_needs_a_listed_conversion():
    for source, target in permutations(DTYPE_BITS, 2):
        disagreement = agree(layout(source), layout(target))
        assert (disagreement is None) == ((source, target) in CONVERSIONS)
    assert agree(layout("int3"), layout("int3")) == "dtype: no conversion from int3 to int3"
    assert "no conversion from int8 to fp8_e4m3" in agree(layout("int8"), layout("fp8_e4m3"))
    assert "no conversion from int4 to int8" in agree(layout("int4"), layout("int8"))
    assert len(CONVERSIONS) == 18


def test_kv_agreement_wire_dtype_without_conversion_is_refused() -> None:
    assert cannot_travel_as("bfloat16", "bfloat16", "bfloat16") is None
    assert cannot_travel_as("bfloat16", "int8", "bfloat16") is None
    assert cannot_travel_as("float32", "int8", "int8") is None
    assert cannot_travel_as("int8", "fp8_e4m3", "int8") == "wire_dtype: no conversion from int8 to fp8_e4m3"
    assert cannot_travel_as("float32", "float16", "float32") == "wire_dtype: no conversion from float32 to float16"
