"""The page pool against a model that knows nothing of pages: each sequence is a list of what was appended to it.

The memory is the one a caller would keep: a key per slot, pages copied when ``append`` says so. Whatever is done to
one sequence, every other one must still read back its own list.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import k2i_jax as k
from k2i_jax import PagePool, PageTable

PAGES, SEQUENCES, WIDTH, MAX_NEW = 8, 4, 3, 70  # seven usable pages for four sequences of up to three


class Model:
    """Lists of keys and the caller's memory; every step compares the pool with them."""

    def __init__(self, pages=PAGES):
        self.pool = PagePool.create(pages, SEQUENCES, WIDTH)
        self.memory = np.zeros(pages * 64, np.int64)
        self.contents = [[] for _ in range(SEQUENCES)]
        self.keys = 0
        self.check()

    def check(self):
        references, pages, lengths = (np.asarray(x) for x in (self.pool.references, self.pool.pages, self.pool.lengths))
        assert lengths.tolist() == [len(x) for x in self.contents]
        held = np.zeros(len(references), int)
        held[0] = 1  # reserved
        for row, keys in zip(pages, self.contents, strict=True):
            used = -(-len(keys) // 64)
            assert (row[used:] == 0).all()
            assert (row[:used] > 0).all()
            held[row[:used]] += 1
            positions = np.arange(len(keys))
            assert self.memory[row[positions // 64] * 64 + positions % 64].tolist() == keys
        assert references.tolist() == held.tolist()
        assert self.pool.num_free == (held == 0).sum()

    def append(self, counts):
        before, lengths = self.pool, [len(x) for x in self.contents]
        self.pool, new = k.append(before, np.array(counts), max_new=MAX_NEW)
        ok, slots, source, target = (np.asarray(x) for x in (new.ok, new.slots, new.source, new.target))
        for s in range(SEQUENCES):
            if source[s] >= 0:
                self.memory[target[s] * 64 + np.arange(64)] = self.memory[source[s] * 64 + np.arange(64)]
        for s, count in enumerate(np.clip(counts, 0, MAX_NEW).tolist()):
            assert (source[s] >= 0) == (target[s] >= 0)
            if not ok[s]:
                assert (slots[s] == -1).all()
                assert source[s] == -1
                assert (self.pool.pages[s] == before.pages[s]).all()
                continue
            assert (slots[s, count:] == -1).all()
            assert (slots[s, :count] >= 64).all()  # page 0 is nobody's
            keys = list(range(self.keys, self.keys + count))
            self.keys += count
            self.memory[slots[s, :count]] = keys
            self.contents[s] += keys
        # What must fit and what cannot, without saying how a full pool chooses among the others.
        shared = np.asarray(before.references)[np.asarray(before.pages)] > 1
        demand = []
        for old, count, pages in zip(lengths, np.clip(counts, 0, MAX_NEW).tolist(), shared, strict=True):
            copies = count > 0 and old % 64 > 0 and pages[old // 64]
            demand.append(-(-(old + count) // 64) - -(-old // 64) + copies)
        fits = np.array(lengths) + np.clip(counts, 0, MAX_NEW) <= 64 * WIDTH
        free = int(before.num_free)
        assert not ok[~fits].any()
        assert not ok[np.array(demand) > free].any()
        if np.array(demand)[fits].sum() <= free:
            assert ok[fits].all()
        self.check()
        return ok

    def truncate(self, lengths):
        self.pool = k.truncate(self.pool, np.array(lengths))
        self.contents = [x[: max(n, 0)] for x, n in zip(self.contents, lengths, strict=True)]
        self.check()

    def release(self, ended):
        self.pool = k.release(self.pool, np.array(ended))
        self.contents = [[] if gone else x for x, gone in zip(self.contents, ended, strict=True)]
        self.check()

    def fork(self, parent, child, length=None):
        self.pool = k.fork(self.pool, parent, child, length)
        if 0 <= parent < SEQUENCES and 0 <= child < SEQUENCES and parent != child:
            self.contents[child] = self.contents[parent][: None if length is None else max(length, 0)]
        self.check()


def per_sequence(values):
    return st.lists(values, min_size=SEQUENCES, max_size=SEQUENCES)


COUNTS = st.sampled_from([0, 0, 1, 6, 63, 64, 65, 70, 99, -3])
SEQUENCE = st.integers(-1, SEQUENCES)  # one past each end
STEPS = st.one_of(
    st.tuples(st.just("append"), per_sequence(COUNTS)),
    st.tuples(st.just("append"), per_sequence(COUNTS)),
    st.tuples(st.just("truncate"), per_sequence(st.sampled_from([0, 1, 63, 64, 65, 127, 128, 200, 999, -1]))),
    st.tuples(st.just("release"), per_sequence(st.booleans())),
    st.tuples(
        st.just("fork"),
        st.integers(-1, SEQUENCES),
        st.integers(-1, SEQUENCES),
        st.sampled_from([0, 5, 64, 70, 500, -2]),
    ),
    st.tuples(st.just("fork"), st.integers(0, SEQUENCES - 1), st.integers(0, SEQUENCES - 1)),
)


@given(steps=st.lists(STEPS, min_size=5, max_size=25))
def test_any_sequence_of_steps(steps):
    model = Model()
    for name, *arguments in steps:
        getattr(model, name)(*arguments)


def test_a_fork_copies_the_page_that_it_appends_into():
    model = Model()
    model.append([70, 0, 0, 0])
    model.fork(0, 1)
    shared = np.asarray(model.pool.pages)
    assert np.array_equal(shared[0], shared[1])
    assert model.pool.num_free == 5  # nothing was copied yet
    model.append([0, 1, 0, 0])
    pages = np.asarray(model.pool.pages)
    assert pages[0, 0] == pages[1, 0]  # the full page stays shared
    assert pages[0, 1] != pages[1, 1]
    model.append([1, 0, 0, 0])  # nobody shares its last page now: no copy
    assert np.array_equal(model.pool.pages, pages)


def test_rejected_drafts_free_their_pages():
    model = Model()
    model.append([60, 0, 0, 0])
    model.append([6, 0, 0, 0])
    assert model.pool.num_free == 5
    model.truncate([61, 999, 999, 999])
    assert model.pool.num_free == 6


def test_a_full_pool_changes_nothing():
    model = Model(pages=3)
    assert model.append([64, 64, 0, 0]).all()
    assert model.append([1, 0, 0, 0]).tolist() == [False, True, True, True]
    model.release([False, True, False, False])
    assert model.append([1, 0, 0, 0]).all()


def test_a_full_table_changes_nothing():
    model = Model()
    for _ in range(2):
        assert model.append([70, 0, 0, 0]).all()
    assert model.append([53, 0, 0, 0]).tolist() == [False, True, True, True]  # 193 of 192
    assert model.append([52, 1, 0, 0]).all()


def test_one_that_does_not_fit_does_not_keep_the_next_from_fitting():
    """``ok`` is False where the pool is full: one page is left, and the second sequence needs no more."""
    model = Model(pages=3)
    assert model.append([64, 0, 0, 0]).all()
    assert model.append([70, 1, 0, 0]).tolist() == [False, True, True, True]


def test_create():
    pool = PagePool.create(5, 2, 3)
    assert (pool.references.tolist(), pool.pages.shape, pool.lengths.tolist()) == ([1, 0, 0, 0, 0], (2, 3), [0, 0])
    assert pool.num_free == 4
    for sizes, match in (
        ((1, 1, 1), "^num_pages: expected an integer of at least 2, got 1"),
        ((2, 0, 1), "^sequences: expected an integer of at least 1, got 0"),
        ((2, 1, 0), "^pages_per_sequence: expected an integer of at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=match):
            PagePool.create(*sizes)


def test_static_errors():
    pool = PagePool.create(4, 3, 2)
    with pytest.raises(ValueError, match=r"counts: expected shape \[3\], got \[2\]"):
        k.append(pool, np.zeros(2, int), max_new=4)
    with pytest.raises(TypeError, match="counts: expected an integer array"):
        k.append(pool, np.zeros(3), max_new=4)
    with pytest.raises(ValueError, match=r"lengths: expected shape \[3\], got \[4\]"):
        k.truncate(pool, np.zeros(4, int))
    with pytest.raises(TypeError, match="max_new: expected an integer"):
        k.append(pool, np.zeros(3, int), max_new=1.0)
    with pytest.raises(ValueError, match="max_new: expected an integer of at least 0, got -1"):
        k.append(pool, np.zeros(3, int), max_new=-1)
    for ids in ([1], [0, 1, 2], 2):  # would be taken for marks
        with pytest.raises(TypeError, match="ended: expected bool"):
            k.release(pool, np.array(ids))
    with pytest.raises(ValueError, match=r"ended: expected shape \[3\], got \[1\]"):
        k.release(pool, np.array([True]))


def test_wide_integers_and_lists():
    """Values past int32 saturate; without that 2^32 + 1 would be a 1."""
    pool, _ = k.append(PagePool.create(9, 3, 2), [5, 6, 2**32 + 1], max_new=7)
    assert pool.lengths.tolist() == [5, 6, 7]
    assert k.truncate(pool, [2**32, 1, 2**40]).lengths.tolist() == [5, 1, 7]
    assert k.fork(pool, 0, np.array(2**32 + 1)).lengths.tolist() == [5, 6, 7]
    assert k.release(pool, [True, False, True]).lengths.tolist() == [0, 6, 0]


def test_decode_loop_in_a_scan():
    """Eighty decode steps under jit: append, write, score tables; then the same, step by step and eagerly."""
    counts = np.random.default_rng(0).integers(0, 4, (80, SEQUENCES))

    def step(pool, counts):
        pool, new = k.append(pool, counts, max_new=4)
        return pool, (new.slots, new.ok, PageTable.from_rows(pool.pages, pool.lengths).live_ends())

    empty = PagePool.create(30, SEQUENCES, WIDTH)
    pool, (slots, ok, ends) = jax.jit(lambda p, c: jax.lax.scan(step, p, c))(empty, counts)
    eager, outputs = empty, []
    for row in counts:
        eager, output = step(eager, row)
        outputs.append(output)
    expected = (eager, *map(jnp.stack, zip(*outputs, strict=True)))
    for got, want in zip(jax.tree.leaves((pool, slots, ok, ends)), jax.tree.leaves(expected), strict=True):
        assert np.array_equal(got, want)
    lengths = np.minimum(np.cumsum(counts, axis=0), 192)
    assert np.array_equal(ends, lengths)
    live = np.asarray(slots)[np.asarray(slots) >= 0]
    assert len(live) == len(set(live.tolist())) == lengths[-1].sum()
