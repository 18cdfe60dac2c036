"""The counting steps that a GPU takes in selection, run here: to the same integers as the CPU's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k2i_jax import _radix


@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [
        (1, 1, 4),
        (3, 31, 5),
        (3, 32, 40),
        (5, 33, 512),
        (4, 1024, 20),
        (2, 1025, 300),
        (2, 16385, 512),
        (1, 140000, 600),
        (0, 64, 5),
    ],
)
def test_blocks_count_what_scans_count(rows, n, k):
    rng = np.random.default_rng(n)
    for share in (0, 0.01, 0.5, 1):
        marks = jnp.asarray(rng.random((rows, n)) < share, jnp.int32)
        sums = _radix._block_sums(marks)
        assert sums.dtype == jnp.int32
        assert np.array_equal(sums, np.cumsum(marks, axis=1))
        expected = np.full((rows, k), -1)
        for row, chosen in enumerate(np.asarray(marks)):
            columns = np.flatnonzero(chosen)[:k]
            expected[row, : len(columns)] = columns
        assert np.array_equal(_radix.columns_of(marks > 0, k), expected)
        for find in (_radix._find_in_blocks, _radix._find_in_rows):
            found = np.asarray(find(k, marks))
            assert np.array_equal(np.where(found < n, found, -1), expected)


@pytest.mark.parametrize("platform", ["cuda", "rocm", "cpu"])
def test_selection_lowers_for_every_platform(platform):
    top = jax.jit(lambda keys: _radix.columns_of(_radix.top(keys, jnp.full(2, 9, jnp.int32)), 9))
    assert top.trace(jnp.zeros((2, 300), jnp.uint32)).lower(lowering_platforms=(platform,)).as_text()
