"""Planes: SGLang's bytes, writing, reading, repacking, copying, and the tag that travels with raw pages."""

import functools
import json

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import golden
from hypothesis import given
from hypothesis import strategies as st

import k2i_jax as k
from k2i_jax import FP4Array, FP4Recipe, IndexKPlane, LayoutTag, PageLayout

PAGES = 5  # of the small pools here


def planes_equal(a, b):
    return np.array_equal(a.payload, b.payload) and np.array_equal(a.scale, b.scale) and a.layout == b.layout


def random_plane(seed, layout, pages=PAGES):
    rng = np.random.default_rng(seed)
    size = lambda n: rng.integers(0, 256, (pages, n), dtype=np.uint8)
    return IndexKPlane.from_arrays(size(4096), size(256), layout)


def written(plane, slots, keys):
    """What writing should give, byte by byte, the later of two keys for one slot last."""
    payload, scale = np.array(plane.payload).ravel(), np.array(plane.scale).ravel()
    for slot, key, key_scale in zip(np.asarray(slots).tolist(), keys.payload, keys.scale, strict=True):
        if 0 <= slot < plane.num_pages * 64:
            payload[cases.payload_address(plane.layout, slot, np.arange(64))] = key
            scale[cases.scale_address(plane.layout, slot, np.arange(4))] = key_scale
    return IndexKPlane.from_arrays(payload.reshape(-1, 4096), scale.reshape(-1, 256), plane.layout)


def test_golden_planes_from_the_keys(case, layout):
    """Quantised (SGLANG) and written, the keys are SGLang's planes byte for byte."""
    keys = k.quantize_fp4(case["k_input"], FP4Recipe.SGLANG)
    theirs = case.plane(layout)
    ours = k.write_keys(IndexKPlane.zeros(theirs.num_pages, layout), case["slots"], keys)
    slots = case["slots"][:, None]
    for got, want, address, size in (
        (ours.payload, theirs.payload, cases.payload_address, 64),
        (ours.scale, theirs.scale, cases.scale_address, 4),
    ):
        offsets = address(layout, slots, np.arange(size))
        got, want = np.asarray(got).ravel(), np.asarray(want).ravel()
        assert np.array_equal(got[offsets], want[offsets])
        unwritten = np.ones(got.size, bool)
        unwritten[offsets] = False
        assert not got[unwritten].any()


def test_golden_repacks(case):
    page64, page8 = (case.plane(x) for x in cases.LAYOUTS)
    assert planes_equal(k.repack(page64, "page8"), page8)
    assert planes_equal(k.repack(page8, PageLayout.PAGE64), page64)
    fused, slots = case.plane("fused"), case["slots"]
    for layout in cases.LAYOUTS:
        ours, theirs = k.read_keys(k.repack(fused, layout), slots), k.read_keys(case.plane(layout), slots)
        assert np.array_equal(ours.payload, theirs.payload)
        assert np.array_equal(ours.scale, theirs.scale)


@pytest.mark.parametrize("layout", list(PageLayout), ids=str)
def test_golden_reads(case, layout):
    """What is read is the quantised key itself, from all three of SGLang's pools."""
    keys, read = k.quantize_fp4(case["k_input"]), k.read_keys(case.plane(layout), case["slots"])
    assert np.array_equal(read.payload, keys.payload)
    assert np.array_equal(read.scale, keys.scale)


def test_from_arrays_takes_each_form_of_the_same_bytes(layout):
    plane = random_plane(0, layout)
    payload, scale = np.asarray(plane.payload), np.asarray(plane.scale)
    own = {
        "page64": ((PAGES, 4, 64, 16), (PAGES, 4, 16, 4)),
        "page8": ((8 * PAGES, 4, 4, 2, 16), (8 * PAGES, 4, 8)),
    }
    sglang = ((PAGES, 1, 4, 64, 16), (PAGES, 1, 4, 64))
    for shape, scale_shape in (payload.shape, scale.shape), sglang, own[layout]:
        plane = IndexKPlane.from_arrays(payload.reshape(shape), scale.reshape(scale_shape), layout)
        assert plane.payload.shape == (PAGES, 4096)
        assert np.array_equal(plane.payload, payload)
        assert np.array_equal(plane.scale, scale)
    views = IndexKPlane.from_arrays(payload.view(np.int8), scale.view(np.int8), str(layout))
    assert planes_equal(views, IndexKPlane.from_arrays(payload, scale, layout))


def test_from_arrays_takes_sub_byte_dtypes(layout):
    plane = random_plane(1, layout)
    codes = jax.lax.bitcast_convert_type(plane.payload.reshape(PAGES, 1, 4, 64, 16), jnp.float4_e2m1fn)
    codes = codes.reshape(PAGES, 1, 4, 64, 32)  # the last axis counts codes
    scale = jax.lax.bitcast_convert_type(plane.scale, jnp.float8_e8m0fnu)
    assert planes_equal(IndexKPlane.from_arrays(codes, scale, layout), plane)


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (ValueError, "scale: .*together", ((2, 4096), None, "page64")),
        (ValueError, "scale: .*together", (None, (2, 256), "page8")),
        (ValueError, "scale: .*payload alone", ((2, 4352), (2, 256), "fused")),
        (ValueError, "scale: has 3 pages, payload has 2", ((2, 4096), (3, 256), "page8")),
        (ValueError, r"payload: expected .*4096.*\[2, 4097\]", ((2, 4097), (2, 256), "page64")),
        (ValueError, r"payload: .*\[16, 4, 4, 2, 16\]", ((16, 4, 4, 2, 16), (2, 256), "page64")),
        (ValueError, r"payload: .*\[9, 4, 4, 2, 16\]", ((9, 4, 4, 2, 16), (2, 256), "page8")),
        (ValueError, r"payload: .*\[2, 4, 64, 16\]", ((2, 4, 64, 16), (2, 256), "page8")),
        (ValueError, r"scale: .*256.*\[2, 128\]", ((2, 4096), (2, 128), "page64")),
        (ValueError, r"payload: 8704 bytes a page are 128 slots", ((2, 8704), None, "fused")),
        (ValueError, r"payload: .*\[2, 4096\]", ((2, 4096), None, "fused")),
        (ValueError, "num_pages: expected", ((0, 4096), (0, 256), "page64")),
        (ValueError, "page7", ((2, 4096), (2, 256), "page7")),
    ],
)
def test_from_arrays_shape_errors(error, match, arguments):
    payload, scale, layout = arguments
    arrays = [None if shape is None else np.zeros(shape, np.uint8) for shape in (payload, scale)]
    with pytest.raises(error, match=match):
        IndexKPlane.from_arrays(*arrays, layout)


def test_from_arrays_dtype_errors():
    payload, scale = np.zeros((2, 4096), np.uint8), np.zeros((2, 256), np.uint8)
    with pytest.raises(TypeError, match=r"payload: expected uint8.*float32 \[2, 4096\]"):
        IndexKPlane.from_arrays(payload.astype(np.float32), scale, "page64")
    with pytest.raises(TypeError, match=r"scale: expected uint8.*int32"):
        IndexKPlane.from_arrays(payload, scale.astype(np.int32), "page64")


def test_zeros():
    plane = IndexKPlane.zeros(3, "page8")
    assert (plane.num_pages, plane.layout) == (3, PageLayout.PAGE8)
    assert not np.asarray(plane.payload).any()
    assert not np.asarray(plane.scale).any()
    assert (plane.payload.nbytes, plane.scale.nbytes) == (3 * 64 * 64, 3 * 64 * 4)
    with pytest.raises(ValueError, match="layout: FUSED"):
        IndexKPlane.zeros(3, PageLayout.FUSED)
    for pages in (0, -1, 2**25):  # 2^25 pages hold 2^31 slots, one more than an int32 counts
        with pytest.raises(ValueError, match=f"num_pages: .*{pages}"):
            IndexKPlane.zeros(pages, "page64")


@given(seed=st.integers(0, 2**32 - 1))
@pytest.mark.parametrize("layout", cases.LAYOUTS, ids=str)
def test_write_is_the_byte_loop(layout, seed):
    """Repeats (the later wins, never half of each), bad slots (skipped), over a plane full of other bytes."""
    rng = np.random.default_rng(seed)
    bad = [-1, -64, 320, 10**6, 2**31 - 1, -(2**31)]
    slots = rng.choice(np.r_[np.arange(0, 320, 7), bad], 40).astype(np.int32)
    plane, keys = random_plane(seed, layout), cases.random_fp4(rng, 40, scales=(0, 255))
    after = k.write_keys(plane, slots, keys)
    expected = written(plane, slots, keys)
    assert planes_equal(after, expected)
    read = k.read_keys(after, slots)
    last = {slot: i for i, slot in enumerate(slots.tolist())}
    for i, slot in enumerate(slots.tolist()):
        inside = 0 <= slot < 320
        assert np.array_equal(read.payload[i], keys.payload[last[slot]] if inside else np.zeros(64))
        assert np.array_equal(read.scale[i], keys.scale[last[slot]] if inside else np.zeros(4))


@given(seed=st.integers(0, 2**32 - 1))
@pytest.mark.parametrize("layout", cases.LAYOUTS, ids=str)
def test_repack_is_its_own_inverse_and_moves_no_key(layout, seed):
    plane = random_plane(seed, layout)
    other = cases.LAYOUTS[1 - cases.LAYOUTS.index(layout)]
    moved = k.repack(plane, other)
    assert moved.layout == other
    assert planes_equal(k.repack(moved, layout), plane)
    slots = np.arange(64 * PAGES)
    assert np.array_equal(k.read_keys(moved, slots).payload, k.read_keys(plane, slots).payload)
    assert np.array_equal(k.read_keys(moved, slots).scale, k.read_keys(plane, slots).scale)
    # The expected place of each byte, from the formulas alone.
    for name, address, size in (("payload", cases.payload_address, 64), ("scale", cases.scale_address, 4)):
        want = np.zeros(np.asarray(getattr(plane, name)).size, np.uint8)
        at = (slots[:, None], np.arange(size))
        want[address(other, *at)] = np.asarray(getattr(plane, name)).ravel()[address(layout, *at)]
        assert np.array_equal(np.asarray(getattr(moved, name)).ravel(), want)


def test_fused_is_read_only():
    fused = golden("wide_scales").plane("fused")
    keys = FP4Array(np.zeros((1, 64), np.uint8), np.zeros((1, 4), np.uint8))
    with pytest.raises(ValueError, match=r"plane: .*FUSED.*repack"):
        k.write_keys(fused, np.array([1]), keys)
    with pytest.raises(ValueError, match=r"layout: .*FUSED"):
        k.repack(golden("wide_scales").plane("page64"), "fused")
    assert k.repack(fused, "fused") is fused
    assert fused.tag().layout == "fused"


def test_read_keeps_the_shape_of_the_slots(layout):
    plane, slots = random_plane(3, layout), np.array([[64, 5], [319, 0], [7, 7]])
    read = k.read_keys(plane, slots)
    assert (read.payload.shape, read.scale.shape) == ((3, 2, 64), (3, 2, 4))
    assert np.array_equal(read.payload[1, 0], k.read_keys(plane, np.array(319)).payload)


def test_slot_zero_is_written_unless_asked(layout):
    plane, keys = random_plane(4, layout), cases.random_fp4(np.random.default_rng(4), 3)
    slots = np.array([0, 9, 0])
    assert planes_equal(k.write_keys(plane, slots, keys), written(plane, slots, keys))
    skipped = k.write_keys(plane, slots, keys, skip_slot_zero=True)
    assert planes_equal(skipped, written(plane, np.array([-1, 9, -1]), keys))


@pytest.mark.parametrize("dtype", [np.int64, np.uint32, np.uint64])
def test_wide_slots_never_wrap(layout, dtype):
    """2^32 + 9 is no slot 9, nor is 2^32 - 1 slot -1."""
    bad = [2**32 + 9, 2**63 - 1] if dtype != np.uint32 else [2**32 - 1, 2**31]
    bad += [] if dtype != np.int64 else [-(2**32) + 9, -(2**63)]
    plane, slots = random_plane(5, layout), np.array([*bad, 70], dtype)
    keys = cases.random_fp4(np.random.default_rng(5), len(slots))
    assert planes_equal(k.write_keys(plane, slots, keys), written(plane, slots, keys))
    assert not np.asarray(k.read_keys(plane, slots).payload)[: len(bad)].any()


def test_nothing_to_write(layout):
    plane = random_plane(6, layout)
    none = FP4Array(np.zeros((0, 64), np.uint8), np.zeros((0, 4), np.uint8))
    assert planes_equal(k.write_keys(plane, np.zeros(0, np.int32), none), plane)


def test_copying_a_page_moves_both_planes(layout):
    plane, slots = random_plane(7, layout), np.arange(320)
    keys = k.read_keys(plane, slots)
    copied = k.copy_pages(plane, np.array([1, 2, 9, 3, -1]), np.array([4, 1, 0, 4, 3]))
    after = k.read_keys(copied, slots)
    # Pairs with a page that does not exist skip, and of the two copies to page 4 the later stays.
    pages = np.array([0, 2, 2, 3, 3])
    moved = (pages[:, None] * 64 + np.arange(64)).ravel()
    assert np.array_equal(after.payload, np.asarray(keys.payload)[moved])
    assert np.array_equal(after.scale, np.asarray(keys.scale)[moved])


def test_moving_one_slot_leaves_the_others(layout):
    plane = random_plane(8, layout, pages=2)
    after = k.write_keys(plane, np.array([70]), k.read_keys(plane, np.array([5])))
    before, now = k.read_keys(plane, np.arange(128)), k.read_keys(after, np.arange(128))
    order = np.arange(128)
    order[70] = 5
    assert np.array_equal(now.payload, np.asarray(before.payload)[order])
    assert np.array_equal(now.scale, np.asarray(before.scale)[order])


def test_copying_from_another_pool(layout):
    plane, other = random_plane(9, layout), random_plane(10, layout, pages=9)
    after = k.copy_pages(plane, np.array([8, 5]), np.array([0, 5]), source_plane=other)
    assert np.array_equal(after.payload[0], other.payload[8])
    assert np.array_equal(after.scale[0], other.scale[8])
    assert np.array_equal(after.payload[1:], plane.payload[1:])
    wrong = cases.LAYOUTS[1 - cases.LAYOUTS.index(layout)]
    with pytest.raises(ValueError, match=f"source_plane: layout {wrong}, plane has {layout}"):
        k.copy_pages(plane, np.array([1]), np.array([1]), source_plane=random_plane(11, wrong))
    with pytest.raises(ValueError, match=r"target: .*\[2\].*\[1\]"):
        k.copy_pages(plane, np.array([1, 2]), np.array([1]))


def test_a_donated_plane_is_gone(layout):
    keys, slots = cases.random_fp4(np.random.default_rng(12), 4), np.array([3, 80, 5, 3])
    plane = random_plane(12, layout)
    expected = written(plane, slots, keys)
    assert planes_equal(k.write_keys(plane, slots, keys), expected)
    assert not plane.payload.is_deleted()
    assert planes_equal(k.write_keys(plane, slots, keys, donate=True), expected)
    assert plane.payload.is_deleted()
    assert plane.scale.is_deleted()

    plane = random_plane(12, layout)
    step = jax.jit(functools.partial(k.write_keys), donate_argnums=0)
    assert planes_equal(step(plane, slots, keys), expected)
    assert plane.payload.is_deleted()
    assert plane.scale.is_deleted()


def test_a_plane_read_in_the_wrong_layout_raises():
    """One distinct key a slot: what was written in one layout must not be taken for the other."""
    keys = np.zeros((64, 128), np.float32)
    keys[np.arange(64), np.arange(64)] = 2.0 ** (np.arange(64) % 7)
    keys = k.quantize_fp4(keys)
    planes = {x: k.write_keys(IndexKPlane.zeros(1, x), np.arange(64), keys) for x in cases.LAYOUTS}
    for here, there in ((0, 1), (1, 0)):
        a, b = planes[cases.LAYOUTS[here]], planes[cases.LAYOUTS[there]]
        assert not np.array_equal(a.payload, b.payload)
        with pytest.raises(ValueError, match=f"layout: {a.layout} here, {b.layout} there"):
            a.tag().check(b.tag())
        with pytest.raises(ValueError, match="source_plane: layout"):
            k.copy_pages(a, np.array([0]), np.array([0]), source_plane=b)


def test_tag_names_every_difference():
    ours = IndexKPlane.zeros(2, "page8").tag(FP4Recipe.SGLANG, ratio=1)
    theirs = IndexKPlane.zeros(3, "page64").tag(FP4Recipe.SGLANG_V4_C4, ratio=2)
    with pytest.raises(ValueError, match="differ") as error:
        ours.check(theirs)
    for fact in (
        "layout: page8 here, page64 there",
        "recipe: sglang here, sglang_v4_c4 there",
        "scale_order: ",
    ):
        assert fact in str(error.value)
    assert "ratio: 1 here, 2 there" in str(error.value)
    assert "k2i_jax.repack" in str(error.value)
    assert ours.check(ours) == ()


def test_tag_lists_what_nobody_compared():
    known = IndexKPlane.zeros(2, "page8").tag(FP4Recipe.SGLANG, ratio=1)
    assert IndexKPlane.zeros(2, "page8").tag().check(known) == ("recipe", "ratio")
    assert set(LayoutTag().check(known)) == {
        "layout",
        "page_size",
        "scale_order",
        "head_dim",
        "recipe",
        "ratio",
    }
    with pytest.raises(ValueError, match=r"page_size: 64 here, 128 there.*unknown: .*recipe"):
        IndexKPlane.zeros(2, "page8").tag().check(LayoutTag(page_size=128))


def test_tag_through_json():
    for layout in cases.LAYOUTS:
        for tag in (
            IndexKPlane.zeros(2, layout).tag(),
            IndexKPlane.zeros(2, layout).tag(FP4Recipe.DEEPSEEK, 2),
        ):
            assert LayoutTag.from_json(tag.to_json()) == tag
    facts = json.loads(IndexKPlane.zeros(2, "page8").tag(FP4Recipe.SGLANG, 1).to_json())
    assert (facts["layout"], facts["page_size"], facts["head_dim"], facts["recipe"]) == (
        "page8",
        64,
        128,
        "sglang",
    )
    for text in ('{"layout": "page8", "color": "red"}', "[1]", "page8", ""):
        with pytest.raises(ValueError, match="text: "):
            LayoutTag.from_json(text)
