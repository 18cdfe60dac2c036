"""The Pallas kernels, interpreted or compiled: both bodies, both layouts, every configuration, bad values."""

import dataclasses
import types

import numpy as np
import pytest
from cases import LAYOUTS, bits, golden, random_batch

from k2i_jax import reference
from k2i_jax.implementations import device_platform
from k2i_jax.kernels import pallas_score
from k2i_jax.kernels.config import Config, check_config, default_config

INTERPRET = device_platform() == "cpu"  # on a GPU the same tests run compiled
TOLERANCE = 1e-6
BODIES = ("dot_scaled", "decode")
BOUNDARIES = (-3, 0, 1, 7, 8, 9, 63, 64, 65, 511, 512, 513)
SPREADS = {"narrow": (122, 132), "wide": (110, 140), "widest": (70, 180)}  # at the last, dots near f32's limits


def some_long(values, quick):
    """Parameters of which only ``quick`` run without the long tests: each is seconds of compiling."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.long) for value in values]


def config_of(body, rows=1, *, num_warps=None, splits=2, buffers=None) -> Config:
    num_warps = num_warps or (2 if body == "dot_scaled" else 4)
    keys = 64 * num_warps if body == "dot_scaled" else 64
    return Config(body, keys, rows, num_warps, 1, buffers or (2 if body == "dot_scaled" else 1), splits)


def score(batch, config, *, layout=None):
    batch = batch if layout is None else batch.in_layout(layout)
    return np.asarray(pallas_score.index_logits(*batch.args, config=config, interpret=INTERPRET))


def check(out, batch):
    expected, magnitude = reference.index_logits(*batch.args, 1.0)
    assert np.array_equal(np.isneginf(out), np.isneginf(expected))
    assert (reference.relative_error(out, expected, magnitude) <= TOLERANCE).all()


def same(a, b):
    return np.array_equal(bits(a), bits(b))


@pytest.fixture(params=BODIES)
def body(request):
    return request.param


@pytest.mark.parametrize("name", some_long(["decode", "verify", "two_level", "heads64", "wide_scales"], ["verify"]))
def test_golden(name, body):
    case = golden(name)
    expected = case["logits_fp64"]
    outs = []
    for layout in LAYOUTS:
        operands = (case.queries, case["weights"].astype(np.float32), case.plane(layout), case.table)
        config = config_of(body, 6 if name == "verify" else 1)
        outs.append(np.asarray(pallas_score.index_logits(*operands, config=config, interpret=INTERPRET)))
        live = np.isfinite(expected)
        assert np.array_equal(np.isneginf(outs[-1]), np.isneginf(expected))
        error = np.linalg.norm(np.where(live, outs[-1] - np.where(live, expected, 0), 0), axis=1)
        assert (error <= TOLERANCE * np.linalg.norm(np.where(live, expected, 0), axis=1)).all()
    assert same(*outs)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_boundaries(body, layout):
    batch = random_batch(1, BOUNDARIES, columns=9, num_pages=80, layout=layout)
    check(score(batch, config_of(body)), batch)


@pytest.mark.parametrize("heads", some_long([16, 32, 48, 64, 128], [48]))
def test_heads(body, heads):
    batch = random_batch(2, [70, 71], starts=[0, 2], heads=heads, columns=3, num_pages=9)
    out = score(batch, config_of(body, 2))
    check(out, batch)
    assert same(out, score(batch, config_of(body, 2), layout="page8"))


@pytest.mark.parametrize("rows", some_long([1, 2, 3, 5, 6, 8], [3]))
def test_rows_share_keys(body, rows):
    """Any grouping of a sequence's rows gives the same bits, and so does a sequence a row."""
    batch = random_batch(3, 150 + np.arange(rows), starts=[0, rows], columns=4, num_pages=9)
    out = score(batch, config_of(body, rows))
    check(out, batch)
    assert same(out, score(batch, config_of(body, 1)))
    pages = np.repeat(np.asarray(batch.table.pages), rows, axis=0)
    table = type(batch.table).from_rows(pages, batch.table.row_ends)
    assert same(out, score(batch._replace(table=table), config_of(body)))


def test_ragged(body):
    """Empty sequences, rows before the first and past the last one, more rows than a group, a wrong hint."""
    starts = [1, 1, 4, 4, 13, 14]
    ends = [9, 70, 71, 3, *range(60, 69), 200, 5]
    batch = random_batch(4, ends, starts=starts, columns=4, num_pages=30)
    out = score(batch, config_of(body, 3))
    check(out, batch)
    assert np.isneginf(out[[0, 14]]).all()
    table = dataclasses.replace(batch.table, max_query_len=2)
    assert same(out, score(batch._replace(table=table), config_of(body, 2)))


@pytest.mark.parametrize("name", some_long(SPREADS, ["widest"]))
def test_spreads_of_scales(body, name):
    batch = random_batch(5, [130, 64], scales=SPREADS[name], columns=3, num_pages=9)
    out = score(batch, config_of(body))
    check(out, batch)
    assert same(out, score(batch, config_of(body, splits=1), layout="page8"))


def test_a_key_s_company_does_not_matter():
    """The decode body's exact form is taken key by key: a wide neighbour changes no bit."""
    batch = random_batch(10, [64], columns=1, num_pages=3, scales=(112, 132))
    out = score(batch, config_of("decode"))
    scale = np.array(batch.keys.scale)
    scale[5, 1] = 40
    other = score(
        batch._replace(keys=type(batch.keys)(batch.keys.payload, scale)).in_layout("page64"), config_of("decode")
    )
    assert same(np.delete(out, 5, axis=1), np.delete(other, 5, axis=1))
    assert not same(out[:, 5], other[:, 5])


@pytest.mark.long
def test_configurations(body):
    batch = random_batch(6, [300, 301, 299], starts=[0, 3], columns=5, num_pages=12, scales=(105, 145))
    out = score(batch, config_of(body, 3))
    for splits in (1, 3):
        assert same(out, score(batch, config_of(body, 2, splits=splits, buffers=1)))
    if body == "dot_scaled":
        # Triton's emulation for GPUs without FP4 units adds wide scales in an order of its own for each warp count.
        for num_warps in (4, 8) if INTERPRET else ():
            assert same(out, score(batch, config_of(body, 3, num_warps=num_warps)))


def test_other_tables(body):
    """A wider table and other rows beside it change nothing; pages past every row's end never matter."""
    batch = random_batch(7, [100, 65], columns=2, num_pages=12)
    out = score(batch, config_of(body))
    pages = np.asarray(batch.table.pages)
    wide = np.concatenate([pages, np.full((2, 5), 2**31 - 1, np.int32)], axis=1)
    table = type(batch.table).from_rows(wide, batch.table.row_ends)
    wider = score(batch._replace(table=table), config_of(body))
    assert same(out, wider[:, :128])
    assert np.isneginf(wider[:, 128:]).all()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_bad_values(body, layout):
    """Ids outside the plane below a row's end, row ends past the table, a NaN scale in one key."""
    batch = random_batch(8, [200, 10_000], columns=4, num_pages=9, layout=layout)
    good = score(batch, config_of(body))
    check(good, batch)
    pages = np.asarray(batch.table.pages).copy()
    pages[0, 1], pages[1, 0], pages[1, 3] = -1, 9, -(2**31)
    bad = score(batch._replace(table=type(batch.table).from_rows(pages, batch.table.row_ends)), config_of(body))
    gone = np.zeros(good.shape, bool)
    gone[0, 64:128] = gone[1, :64] = gone[1, 192:] = True
    assert np.isneginf(bad[gone]).all()
    assert same(bad[~gone], good[~gone])

    scale = np.array(batch.keys.scale)
    scale[7, 2] = 255  # key 7 is row 0's position 7
    broken = batch._replace(keys=type(batch.keys)(batch.keys.payload, scale)).in_layout(layout)
    out = score(broken, config_of(body))
    assert np.isnan(out[0, 7]) or (out[0, 7] == 0 and not INTERPRET)  # compiled, its broken dots count as 0
    rest = np.ones(out.shape, bool)
    rest[0, 7] = False
    assert same(out[rest], good[rest])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_candidates_have_the_whole_contexts_bits(body, layout):
    batch = random_batch(9, [500, 301, 8], columns=8, num_pages=40, layout=layout, scales=(105, 145))
    full = score(batch, config_of(body))
    rng, blocks = np.random.default_rng(0), 13  # no multiple of 8
    ids = np.stack([np.sort(rng.permutation(full.shape[1] // 8)[:blocks]) for _ in range(3)])
    ids[2, 0] = 0
    pages = np.clip(np.take_along_axis(np.asarray(batch.table.pages), ids // 8, axis=1), 0, 39)
    virtual = (pages * 8 + ids % 8).astype(np.int32)
    virtual[0, 3], virtual[1, 1], virtual[:, -2:] = -1, 40 * 8, -1
    ends = np.array([88, 81, 1], np.int32)
    table = types.SimpleNamespace(virtual_pages=virtual, row_ends=ends)
    for splits in (1, 3):
        config = config_of(body, splits=splits)
        operands = (batch.queries, batch.weights, batch.plane, table)
        out = np.asarray(pallas_score.candidate_logits(*operands, config=config, interpret=INTERPRET))
        live = (np.arange(8 * blocks) < ends[:, None]) & np.repeat((virtual >= 0) & (virtual < 320), 8, axis=1)
        position = (ids[..., None] * 8 + np.arange(8)).reshape(3, -1)
        seen = live & (position < np.asarray(batch.table.row_ends)[:, None])
        assert same(out[seen], np.take_along_axis(full, position, axis=1)[seen])
        assert np.isneginf(out[~live]).all()


@pytest.mark.parametrize(
    ("field", "changes", "device"),
    [
        ("body", {"body": "mxfp8"}, "gfx950"),
        ("keys", {"keys": 68}, "gfx950"),
        ("keys", {"keys": 512}, "gfx950"),
        ("rows", {"rows": 9}, "gfx950"),
        ("num_warps", {"num_warps": 32, "keys": 2048}, "gfx950"),
        ("num_warps", {"num_warps": 1, "keys": 64}, "gfx950"),
        ("num_warps", {"num_warps": 3}, "gfx950"),
        ("num_warps", {"body": "decode", "num_warps": 8, "keys": 64}, "gfx942"),
        ("num_stages", {"num_stages": 6, "num_warps": 4, "keys": 256}, "gfx942"),
        ("rows", {"rows": 8, "body": "decode", "num_warps": 4, "keys": 64, "heads": 64}, "gfx942"),
        ("buffers", {"buffers": 3}, "gfx950"),
        ("splits", {"splits": 0}, "gfx950"),
    ],
)
def test_impossible_configurations_are_refused(field, changes, device):
    heads = changes.pop("heads", 32)
    config = dataclasses.replace(config_of("dot_scaled"), **changes)
    with pytest.raises(ValueError, match=f"^{field}:"):
        check_config(config, heads=heads, device=device)


@pytest.mark.parametrize("device", ["gfx942", "gfx950", "cuda"])
@pytest.mark.parametrize("heads", range(16, 129, 16))
def test_default_configurations_are_possible(device, heads):
    for rows, sequences in ((1, 1), (6, 1), (64, 64), (384, 64), (4096, 1), (7, 3)):
        for width in (64, 65536, 1 << 20):
            facts = dict(rows=rows, sequences=sequences, width=width, layout="page8")
            check_config(default_config(device, heads=heads, **facts), heads=heads, device=device)
