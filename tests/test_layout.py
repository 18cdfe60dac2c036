"""Addresses against the format's formulas, and the order of query scales."""

import cases
import numpy as np
import pytest
from cases import bits, golden

from k2i_jax import PageLayout, query_scale_from_aiter, query_scale_to_aiter
from k2i_jax.layout import payload_offset, scale_offset

LAYOUTS = list(PageLayout)
# One page, both ends of it, then slots whose byte offsets pass 2^31, 2^32 and whose slot numbers do.
SLOTS = [*range(130), 2**25 - 1, 2**25, 2**26 + 77, 2**31 - 1, 2**31, 2**32 + 9, 2**40 + 12345]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_payload_offset_of_python_ints(layout):
    for slot in SLOTS:
        for byte in range(64):
            assert payload_offset(layout, slot, byte) == cases.payload_address(layout, slot, byte)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_scale_offset_of_python_ints(layout):
    for slot in SLOTS:
        for group in range(4):
            assert scale_offset(layout, slot, group) == cases.scale_address(layout, slot, group)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_offsets_of_int64_arrays(layout):
    """The same numbers as with Python's unbounded integers, where 32 bits would wrap."""
    slots, bytes_ = np.array(SLOTS, np.int64)[:, None], np.arange(64)
    payload = [[cases.payload_address(layout, s, b) for b in range(64)] for s in SLOTS]
    scale = [[cases.scale_address(layout, s, c) for c in range(4)] for s in SLOTS]
    assert np.array_equal(payload_offset(layout, slots, bytes_), payload)
    assert np.array_equal(scale_offset(layout, slots, np.arange(4)), scale)
    assert max(map(max, payload)) > 2**40


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_page_is_filled_exactly_once(layout):
    """No two bytes of a page share an address, and none is left over."""
    slots = np.arange(64, 128)[:, None]
    payload = payload_offset(layout, slots, np.arange(64)).ravel()
    scale = scale_offset(layout, slots, np.arange(4)).ravel()
    if layout is PageLayout.FUSED:
        assert np.array_equal(np.sort(np.append(payload, scale)), np.arange(4352, 8704))
    else:
        assert np.array_equal(np.sort(payload), np.arange(4096, 8192))
        assert np.array_equal(np.sort(scale), np.arange(256, 512))


def test_page8_and_page64_share_their_page_borders():
    """A page id and a byte count mean the same in both: only bytes inside a page move."""
    slots = np.array(SLOTS, np.int64)[:, None]
    for offset, size, n in ((payload_offset, 4096, 64), (scale_offset, 256, 4)):
        pages = [offset(layout, slots, np.arange(n)) // size for layout in cases.LAYOUTS]
        assert np.array_equal(pages[0], pages[1])
        assert np.array_equal(pages[0], np.broadcast_to(slots // 64, pages[0].shape))


def test_a_page8_key_lies_inside_its_virtual_page():
    slots = np.arange(128)[:, None]
    assert (payload_offset(PageLayout.PAGE8, slots, np.arange(64)) // 512 == slots // 8).all()
    assert (scale_offset(PageLayout.PAGE8, slots, np.arange(4)) // 32 == slots // 8).all()


def test_widths_and_names():
    assert [str(x) for x in PageLayout] == ["page64", "page8", "fused"]
    assert [x.payload_width for x in PageLayout] == [4096, 4096, 4352]
    assert [x.scale_width for x in PageLayout] == [256, 256, None]
    assert PageLayout("page8") is PageLayout.PAGE8
    with pytest.raises(ValueError, match="page128"):
        PageLayout("page128")


def test_query_scales_from_aiters_order(case):
    ours = query_scale_from_aiter(case["q_scale"], case["q_fp4"].shape[1])
    assert np.array_equal(ours, case.queries.scale)


def test_query_scales_to_aiters_order(case):
    """Absent heads come out zero, as SGLang's packer leaves them."""
    heads = case["q_fp4"].shape[1]
    ours = np.asarray(query_scale_to_aiter(case.queries.scale))
    assert ours.shape == case["q_scale"].shape
    head = np.arange(16)[:, None] + 16 * np.arange(4)  # [h % 16, h // 16]
    assert np.array_equal(ours[..., head < heads], case["q_scale"][..., head < heads])
    assert not ours[..., head >= heads].any()


@pytest.mark.parametrize("heads", [16, 24, 64])
def test_query_scales_both_ways(heads):
    scale = np.random.default_rng(heads).integers(0, 256, (3, heads, 4), dtype=np.uint8)
    assert np.array_equal(query_scale_from_aiter(query_scale_to_aiter(scale), heads), scale)


def test_query_scales_of_the_chain_golden_file():
    chain = golden("chain")
    ours = query_scale_from_aiter(chain["q_scale"], 32)
    again = query_scale_to_aiter(ours)
    assert np.array_equal(bits(again)[..., :2], chain["q_scale"][..., :2])  # 32 heads: h // 16 is 0 or 1


def test_more_heads_than_the_order_holds():
    with pytest.raises(ValueError, match=r"scale: .*64 heads.*80"):
        query_scale_to_aiter(np.zeros((1, 80, 4), np.uint8))
    with pytest.raises(ValueError, match=r"heads: .*80"):
        query_scale_from_aiter(np.zeros((1, 1, 4, 16, 4), np.uint8), 80)
    with pytest.raises(ValueError, match=r"scale: expected shape \[rows, 1, 4, 16, 4\]"):
        query_scale_from_aiter(np.zeros((1, 64, 4), np.uint8), 64)
