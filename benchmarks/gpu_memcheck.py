"""A small compiled run over bad tables, for a memory checker:

    compute-sanitizer --tool memcheck --error-exitcode 9 python benchmarks/gpu_memcheck.py

Page ids far outside the pool, row ends past the table and below zero, rows of no sequence; both layouts.
"""

import numpy as np

import k2i_jax as k2i
from k2i_jax.parity import random_problem

LENGTHS = (0, 1, 65, 130, 513)
BAD_PAGES = (-1, -(2**31), 2**31 - 1, 10**6)


def main() -> None:
    for layout in ("page64", "page8"):
        queries, weights, plane, table = random_problem(3, 32, LENGTHS, k2i.PageLayout(layout))
        good = np.asarray(k2i.index_logits(queries, weights, plane, table, implementation="xla"))
        pages = np.array(table.pages)
        pages[1:, 1:5] = BAD_PAGES
        ends = np.array([-7, 1, 10**9, 130, 513], np.int32)
        starts = np.array([0, 1, 2, 3, 4, 4], np.int32)  # the last row belongs to no sequence
        bad = k2i.PageTable.from_arrays(pages, ends, starts)
        out = np.asarray(k2i.index_logits(queries, weights, plane, bad, implementation="pallas"))
        assert np.isneginf(out[[0, 4]]).all()
        assert np.isneginf(out[1:, 64:320]).all()
        np.testing.assert_allclose(out[2, :64], good[2, :64], rtol=1e-4, atol=1e-3)  # its first page is a good one
        blocks = k2i.CandidateBlocks.from_ids(np.tile(np.arange(0, 60, 3, dtype=np.int32), (5, 1)))
        chosen = k2i.reindex(queries, weights, plane, bad, blocks, k=64, implementation="pallas")
        positions = np.asarray(chosen.positions)
        assert ((positions < 64) | (positions >= 320)).all()
    print("bad tables score -inf and fault nothing")


if __name__ == "__main__":
    main()
