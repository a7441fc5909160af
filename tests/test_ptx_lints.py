"""The lints of compiled kernels, each with what it must find and what it must let pass."""

import pytest
from ptx.lints import masked_reordered_histograms, narrow_products

HISTOGRAM = """
#loc = loc("/there/score.py":7:0)
#loc1 = loc("counts"(#loc))
    %digit = tt.reshape %digits allow_reorder : tensor<256x2xi32> -> tensor<512xi32> loc(#loc)
    %real = tt.reshape %reals allow_reorder : tensor<256x2xi1> -> tensor<512xi1> loc(#loc)
    %there = ttg.convert_layout %real : tensor<512xi1, #linear> -> tensor<512xi1, #blocked> loc(#loc)
    %counts = tt.histogram %digit, %there : tensor<512xi32> -> tensor<128xi32> loc(#loc1)
"""
PRODUCT = """
#loc1 = loc("/there/attend.py":20:4)
    %c8_i32 = arith.constant 8 : i32 loc(#loc)
    %row = tt.get_program_id y : i32 loc(#loc)
    %range = tt.make_range {end = 64 : i32, start = 0 : i32} : tensor<64xi32> loc(#loc)
    %start = arith.muli %row, %c8_i32 : i32 loc(#loc1)
    %offset = arith.muli %start, %stride : i32 loc(#loc1)
    %wide = arith.extsi %offset : i32 to i64 loc(#loc1)
    %p = tt.addptr %base, %wide : !tt.ptr<i32>, i64 loc(#loc1)
"""


@pytest.mark.parametrize(
    ("change", "count"),
    [
        (("", ""), 1),
        ((", %there", ""), 0),  # without a mask any order counts the same
        ((" allow_reorder", ""), 0),
        (("%digits allow_reorder", "%digits"), 1),
        (("tt.reshape %reals allow_reorder", "tt.load %reals"), 1),
    ],
)
def test_a_mask_that_meets_other_values(change, count):
    found = masked_reordered_histograms(HISTOGRAM.replace(*change))
    assert len(found) == count
    assert all(each.startswith("score.py:7: a histogram") for each in found)


@pytest.mark.parametrize(
    ("change", "count"),
    [
        (("", ""), 1),
        (("%start, %stride", "%start, %c8_i32"), 0),  # by a constant
        (("%start, %stride", "%range, %stride"), 0),
        (("%start, %stride : i32", "%start, %stride : i64"), 0),
        (("tt.addptr %base, %wide", "tt.addptr %base, %c8_i32"), 0),  # a product, but of no address
        (("%wide : !tt.ptr<i32>, i64", "%offset : !tt.ptr<i32>, i32"), 1),
    ],
)
def test_a_product_that_overflows(change, count):
    found = narrow_products(PRODUCT.replace(*change))
    assert found == ["attend.py:20: a product of 32 bits in an address"] * count
