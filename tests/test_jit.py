"""Under transformations: no retrace for new values, shapes alone, vmap, scan with donation, 64-bit mode, memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import bits, golden, random_batch, random_fp4

import k2i_jax as k
from k2i_jax import CandidateBlocks, FP4Array, IndexKPlane, PagePool, PageTable, reference

ENDS = [300, 65, 64, 1]


def small(seed, ends=ENDS, layout="page8"):
    return random_batch(seed, ends, columns=5, num_pages=16).in_layout(layout)


def lookup(queries, weights, plane, table, scale=1.0):
    """Both levels: everything that a decode step computes."""
    selection, blocks = k.source(queries, weights, plane, table, k=20, topk_blocks=6, weight_scale=scale)
    return selection, blocks, k.reindex(queries, weights, plane, table, blocks, k=20, weight_scale=scale)


def equal(a, b):
    return all(np.array_equal(bits(x), bits(y)) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_new_values_do_not_retrace():
    step = jax.jit(lookup)
    results = [
        step(*small(seed, ends).args, np.float32(seed + 1))
        for seed, ends in enumerate((ENDS, [0, -3, 999, 7], [320, 320, 1, 0]))
    ]
    assert step._cache_size() == 1
    assert not equal(results[0], results[1])


def test_new_values_do_not_retrace_the_rest():
    """Writing, reading, copying, candidates of other layers, gradients."""
    batch = small(0)

    @jax.jit
    def step(plane, slots, keys, ids, table):
        plane = k.copy_pages(k.write_keys(plane, slots, keys), slots[:2] // 64, slots[2:] // 64)
        candidates = k.candidate_table(CandidateBlocks.from_ids(ids), table)
        gradient = jax.grad(lambda w: k.candidate_logits(batch.queries, w, plane, candidates)[0, 0])
        return k.read_keys(plane, slots), k.repack(plane, "page64"), gradient(jnp.asarray(batch.weights))

    for seed in range(3):
        rng = np.random.default_rng(seed)
        slots, ids = rng.integers(-9, 1100, 4), rng.integers(-2, 50, (4, 7))
        step(batch.plane, slots, random_fp4(rng, 4), ids, small(seed).table)
    assert step._cache_size() == 1


def test_shapes_without_values():
    """``jax.eval_shape`` over the whole surface, at a size that nothing here could hold."""
    shape = jax.ShapeDtypeStruct
    rows, heads, pages, columns = 4096, 64, 2**24, 2**14
    plane = IndexKPlane(shape((pages, 4096), jnp.uint8), shape((pages, 256), jnp.uint8), k.PageLayout.PAGE8)
    queries = FP4Array(shape((rows, heads, 64), jnp.uint8), shape((rows, heads, 4), jnp.uint8))
    weights = shape((rows, heads), jnp.bfloat16)
    ints = [shape(s, jnp.int32) for s in ((rows, columns), (rows,), (rows + 1,))]
    table = jax.eval_shape(PageTable.from_arrays, *ints)
    logits = jax.eval_shape(k.index_logits, queries, weights, plane, table)
    assert (logits.shape, logits.dtype) == ((rows, 64 * columns), jnp.float32)
    selection, blocks = jax.eval_shape(k.source, queries, weights, plane, table)
    assert [x.shape for x in jax.tree.leaves(selection)] == [(rows, 512), (rows, 512), (rows,)]
    assert [x.shape for x in jax.tree.leaves(blocks)] == [(rows, 2048), (rows,)]
    again = jax.eval_shape(k.reindex, queries, weights, plane, table, blocks)
    assert {x.dtype for x in jax.tree.leaves((selection, blocks, again))} == {jnp.dtype(jnp.int32)}
    keys = jax.eval_shape(k.quantize_fp4, shape((7, 128), jnp.float32))
    written = jax.eval_shape(k.write_keys, plane, shape((7,), jnp.int32), keys)
    assert written == jax.eval_shape(functools.partial(k.repack, layout="page8"), plane)


def test_vmap_is_a_loop(implementation):
    """Over batches of queries and tables, on one plane."""
    batches = [small(5, ends) for ends in (ENDS, [0, 7, 64, 320], [1, 2, 200, -1])]
    plane = batches[0].plane
    score = lambda q, w, t: k.index_logits(q, w, plane, t, **implementation)
    arguments = [(b.queries, b.weights, b.table) for b in batches]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *arguments)
    assert equal(jax.vmap(score)(*stacked), jnp.stack([score(*a) for a in arguments]))


def test_vmap_over_planes(implementation, layout):
    """Each entry of a batch of planes is read at its own place, and written logits go to theirs."""
    batches = [small(seed, ENDS).in_layout(layout) for seed in (5, 6, 7)]
    score = lambda q, w, p, t: k.index_logits(q, w, p, t, **implementation)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *[b.args for b in batches])
    assert equal(jax.vmap(score)(*stacked), jnp.stack([score(*b.args) for b in batches]))


def test_vmap_of_the_selection():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.standard_normal((3, 4, 320)), jnp.float32)
    table = small(0).table
    ends = jnp.asarray(rng.integers(0, 330, (3, 4)), jnp.int32)
    pick = lambda x, e: (
        k.select_topk(x, PageTable.from_rows(table.pages, e), k=20),
        k.select_candidate_blocks(x, e, topk_blocks=6),
    )
    together = jax.vmap(pick)(logits, ends)
    for i in range(3):
        assert equal(jax.tree.map(lambda x, i=i: x[i], together), pick(logits[i], ends[i]))


def test_decode_loop_in_a_scan():
    """Append a key, look it up, in a scan over donated planes; the same as step by step, and as the oracle."""
    rng = np.random.default_rng(1)
    steps, heads = 70, 32
    keys, queries = random_fp4(rng, steps, 2), random_fp4(rng, steps, 2, heads)
    weights = rng.standard_normal((steps, 2, heads)).astype(np.float32)

    def step(state, inputs):
        plane, pool = state
        key, query, weight = inputs
        pool, new = k.append(pool, jnp.array([1, 1]), max_new=1)
        plane = k.write_keys(plane, new.slots[:, 0], key)
        table = PageTable.from_rows(pool.pages, pool.lengths)
        logits = k.index_logits(query, weight, plane, table)
        return (plane, pool), (logits, k.select_topk(logits, table, k=20))

    def start():
        return IndexKPlane.zeros(6, "page8"), PagePool.create(6, 2, 2)

    run = jax.jit(functools.partial(jax.lax.scan, step), donate_argnums=0)
    state, inputs = start(), (keys, queries, weights)
    (plane, pool), outputs = run(state, inputs)
    assert state[0].payload.is_deleted()
    one = jax.jit(step, donate_argnums=0)
    state, expected = start(), []
    for i in range(steps):
        state, output = one(state, jax.tree.map(lambda x, i=i: x[i], inputs))
        expected.append(output)
    assert equal(outputs, jax.tree.map(lambda *x: jnp.stack(x), *expected))
    assert equal((plane, pool), state)
    last = jax.tree.map(lambda x: x[-1], queries)
    table = PageTable.from_rows(pool.pages, pool.lengths)
    ours, size = reference.index_logits(last, weights[-1], plane, table)
    assert (reference.relative_error(outputs[0][-1], ours, size) <= 1e-6).all()
    assert np.isfinite(ours).sum() == 2 * steps


def test_replay_with_changing_tables():
    """A, B, A, ... two hundred times, donated tables and not: the results follow the inputs each time."""
    batch = small(6)
    ends = np.array([[300, 65, 64, 1], [64, 64, 0, 7]], np.int32)
    pages = np.stack([batch.table.pages, np.roll(batch.table.pages, 1, axis=0)])

    def step(table):
        logits = k.index_logits(batch.queries, batch.weights, batch.plane, table)
        return logits, k.select_topk(logits, table, k=20)

    tables = [PageTable.from_rows(p, e) for p, e in zip(pages, ends, strict=True)]
    expected = [jax.tree.map(np.asarray, step(t)) for t in tables]
    assert not equal(*expected)
    plain = jax.jit(step)
    donated = jax.jit(lambda pages, ends: (step(PageTable.from_rows(pages, ends)), pages + 0), donate_argnums=0)
    for i in range(200):
        assert equal(plain(tables[i % 2]), expected[i % 2])
        found, _ = donated(jnp.array(pages[i % 2]), jnp.array(ends[i % 2]))
        assert equal(found, expected[i % 2])
    assert plain._cache_size() == donated._cache_size() == 1
    order = np.arange(8) % 2
    looped = jax.jit(lambda p, e: jax.lax.scan(lambda c, x: (c, step(PageTable.from_rows(*x))), 0, (p, e))[1])
    together = looped(pages[order], ends[order])
    for i in range(8):
        assert equal(jax.tree.map(lambda x, i=i: x[i], together), expected[i % 2])


class Wide:
    """Pieces of the core; the inputs that may be are 64 bits wide in 64-bit mode."""

    def __init__(self):
        case = golden("two_level")
        self.keys = k.quantize_fp4(jnp.asarray(case["k_input"], jnp.float32))
        self.slots = jnp.asarray(case["slots"])
        table = jnp.asarray(case["page_table"]), jnp.asarray(case["lengths"].astype(np.int64))
        self.table = PageTable.from_rows(*table)
        self.weights = jnp.asarray(case["weights"])
        self.args = case.queries, self.weights, case.plane("page8"), self.table

    def formats(self):
        return self.keys, self.keys.dequantize(), k.fake_quant_fp4(self.keys.dequantize())

    def planes(self):
        plane = k.write_keys(IndexKPlane.zeros(31, "page8"), self.slots, self.keys)
        copied = k.copy_pages(plane, jnp.array([1, 99]), jnp.array([2, 3]))
        return plane, k.repack(copied, "page64"), k.read_keys(plane, self.slots)

    def tables(self):
        table, full = self.table, PageTable.from_full_pages(jnp.array([[3]]), jnp.array([9]), ratio=2)
        slots = table.slots(jnp.array([[5, -1]] * 5))
        ends = k.prefill_row_ends(jnp.array([3, 9]), jnp.array([0, 2, 5]), 6, ratio=2, step=2)
        return table, slots, table.row_sequences(), table.live_ends(), full, ends, k.decode_row_ends(jnp.array([7]))

    def pool(self):
        pool, new = k.append(PagePool.create(9, 2, 3), jnp.array([70, 3]), max_new=70)
        pool = k.truncate(k.fork(pool, jnp.array(0), jnp.array(1)), jnp.array([65, 2]))
        return pool, new, pool.num_free

    def scoring(self):
        return k.index_logits(*self.args, weight_scale=0.5)

    def gradient(self):
        loss = lambda w, s: k.index_logits(self.args[0], w, *self.args[2:], weight_scale=s)[0, 0]
        return jax.grad(loss, argnums=(0, 1))(self.weights, jnp.float32(0.5))

    def selection(self):
        logits = jnp.asarray(golden("two_level")["logits_fp64"].astype(np.float32))
        blocks = k.select_candidate_blocks(logits, self.table.row_ends, topk_blocks=16)
        return blocks, k.candidate_table(blocks, self.table), k.select_topk(logits, self.table, k=64)

    def two_levels(self):
        selection, blocks = k.source(*self.args, k=64, topk_blocks=16, rows_per_step=2)
        return selection, blocks, k.reindex(*self.args, blocks, k=64)


PIECES = ["formats", "planes", "tables", "pool", "scoring", "gradient", "selection", "two_levels"]


@pytest.mark.parametrize("piece", PIECES)
def test_64_bit_mode(piece):
    """With ``jax_enable_x64``: the same bits, in the same 32-bit types or narrower ones."""
    expected = getattr(Wide(), piece)()
    with jax.enable_x64(True):
        wide = Wide()
        assert wide.slots.dtype == jnp.int64
        found = getattr(wide, piece)()
    assert [x.dtype for x in jax.tree.leaves(found)] == [x.dtype for x in jax.tree.leaves(expected)]
    assert {x.dtype.itemsize for x in jax.tree.leaves(found)} <= {1, 4}
    assert equal(found, expected)


def temporaries(function, columns, rows=4, pages=64):
    shape = jax.ShapeDtypeStruct
    plane = IndexKPlane(shape((pages, 4096), jnp.uint8), shape((pages, 256), jnp.uint8), k.PageLayout.PAGE8)
    queries = FP4Array(shape((rows, 32, 64), jnp.uint8), shape((rows, 32, 4), jnp.uint8))
    table = PageTable(*(shape(s, jnp.int32) for s in ((rows, columns), (rows,), (rows + 1,))))
    lowered = jax.jit(function).lower(queries, shape((rows, 32), jnp.float32), plane, table)
    return lowered.compile().memory_analysis().temp_size_in_bytes


def test_memory_of_scoring_does_not_grow_with_the_context():
    """Beyond inputs and outputs there is one tile, whatever the width (here 4096 and 262144 positions)."""
    short, long = (temporaries(k.index_logits, n) for n in (64, 4096))
    assert long <= short + 64 * 1024
    assert long < 4 * 2**20


def test_memory_of_a_pool_does_not_matter():
    """No copy of the plane is made to score it."""
    small_pool, large_pool = (temporaries(k.index_logits, 64, pages=n) for n in (64, 2**16))
    assert large_pool <= small_pool + 64 * 1024


def test_memory_of_source_does_not_grow_with_the_rows():
    few, many = (temporaries(functools.partial(k.source, rows_per_step=2), 256, rows=n) for n in (4, 64))
    assert many <= few + 64 * 2 * 2**10 * 4  # the outputs' own size


def test_memory_of_reindex_does_not_grow_with_the_context():
    """Its cost depends on the candidates: page ids are looked up, the context's logits never exist."""

    def reindex(queries, weights, plane, table):
        blocks = CandidateBlocks(jnp.zeros((4, 128), jnp.int32), jnp.zeros(4, jnp.int32))
        return k.reindex(queries, weights, plane, table, blocks, k=20)

    short, long = (temporaries(reindex, n) for n in (64, 4096))
    assert long <= short + 64 * 1024
