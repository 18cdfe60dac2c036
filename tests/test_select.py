"""The two-level selection: golden ids, the rules of ties, zeros, NaN and padding, and the oracle on random data."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import CASES, LAYOUTS, golden, random_batch, rows_of
from hypothesis import given
from hypothesis import strategies as st

import k2i_jax as k
from k2i_jax import CandidateBlocks, PageTable, reference

INF, NAN = np.inf, np.nan


def table_of(ends, width):
    """A table for logits that were made up: page ids are 1, 2, ... in each row."""
    pages = np.broadcast_to(np.arange(1, width // 64 + 1), (len(ends), width // 64))
    return PageTable.from_rows(pages, np.array(ends))


def padded(logits, ends, rows):
    """With rows that see nothing, at least ``rows``: so that the tests share few compiled shapes."""
    rows = max(rows, len(ends))
    logits = np.pad(np.asarray(logits, np.float32), ((0, rows - len(ends)), (0, 0)), constant_values=1e9)
    return jnp.asarray(logits), np.append(ends, np.zeros(rows - len(ends), int)).astype(np.int32)


def topk(logits, ends, wanted, rows=4):
    """Positions of each row; checks shape, dtype, slots and count on the way."""
    logits, all_ends = padded(logits, ends, rows)
    rows = len(all_ends)
    selection = k.select_topk(logits, table_of(all_ends, logits.shape[1]), k=wanted)
    assert selection.positions.shape == selection.slots.shape == (rows, wanted)
    assert selection.positions.dtype == selection.slots.dtype == selection.count.dtype == jnp.int32
    positions = [rows_of(row) for row in selection.positions]
    assert [len(x) for x in positions] == selection.count.tolist()
    slots = [[64 + p for p in row] for row in positions]  # the page of position p is p // 64 + 1
    assert [rows_of(row) for row in selection.slots] == slots
    return positions[: len(ends)]


def blocks_of(logits, ends, topk_blocks, block_size=8, rows=6):
    logits, all_ends = padded(logits, ends, rows)
    rows = len(all_ends)
    blocks = k.select_candidate_blocks(logits, all_ends, topk_blocks=topk_blocks, block_size=block_size)
    assert blocks.ids.shape == (rows, min(topk_blocks, -(-logits.shape[1] // block_size)))
    ids = [rows_of(row) for row in blocks.ids]
    assert [len(x) for x in ids] == blocks.count.tolist()
    return ids[: len(ends)]


def nasty_logits(rng, rows, width, levels=12):
    """Few distinct values, so ties everywhere; both zeros, NaN and both infinities among them."""
    values = np.append(rng.standard_normal(levels), [0.0, -0.0, NAN, -INF, INF, 1e-45, -1e-45]).astype(np.float32)
    return rng.choice(values, (rows, width))


def test_golden_candidates(case):
    """SGLang's own logits give its own candidate blocks; its ids are unordered, so as sets."""
    blocks = blocks_of(case["logits_fp64"], case["lengths"], int(case["topk_blocks"]))
    for ours, theirs, page8 in zip(blocks, case["candidate_ids"], case["page8_ids"], strict=True):
        assert ours == sorted(ours)
        assert set(ours) == set(theirs[theirs >= 0].tolist()) == set(page8[page8 >= 0].tolist())


def test_golden_candidate_tables(case):
    found = k.CandidateBlocks.from_ids(case["candidate_ids"])
    table = k.candidate_table(found, case.table)
    assert np.array_equal(table.row_ends, case["page8_lens"])
    for ours, theirs, count in zip(table.virtual_pages, case["page8_tables"], found.count.tolist(), strict=True):
        assert len(rows_of(ours)) == count
        assert set(rows_of(ours)) == set(theirs[:count].tolist())


@pytest.mark.parametrize(("name", "layout"), [*((name, "page8") for name in CASES), ("two_level", "page64")])
def test_golden_two_levels(name, layout, implementation):
    """The whole chain: candidate blocks, then reindex's positions and slots, exactly."""
    case = golden(name)
    size, blocks = int(case["topk"]), int(case["topk_blocks"])
    plane, weights = case.plane(layout), case["weights"]
    logits = k.index_logits(case.queries, weights, plane, case.table, **implementation)
    found = k.select_candidate_blocks(logits, case.table.row_ends, topk_blocks=blocks)
    for ours, theirs in zip(found.ids, case["candidate_ids"], strict=True):
        assert set(rows_of(ours)) == set(theirs[theirs >= 0].tolist())
    selection = k.reindex(case.queries, weights, plane, case.table, found, k=size, **implementation)
    assert np.array_equal(selection.positions, case["topk_positions"])
    assert np.array_equal(selection.slots, case["topk_slots"])
    assert np.array_equal(selection.count, (case["topk_positions"] >= 0).sum(axis=1))


def test_mass_ties_at_the_threshold():
    """All winners, then the lowest positions among the equals; the same on every run."""
    logits = np.zeros((1, 8320), np.float32)
    logits[0, 83 * np.arange(100)] = 1
    expected = sorted({83 * i for i in range(100)} | set([j for j in range(8320) if j % 83][:412]))
    for _ in range(10):
        assert topk(logits, [8320], 512, rows=1) == [expected]


@pytest.mark.long
def test_a_narrow_band_of_values():
    """33 rows of 65536 values within 2^-8 of each other, of which a coarser key would make one mass of ties."""
    rng = np.random.default_rng(0)
    logits = (1 + rng.random((33, 65536)) * 2.0**-8).astype(np.float32)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :512]
    assert topk(logits, [65536] * 33, 512, rows=33) == np.sort(order, axis=1).tolist()


def test_more_wanted_than_there_are():
    logits = np.full((4, 64), 12345.0, np.float32)  # what lies past a row's end is anything
    logits[1] = NAN
    logits[0, :10] = logits[1, :10] = np.arange(10)
    logits[3, :16] = -INF
    logits[3, 3] = -5
    assert topk(logits, [10, 10, 0, 16], 512) == [list(range(10)), list(range(10)), [], [3]]
    assert topk(logits, [10, 10, -7, 16], 6) == [[4, 5, 6, 7, 8, 9]] * 2 + [[], [3]]
    assert topk(logits, [999, 0, 0, 0], 512) == [list(range(64)), [], [], []]


def test_keys_keep_all_of_float32():
    logits = np.zeros((2, 64), np.float32)
    logits[:, :4] = [1000, 1001, 1002, 1003]  # bfloat16 would make them 1000, 1000, 1000, 1004
    assert topk(logits, [4, 4], 1) == [[3], [3]]
    assert topk(logits, [4, 4], 2) == [[2, 3], [2, 3]]
    close = np.nextafter(np.float32(1), np.array([0, 2, 0], np.float32))
    logits[:, :3] = close
    assert topk(logits, [3, 3], 1) == [[1], [1]]


def test_zeros_are_equal_and_nan_is_nothing():
    """``lax.top_k`` would rank +0 above -0, and NaN before all."""
    logits = np.full((4, 64), -1, np.float32)
    logits[0, :8] = [-0.0, 0.0, NAN, -INF, INF, -NAN, 0.0, -0.0]
    logits[1, :4] = [0.0, -0.0, -0.0, 0.0]
    logits[2, :4] = [-0.0, 0.0, 1e-45, -1e-45]
    logits[3, :4] = [NAN, -INF, -3e38, -NAN]
    ends = [8, 4, 4, 4]
    assert topk(logits, ends, 1) == [[4], [0], [2], [2]]
    assert topk(logits, ends, 2) == [[0, 4], [0, 1], [0, 2], [2]]
    assert topk(logits, ends, 6) == [[0, 1, 4, 6, 7], [0, 1, 2, 3], [0, 1, 2, 3], [2]]
    jitted = jax.jit(lambda x: k.select_topk(x, table_of(ends, 64), k=2).positions)(logits)
    assert [rows_of(x) for x in jitted] == [[0, 4], [0, 1], [0, 2], [2]]


def test_the_newest_block_is_pinned():
    """The block of the row's last position, partial or full, whatever it scores; even against an inf elsewhere."""
    logits = np.tile(np.repeat(np.arange(8, 0, -1), 8).astype(np.float32), (5, 1))  # 8 blocks, falling
    logits[3:, 8:16] = INF
    logits[4, 16:] = NAN
    assert blocks_of(logits, [64, 57, 56, 64, 64], 3) == [[0, 1, 7], [0, 1, 7], [0, 1, 6], [0, 1, 7], [0, 1, 7]]
    assert blocks_of(logits, [64, 57, 56, 8, 1], 1) == [[7], [7], [6], [0], [0]]
    assert blocks_of(logits, [0, -9, 3, 9, 999], 3) == [[], [], [0], [0, 1], [0, 1, 7]]


def test_blocks_of_minus_inf_fill_the_count():
    """NaN counts as -inf; such blocks are chosen last, the lower id first, but they are chosen."""
    logits = np.full((2, 64), -INF, np.float32)
    logits[0, :8], logits[0, 40], logits[1, :] = NAN, 1.0, NAN
    logits[0, 41] = NAN
    assert blocks_of(logits, [60, 60], 3) == [[0, 5, 7], [0, 1, 7]]
    assert blocks_of(logits, [60, 60], 100) == [list(range(8))] * 2


@pytest.mark.parametrize(("width", "block_size"), [(61, 8), (64, 8), (7, 8), (50, 16)])
@given(seed=st.integers(0, 2**32 - 1))
def test_blocks_against_the_oracle(width, block_size, seed):
    rng = np.random.default_rng(seed)
    logits, ends = nasty_logits(rng, 6, width), rng.integers(-2, width + 9, 6)
    ours = blocks_of(logits, ends, 4, block_size)
    assert ours == reference.select_candidate_blocks(logits, ends, 4, block_size)


@given(seed=st.integers(0, 2**32 - 1), wanted=st.sampled_from([5, 64, 300]))
def test_topk_against_the_oracle(seed, wanted):
    rng = np.random.default_rng(seed)
    logits, ends = nasty_logits(rng, 6, 192), rng.integers(-2, 200, 6)
    logits[3:] = rng.standard_normal((3, 192))
    assert topk(logits, ends, wanted, rows=6) == reference.select_topk(logits, ends, wanted)


def test_foreign_ids():
    """Unordered, with repeats, any negative padding; past the row's end; and lacking the newest block."""
    ids = np.array([[3, 0, 3, -1, 7, -9], [2, 9, 10, 1, -1, 2], [-1, -1, -1, -1, -1, -1], [4, 4, 4, 4, 4, 4]])
    blocks = CandidateBlocks.from_ids(ids)
    assert [rows_of(x) for x in blocks.ids] == [[0, 3, 7], [1, 2, 9, 10], [], [4]]
    assert blocks.count.tolist() == [3, 4, 0, 1]
    table = PageTable.from_rows(np.array([[11, 12], [21, 22], [31, 32], [41, 42]]), np.array([61, 77, 99, 99]))
    candidates = k.candidate_table(blocks, table)
    assert candidates.row_ends.tolist() == [2 * 8 + 61 % 8, 2 * 8 + 77 % 8, 0, 8]
    assert [rows_of(x) for x in candidates.virtual_pages] == [[88, 91, 95], [169, 170, 177], [], [332]]
    assert candidates.width == 48


def masked_topk(batch, blocks, size, implementation):
    """Top-k of the whole logits with every other block masked out: what REINDEX must equal, as sets."""
    logits = k.index_logits(*batch.args, **implementation)
    allowed = [set(rows_of(x)) for x in blocks.ids]
    return reference.select_topk(logits, batch.table.live_ends(), size, allowed)


ENDS = [1020, 1025, 1088, 0, 3, 700]


@pytest.mark.parametrize(("size", "layout"), [(7, LAYOUTS[0]), (64, LAYOUTS[1])])
def test_reindex_is_the_masked_selection(layout, implementation, size):
    """Over the source layer's blocks, and over a foreign list that lacks the newest block and repeats others."""
    batch = random_batch(3, ENDS, starts=[0, 3, 6], layout=layout)
    other = random_batch(6, ENDS, starts=[0, 3, 6])  # another layer's queries and weights
    logits = k.index_logits(other.queries, other.weights, *batch.args[2:], **implementation)
    blocks = k.select_candidate_blocks(logits, batch.table.live_ends(), topk_blocks=16)
    foreign = CandidateBlocks.from_ids(np.random.default_rng(size).integers(-3, 87, (6, 16)))
    for chosen in (blocks, foreign):
        selection = k.reindex(*batch.args, chosen, k=size, **implementation)
        expected = masked_topk(batch, chosen, size, implementation)
        assert [rows_of(x) for x in selection.positions] == expected
        assert np.array_equal(selection.slots, batch.table.slots(selection.positions))
        assert selection.count.tolist() == [len(x) for x in expected]
    assert blocks.count.tolist() == [16, 16, 16, 0, 1, 16]


@given(seed=st.integers(0, 2**32 - 1), starts=st.lists(st.integers(0, 6), min_size=4, max_size=4).map(sorted))
def test_reindex_of_random_batches(seed, starts):
    rng = np.random.default_rng(seed)
    batch = random_batch(seed, rng.integers(-3, 330, 6), starts=starts, columns=5, num_pages=30)
    blocks = CandidateBlocks.from_ids(rng.integers(-2, 45, (6, 8)))
    selection = k.reindex(*batch.args, blocks, k=20, implementation="xla")
    assert [rows_of(x) for x in selection.positions] == masked_topk(batch, blocks, 20, {"implementation": "xla"})


def test_reindex_below_the_candidates_is_plain_topk(implementation):
    """With as many blocks as there are, every position is a candidate."""
    batch = random_batch(3, ENDS, starts=[0, 3, 6])
    plain = k.select_topk(k.index_logits(*batch.args, **implementation), batch.table)
    selection, blocks = k.source(*batch.args, **implementation)
    assert blocks.ids.shape == (6, 136)
    again = k.reindex(*batch.args, blocks, **implementation)
    for a, b, c in zip(*map(jax.tree.leaves, (plain, selection, again)), strict=True):
        assert np.array_equal(a, b)
        assert np.array_equal(a, c)
    assert plain.count.tolist() == [512, 512, 512, 0, 3, 512]


@pytest.mark.parametrize("rows_per_step", [1, 2, 3])
def test_source_is_its_parts(rows_per_step):
    """However many rows are held at a time, also where the last step is padded; rows in no sequence among them."""
    batch = random_batch(7, [300, 5, 64, 257, 0, 320, 9], starts=[1, 3, 3, 6], columns=5, num_pages=30)
    logits = k.index_logits(*batch.args, implementation="xla")
    expected = (
        k.select_topk(logits, batch.table, k=20),
        k.select_candidate_blocks(logits, batch.table.live_ends(), topk_blocks=6),
    )
    got = jax.jit(functools.partial(k.source, k=20, topk_blocks=6, rows_per_step=rows_per_step, implementation="xla"))(
        *batch.args
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert np.array_equal(a, b)
    assert got[0].count.tolist() == [0, 5, 20, 20, 0, 20, 0]


def test_source_of_the_golden_case():
    """The source layer selects over everything: the top-k of the exact logits."""
    case = golden("two_level")
    selection, blocks = k.source(case.queries, case["weights"], case.plane("page8"), case.table, k=64, topk_blocks=16)
    assert [rows_of(x) for x in selection.positions] == reference.select_topk(case["logits_fp64"], case["lengths"], 64)
    for ours, theirs in zip(blocks.ids, case["candidate_ids"], strict=True):
        assert set(rows_of(ours)) == set(theirs[theirs >= 0].tolist())


def test_a_start_far_below_the_rows_does_not_wrap():
    """The rows' part of such a table is that of the whole, however few rows are scored at a time."""
    batch = random_batch(1, [70] * 4, columns=2, num_pages=12, heads=16)
    table = PageTable.from_arrays(np.asarray(batch.table.pages)[:1], batch.table.row_ends, [-(2**31), 4])
    whole, few = (k.source(*batch.args[:3], table, k=3, rows_per_step=n)[0] for n in (64, 2))
    assert whole.count.tolist() == [3, 3, 3, 3]
    assert np.array_equal(few.positions, whole.positions)


@pytest.mark.parametrize("rows", [8, 9, 20])
def test_source_of_a_table_without_columns(rows):
    """More rows than are scored at a time included."""
    batch = random_batch(1, [0] * rows, columns=0, num_pages=2, heads=16)
    selection, blocks = k.source(*batch.args, k=3)
    assert selection.positions.tolist() == selection.slots.tolist() == [[-1] * 3] * rows
    assert blocks.ids.shape == (rows, 0)
    assert not np.asarray(blocks.count).any()
