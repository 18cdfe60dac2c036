"""Logits: the golden cases, the float64 oracle, bits that depend on nothing but row and key, and gradients."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import bits, packed_plane, random_batch, random_fp4
from hypothesis import given
from hypothesis import strategies as st

import k2i_jax as k
from k2i_jax import CandidateBlocks, FP4Array, FP4Recipe, IndexKPlane, PageLayout, PageTable, reference

TOLERANCE = 1e-6  # of the norm of the sum of absolute terms: only the sum over heads rounds
BOUNDARIES = [-5, 0, 1, 7, 8, 9, 63, 64, 65, 511, 512, 513, 1023, 1024, 1025, 1088, 1089, 2000]
NARROW, WIDE = (122, 132), (90, 160)  # scale bytes; a dot over the wide ones rounds in float32


def check_against_reference(logits, batch, weight_scale=1.0):
    expected, magnitude = reference.index_logits(*batch.args, weight_scale)
    assert np.array_equal(np.isneginf(logits), np.isneginf(expected))
    assert (reference.relative_error(logits, expected, magnitude) <= TOLERANCE).all()


def moved(batch, seed, layout=PageLayout.PAGE64, fill=0xFF):
    """The same keys in other pages, among other poison."""
    pages = np.random.default_rng(seed).permutation(np.arange(1, batch.plane.num_pages))
    new_page = np.append(0, pages)
    plane = packed_plane(
        layout,
        batch.plane.num_pages,
        new_page[batch.slots // 64] * 64 + batch.slots % 64,
        batch.keys.payload,
        batch.keys.scale,
        fill,
    )
    old = np.asarray(batch.table.pages)
    inside = (old >= 0) & (old < len(new_page))
    table = PageTable.from_arrays(
        np.where(inside, new_page[np.where(inside, old, 0)], old), batch.table.row_ends, batch.table.query_start_loc
    )
    return batch._replace(plane=plane, table=table)


def rows(batch, index):
    """Some rows of a batch, each a sequence of its own."""
    index = np.asarray(index)
    pages = np.asarray(batch.table.pages)[np.asarray(batch.table.row_sequences())[index]]
    queries = FP4Array(batch.queries.payload[index], batch.queries.scale[index])
    table = PageTable.from_rows(pages, np.asarray(batch.table.row_ends)[index])
    return batch._replace(queries=queries, weights=batch.weights[index], table=table)


@pytest.mark.parametrize("layout", list(PageLayout), ids=str)
def test_golden_logits(case, layout, implementation):
    if layout == "fused" and implementation["implementation"] != "xla":
        pytest.skip("FUSED is scored by xla alone")
    plane, expected = case.plane(layout), case["logits_fp64"]
    logits = np.asarray(k.index_logits(case.queries, case["weights"], plane, case.table, **implementation))
    assert logits.dtype == np.float32
    assert np.array_equal(np.isneginf(logits), np.isneginf(expected))
    ours, magnitude = reference.index_logits(case.queries, case["weights"], plane, case.table)
    live = np.isfinite(expected)
    assert np.allclose(ours[live], expected[live], rtol=1e-12, atol=1e-12 * magnitude.max())  # the oracle itself
    assert (reference.relative_error(logits, expected, magnitude) <= TOLERANCE).all()


def test_golden_layouts_have_equal_bits(case, implementation):
    page64, page8 = (
        k.index_logits(case.queries, case["weights"], case.plane(x), case.table, **implementation)
        for x in cases.LAYOUTS
    )
    assert np.array_equal(bits(page64), bits(page8))


@pytest.mark.parametrize("scales", [NARROW, WIDE])
def test_boundary_lengths(layout, implementation, scales):
    batch = random_batch(1, BOUNDARIES, num_pages=140, scales=scales, layout=layout)
    logits = np.asarray(k.index_logits(*batch.args, **implementation))
    ends = np.clip(BOUNDARIES, 0, 1088)
    assert np.array_equal(np.isneginf(logits), np.arange(1088) >= ends[:, None])
    expected, magnitude = reference.index_logits(*batch.args)
    error = reference.relative_error(logits, expected, magnitude)
    assert (error <= TOLERANCE).all()


@pytest.mark.parametrize(("keys", "queries"), [((0, 50), (210, 255)), ((210, 255), (0, 50)), ((250, 255), (0, 3))])
def test_scales_meet_before_anything_overflows(layout, implementation, keys, queries):
    """Huge keys and tiny queries, and the reverse: their product is an ordinary number."""
    batch = random_batch(7, [1088, 65, 1], scales=keys, query_scales=queries, layout=layout)
    check_against_reference(k.index_logits(*batch.args, **implementation), batch)


def test_an_infinite_key_meets_a_tiny_query(layout, implementation):
    batch = random_batch(8, [64], heads=16, layout=layout)
    keys = np.full((64, 128), 1.0, np.float32)
    keys[5, 40] = np.inf  # scale byte 254 there, code 7
    queries = np.full((1, 16, 128), 1e-4, np.float32)
    plane = k.write_keys(batch.plane, batch.slots, k.quantize_fp4(keys, FP4Recipe.DEEPSEEK))
    queries = k.quantize_fp4(queries, FP4Recipe.DEEPSEEK)
    batch = batch._replace(queries=queries, plane=plane, weights=np.ones((1, 16), np.float32))
    logits = np.asarray(k.index_logits(*batch.args, **implementation))
    check_against_reference(logits, batch)
    assert 1e30 < logits[0, 5] < np.inf


@pytest.mark.parametrize("heads", [16, 48, 64, 128])
def test_heads_and_weight_dtypes(heads, implementation):
    batch = random_batch(heads, [130, 65, 1], heads=heads, columns=3, layout=PageLayout.PAGE8)
    check_against_reference(k.index_logits(*batch.args, **implementation), batch)
    batch = batch._replace(weights=jnp.asarray(batch.weights, jnp.bfloat16))
    logits = k.index_logits(*batch.args, weight_scale=-0.3, **implementation)
    check_against_reference(logits, batch, np.float32(-0.3))


def test_weight_scale_multiplies_in_float32(implementation):
    """As if the product had been the weight; a traced scale gives the same bits as a constant."""
    batch = random_batch(2, [130, 65, 1], columns=3)
    queries, weights, plane, table = batch.args
    expected = bits(k.index_logits(queries, weights * np.float32(0.37), plane, table, **implementation))
    for scale in (0.37, np.float32(0.37), jnp.float32(0.37)):
        scaled = k.index_logits(*batch.args, weight_scale=scale, **implementation)
        assert np.array_equal(bits(scaled), expected)
    assert not np.array_equal(bits(k.index_logits(*batch.args, **implementation)), expected)


@pytest.mark.parametrize("scales", [NARROW, WIDE])
def test_bits_depend_on_row_and_key_alone(implementation, scales):
    ends = [1020, 1025, 1088, 0, 3, 700]
    batch = random_batch(3, ends, starts=[0, 3, 6], scales=scales)
    score = lambda b: bits(k.index_logits(*b.args, **implementation))
    base = score(batch)
    assert np.array_equal(score(batch), base)  # a second run
    assert np.array_equal(score(batch.in_layout("page8")), base)
    assert np.array_equal(bits(jax.jit(lambda *a: k.index_logits(*a, **implementation))(*batch.args)), base)
    if implementation["implementation"] == "xla":
        assert np.array_equal(score(batch.in_layout("fused")), base)
    for layout, fill in ((PageLayout.PAGE64, 0), (PageLayout.PAGE8, 0x7F)):
        assert np.array_equal(score(moved(batch, fill, layout, fill)), base)
    assert np.array_equal(score(rows(batch, np.arange(6))), base)  # ungrouped
    assert np.array_equal(score(rows(batch, [5, 1])), base[[5, 1]])
    assert np.array_equal(score(rows(batch, [2])), base[[2]])

    table = batch.table
    padding = np.random.default_rng(0).choice([-1, 0, 5, 2**31 - 1], (2, 16)).astype(np.int32)
    wide = PageTable.from_arrays(np.hstack([table.pages, padding]), table.row_ends, table.query_start_loc)
    wide_bits = score(batch._replace(table=wide))
    assert np.array_equal(wide_bits[:, :1024], base[:, :1024])  # row 2 sees more than 1088 positions now
    assert np.array_equal(wide_bits[[0, 1, 3, 4, 5], :1088], base[[0, 1, 3, 4, 5]])
    narrow = PageTable.from_arrays(table.pages[:, :3], table.row_ends, table.query_start_loc)
    shared = np.arange(192)
    assert np.array_equal(score(batch._replace(table=narrow))[:, shared], base[:, shared])


@given(seed=st.integers(0, 2**32 - 1), starts=st.lists(st.integers(0, 6), min_size=4, max_size=4).map(sorted))
def test_bits_of_random_batches(seed, starts):
    """Ragged and empty sequences, rows in none, moved pages, both layouts, other poison, other rows alongside."""
    rng = np.random.default_rng(seed)
    ends = rng.choice([rng.integers(-3, 330), rng.integers(1, 9), 64, 128, 320, 400], 6)
    scales = WIDE if seed % 2 else NARROW
    batch = random_batch(seed, ends, starts=starts, columns=5, num_pages=30, scales=scales)
    base = k.index_logits(*batch.args)
    check_against_reference(base, batch)
    assert not np.isnan(base).any()
    other = moved(batch, seed + 1, PageLayout.PAGE8, fill=int(rng.integers(256)))
    assert np.array_equal(bits(k.index_logits(*other.args)), bits(base))
    row = int(rng.integers(6))  # every other row gets other queries, weights and a row end within its sequence
    strangers = np.arange(6) != row
    foreign = random_fp4(rng, 6, 32)
    mixed = FP4Array(
        *(
            np.where(strangers[:, None, None], f, q)
            for f, q in zip((foreign.payload, foreign.scale), (batch.queries.payload, batch.queries.scale), strict=True)
        )
    )
    weights = np.where(strangers[:, None], np.float32(np.nan), batch.weights)
    row_ends = np.where(strangers, rng.integers(-9, 999, 6), np.asarray(batch.table.row_ends))
    table = PageTable.from_arrays(batch.table.pages, row_ends, batch.table.query_start_loc)
    assert np.array_equal(bits(k.index_logits(mixed, weights, batch.plane, table))[row], bits(base)[row])


@pytest.mark.parametrize(("width", "layout"), [(5, "page8"), (16, "page64"), (130, "page8")])
def test_candidates_have_the_bits_of_the_full_logits(layout, implementation, width):
    batch = random_batch(4, [1020, 1025, 1088, 0, 3, 700], starts=[0, 3, 6], scales=WIDE, layout=PageLayout(layout))
    full = np.asarray(k.index_logits(*batch.args, **implementation))
    rng = np.random.default_rng(width)
    ids = np.array([rng.permutation(136)[:width] for _ in range(6)])  # 136 blocks, some past the rows' ends
    candidates = k.candidate_table(CandidateBlocks.from_ids(ids), batch.table)
    logits = k.candidate_logits(*batch.args[:3], candidates, **implementation)
    assert logits.shape == (6, 8 * width)
    for row, end in enumerate(np.clip(batch.table.row_ends, 0, 1088).tolist()):
        positions = (np.sort(ids[row])[:, None] * 8 + np.arange(8)).ravel()
        expected = np.where(positions < end, full[row, positions], -np.inf).astype(np.float32)
        assert np.array_equal(bits(logits[row]), bits(expected))


def cotangents(logits, rng):
    """Random ones below the rows' ends; NaN where the logits are -inf, which must not matter."""
    return np.where(np.isneginf(logits), np.nan, rng.standard_normal(logits.shape)).astype(np.float32)


@pytest.mark.parametrize(("layout", "dtype"), [("page64", jnp.float32), ("page8", jnp.bfloat16)])
def test_gradient(layout, dtype, implementation):
    """Against float64: the weights' gradient of row r is ``sum_j g[r, j] relu(q . k)``."""
    batch = random_batch(5, [1088, 1030, 5, 0], layout=PageLayout(layout))
    queries, weights, plane, table = batch.args
    weights = jnp.asarray(weights, dtype)

    def function(weights, scale):
        return k.index_logits(queries, weights, plane, table, weight_scale=scale, **implementation)

    logits, pullback = jax.vjp(function, weights, jnp.float32(0.7))
    gradient = cotangents(logits, np.random.default_rng(5))
    by_weights, by_scale = pullback(gradient)
    assert by_weights.dtype == dtype
    by_weights, weights = np.asarray(by_weights, np.float64), np.asarray(weights, np.float64)
    expected, size = np.zeros(weights.shape), np.zeros(weights.shape)
    q = reference.dequantize(queries.payload, queries.scale)
    for row in range(4):
        for j, slot in enumerate(reference.row_slots(table, row)):
            dots = np.maximum(q[row] @ reference.read_key(plane, slot), 0)
            expected[row] += gradient[row, j] * dots
            size[row] += np.abs(gradient[row, j]) * dots
    rounding = 2.0**-8 * np.abs(expected) if dtype == jnp.bfloat16 else 0
    assert (np.abs(by_weights - 0.7 * expected) <= 1e-5 * size + rounding).all()
    assert abs(by_scale - (weights * expected).sum()) <= 1e-5 * (np.abs(weights) * size).sum()
    assert not by_weights[3].any()


def test_candidate_gradient(implementation):
    """With every block a candidate it is the full scoring's, up to the order of the sum."""
    batch = random_batch(5, [1088, 1030, 5, 0], columns=17)
    ids = np.broadcast_to(np.arange(136), (4, 136))
    candidates = k.candidate_table(CandidateBlocks.from_ids(ids), batch.table)
    queries, weights, plane, table = batch.args
    full = lambda w: k.index_logits(queries, w, plane, table, **implementation)
    part = lambda w: k.candidate_logits(queries, w, plane, candidates, **implementation)
    gradient = cotangents(full(weights), np.random.default_rng(6))
    by_full, by_part = (jax.vjp(f, jnp.asarray(weights))[1](gradient)[0] for f in (full, part))
    assert np.allclose(by_full, by_part, rtol=1e-4, atol=1e-4 * np.abs(by_full).max())
    assert np.abs(by_part[:2]).min() > 0


def test_a_nan_column_outside_the_loss_has_no_gradient(implementation):
    batch = random_batch(5, [64], columns=1)
    queries, weights, plane, table = batch.args
    scale = np.array(batch.keys.scale)
    scale[5] = 255
    broken = k.write_keys(plane, batch.slots, FP4Array(batch.keys.payload, scale))
    others = np.arange(64) != 5

    def loss(weights, plane):
        logits = k.index_logits(queries, weights, plane, table, **implementation)
        return jnp.where(others, logits, 0.0).sum()

    gradients = [np.asarray(jax.grad(loss)(jnp.asarray(weights), x)) for x in (broken, plane)]
    assert np.isfinite(gradients[0]).all()
    assert np.array_equal(bits(gradients[0]), bits(gradients[1]))


def test_a_selection_inside_a_loss_has_none():
    batch = random_batch(5, [200, 64], columns=4)
    queries, weights, plane, table = batch.args

    def loss(weights, **options):
        logits = k.index_logits(queries, weights, plane, table)
        chosen = k.select_topk(logits, table, k=4, **options).positions
        return jnp.take_along_axis(logits, chosen, axis=1).sum()

    plain = jax.grad(loss)(jnp.asarray(weights))
    kernel = jax.grad(functools.partial(loss, implementation="pallas", interpret=True))(jnp.asarray(weights))
    assert np.abs(plain).max(axis=1).min() > 0
    assert np.array_equal(bits(kernel), bits(plain))


def test_nothing_else_has_a_gradient():
    batch = random_batch(5, [1088, 1030, 5, 0], columns=17)
    total = lambda *a: jnp.sum(k.index_logits(*a)[0])
    with pytest.raises(TypeError, match="uint8"):
        jax.grad(total)(*batch.args)
    by_all = jax.grad(total, argnums=(0, 2, 3), allow_int=True)(*jax.tree.map(jnp.asarray, batch.args))
    assert all(x.dtype == jax.dtypes.float0 for x in jax.tree.leaves(by_all))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda w: k.index_logits(batch.queries, w, *batch.args[2:]), (batch.weights,), (batch.weights,))


@pytest.mark.long
def test_pages_past_4_gib(layout):
    """The same keys in page 3 and in a page whose byte offset passes 2^32: the same bits."""
    pages, far = 2**20 + 3, 2**20 + 1
    keys = random_fp4(np.random.default_rng(8), 64)
    plane = IndexKPlane.zeros(pages, layout)
    for page in (3, far):
        plane = k.write_keys(plane, page * 64 + np.arange(64), keys, donate=True)
    assert np.array_equal(k.read_keys(plane, far * 64 + np.arange(64)).payload, keys.payload)
    queries = random_fp4(np.random.default_rng(9), 1, 32)
    queries = jax.tree.map(lambda x: np.repeat(x, 2, axis=0), queries)
    table = PageTable.from_rows(np.array([[3, far], [far, 3]]), np.array([100, 100]))
    logits = bits(k.index_logits(queries, np.ones((2, 32), np.float32), plane, table))
    assert np.array_equal(logits[0], logits[1])
    assert np.array_equal(logits[0, 64:100], logits[0, :36])
    assert len(np.unique(logits[0, :64])) > 32
