"""Page tables, row ends and their checks, against loops over Python integers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import golden, random_batch

import k2i_jax as k
from k2i_jax import IndexKPlane, PageTable, page_table

INT32_MAX = 2**31 - 1
ROW_SEQUENCES = jax.jit(PageTable.row_sequences)


def sequences_of(starts, sequences, rows):
    """Sequence of each row by its definition."""
    return [next((s for s in range(sequences) if starts[s] <= r < starts[s + 1]), -1) for r in range(rows)]


def test_from_rows():
    table = PageTable.from_rows(np.array([[1, 2], [3, 4], [5, 6]]), np.array([10, 70, 0]))
    assert (table.width, table.max_query_len) == (128, 1)
    assert np.array_equal(table.query_start_loc, [0, 1, 2, 3])
    assert np.array_equal(table.row_sequences(), [0, 1, 2])
    assert all(x.dtype == jnp.int32 for x in (table.pages, table.row_ends, table.query_start_loc))


def test_from_verify():
    """As SGLang's verify case has its rows: the golden row_to_seq."""
    case = golden("verify")
    table = PageTable.from_verify(case["page_table"], case["lengths"], 6)
    assert np.array_equal(table.row_sequences(), case["row_to_seq"])
    assert table.max_query_len == 6
    for rows in (5, 0, -6, 12):
        wrong = f"2 sequences x {rows} rows .* 12 row_ends" if rows > 0 else f"expected an integer .*1, got {rows}"
        with pytest.raises(ValueError, match=f"rows_per_sequence: {wrong}"):
            PageTable.from_verify(case["page_table"], case["lengths"], rows)


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_from_full_pages(ratio):
    """Index page ``full * B + i`` with B = 256 / ratio / 64; what is negative or too large stays no page at all."""
    per_full = 256 // ratio // 64
    full = np.array([[3, 0, -1], [-(2**31), INT32_MAX, 7]])
    table = PageTable.from_full_pages(full, np.array([5, 9]), ratio=ratio)
    pages = np.asarray(table.pages)
    assert pages.shape == (2, 3 * per_full)
    for row in range(2):
        for column, page in enumerate(full[row].tolist()):
            block = pages[row, column * per_full : (column + 1) * per_full].tolist()
            if page < 0:
                assert block == [-1] * per_full
            elif page * per_full + per_full - 1 <= INT32_MAX - 1:
                assert block == [page * per_full + i for i in range(per_full)]
            else:
                assert all(x == -1 or x == INT32_MAX for x in block)


def test_from_full_pages_with_ragged_rows():
    table = PageTable.from_full_pages(
        np.array([[1], [2]]), np.array([5, 9, 4]), ratio=2, query_start_loc=np.array([0, 1, 3])
    )
    assert np.array_equal(table.pages, [[2, 3], [4, 5]])
    assert np.array_equal(table.row_sequences(), [0, 1, 1])
    for ratio in (0, 3, 8, 256):
        with pytest.raises(ValueError, match=f"ratio: expected (1, 2 or 4|an integer of at least 1).* got {ratio}$"):
            PageTable.from_full_pages(np.array([[1]]), np.array([5]), ratio=ratio)
    with pytest.raises(ValueError, match=r"full_pages: .*\[1\]"):
        PageTable.from_full_pages(np.array([1]), np.array([5]), ratio=1)


@pytest.mark.parametrize("rows", [1000, 1100])
def test_rows_of_many_sequences(rows):
    """On both sides of ``page_table.MANY`` pairs of a row and a sequence."""
    starts = np.sort(np.random.default_rng(rows).integers(0, rows + 1, 1025)).astype(np.int32)
    table = PageTable.from_arrays(np.ones((1024, 1), int), np.full(rows, 9), starts)
    sequence = np.searchsorted(starts, np.arange(rows), side="right") - 1
    expected = np.where(sequence < 1024, sequence, -1)
    assert (rows * 1025 > page_table.MANY) == (rows == 1100)
    assert np.array_equal(table.row_sequences(), expected)
    assert np.array_equal(table.live_ends(), np.where(expected >= 0, 9, 0))


@pytest.mark.parametrize("starts", [[0, 2, 5, 6], [0, 0, 4, 4], [2, 3, 3, 5], [1, 1, 1, 1], [0, 0, 0, 6], [0, 6, 6, 6]])
def test_rows_and_sequences(starts):
    """Ragged and empty sequences, rows before the first and past the last."""
    pages, ends = np.arange(1, 7).reshape(3, 2), np.array([5, 128, -3, 129, 2**30, 64])
    table = PageTable.from_arrays(pages, ends, np.array(starts))
    sequences = sequences_of(starts, 3, 6)
    assert np.array_equal(table.row_sequences(), sequences)
    assert np.array_equal(ROW_SEQUENCES(table), sequences)
    live = [min(max(e, 0), 128) if s >= 0 else 0 for e, s in zip(ends.tolist(), sequences, strict=True)]
    assert np.array_equal(table.live_ends(), live)
    positions = np.array([[0, 63, 64, 127, 128, -1, INT32_MAX, 2**30, -(2**31)]] * 6)
    expected = [
        [pages[s, p // 64] * 64 + p % 64 if s >= 0 and 0 <= p < 128 else -1 for p in row]
        for s, row in zip(sequences, positions.tolist(), strict=True)
    ]
    assert np.array_equal(table.slots(positions), expected)


def test_slots_of_golden_topk(case):
    """Positions within the context give SGLang's slots, row by row."""
    assert np.array_equal(case.table.slots(case["topk_positions"]), case["topk_slots"])


def test_slots_of_bad_pages():
    """A page whose slots do not fit an int32 has none, rather than a wrapped one."""
    table = PageTable.from_rows(np.array([[-1, 2**25 - 2, 2**25, INT32_MAX]]), np.array([256]))
    assert np.array_equal(table.slots(np.array([[0, 64, 127, 128, 192]])), [[-1, 2**31 - 128, 2**31 - 65, -1, -1]])


def test_wider_integers_saturate():
    """2^32 + 5 is not page 5, nor a row end of 5."""
    table = PageTable.from_arrays(
        np.array([[2**32 + 5, -(2**40)]]), np.array([2**33 + 1], np.uint64), np.array([0, 1], np.int64)
    )
    assert np.array_equal(table.pages, [[INT32_MAX, -INT32_MAX]])
    assert np.array_equal(table.row_ends, [INT32_MAX])
    assert np.array_equal(table.live_ends(), [128])


def test_strided_and_minimal_tables():
    """A slice of a wider numpy table, every other row of it, and one no wider than needed: the same logits."""
    batch = random_batch(0, [130, 65, 1])
    logits = np.asarray(k.index_logits(*batch.args))
    store = np.full((6, 40), 2**31 - 1, np.int32)
    store[::2, 5:22] = batch.table.pages
    strided = store[::2, 5:22]
    assert not strided.flags.c_contiguous
    table = PageTable.from_rows(strided, np.array([130, 0, 65, 0, 1])[::2])
    assert np.array_equal(k.index_logits(*batch.args[:3], table), logits)
    minimal = PageTable.from_rows(strided[:, :3], table.row_ends)
    assert np.array_equal(k.index_logits(*batch.args[:3], minimal), logits[:, :192])
    minimal.check(batch.plane)


@pytest.mark.parametrize("ratio", [1, 2])
def test_decode_and_verify_row_ends(ratio):
    lengths = [0, 1, 2, 63, 64, 65, 1000]
    assert np.array_equal(k.decode_row_ends(np.array(lengths), ratio=ratio), [n // ratio for n in lengths])
    first = [-1, 0, 1, 62, 999]
    expected = [(p + i + 1) // ratio for p in first for i in range(6)]
    assert np.array_equal(k.verify_row_ends(np.array(first), 6, ratio=ratio), expected)
    assert np.array_equal(k.verify_row_ends(np.array([-9]), 2, ratio=ratio), [0, 0])


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("step", [1, 2, 4])
def test_prefill_row_ends(step, ratio):
    """Under context parallelism each of ``step`` ranks holds every step-th token of each sequence."""
    chunks = {0: (0, 10), 1: (37, 3), 2: (100, 0), 3: (8, 21)}  # sequence: (first position, tokens)
    for rank in range(step):
        positions = [[p for p in range(a, a + n) if (p - a) % step == rank] for a, n in chunks.values()]
        starts = np.cumsum([0, *map(len, positions)])
        first = [p[0] if p else 0 for p in positions]
        ends = [(p + 1) // ratio for row in positions for p in row]
        got = k.prefill_row_ends(np.array(first), starts, len(ends) + 3, ratio=ratio, step=step)
        assert np.array_equal(got, [*ends, 0, 0, 0])
    with pytest.raises(ValueError, match=r"query_start_loc: .*\[5\].*\[4\]"):
        k.prefill_row_ends(np.zeros(4, int), np.zeros(4, int), 3)


def test_prefill_rows_before_the_first_sequence():
    assert k.prefill_row_ends([], [0], 4).tolist() == [0, 0, 0, 0]
    got = k.prefill_row_ends(np.array([4]), np.array([2, 4]), 6)
    assert np.array_equal(got, [0, 0, 5, 6, 0, 0])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"query_start_loc": [0, 3, 2]}, r"query_start_loc: must not decrease.*\[0, 3, 2\]"),
        ({"query_start_loc": [-1, 1, 3]}, "query_start_loc: "),
        ({"query_start_loc": [0, 1, 4]}, r"query_start_loc: .*0\.\.3"),
        ({"row_ends": [64, 129, 3]}, "row_ends: row 1 ends at 129, .*128"),
        ({"pages": [[1, 2], [3, -1]]}, "pages: row 2 sees page -1 in column 1"),
        ({"pages": [[1, 9], [3, 4]]}, None),  # column 1 of sequence 0 lies past its row end
        ({"pages": [[5, 9], [3, 4]]}, r"pages: row 0 sees page 5 in column 0.*0\.\.4"),
        ({"row_ends": [0, -7, 64], "pages": [[9, 9], [4, -1]]}, None),
        ({"row_ends": [999, 5, 5], "query_start_loc": [1, 2, 3]}, None),  # row 0 is in no sequence
    ],
)
def test_check(change, match):
    fields = {"pages": [[1, 2], [3, 4]], "row_ends": [64, 1, 65], "query_start_loc": [0, 1, 3]} | change
    table = PageTable.from_arrays(*(np.array(fields[x]) for x in ("pages", "row_ends", "query_start_loc")))
    plane = IndexKPlane.zeros(5, "page8")
    if match is None:
        table.check(plane)
    else:
        with pytest.raises(ValueError, match=match):
            table.check(plane)


def test_check_of_golden_tables(case):
    case.table.check(case.plane("page8"))


def test_check_needs_values():
    table, plane = PageTable.from_rows(np.array([[1]]), np.array([3])), IndexKPlane.zeros(2, "page64")
    with pytest.raises(TypeError, match=r"table: check\(\).*outside jit"):
        jax.jit(lambda t: t.check(plane))(table)


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (ValueError, r"table\.pages: expected shape \[sequences, P\], got \[2\]", ([1, 2], [3], [0, 1])),
        (ValueError, r"table\.row_ends: .*\[1, 1\]", ([[1]], [[3]], [0, 1])),
        (ValueError, r"table\.query_start_loc: expected shape \[2\], got \[3\]", ([[1]], [3], [0, 1, 1])),
        (TypeError, r"pages: expected an integer array, got float.. \[1, 1\]", ([[1.0]], [3], [0, 1])),
        (TypeError, r"row_ends: expected an integer array", ([[1]], [3.0], [0, 1])),
        (TypeError, r"query_start_loc: expected an integer array", ([[1]], [3], [0.0, 1.0])),
    ],
)
def test_static_errors(error, match, arguments):
    with pytest.raises(error, match=match):
        PageTable.from_arrays(*(np.array(x) for x in arguments))
    with pytest.raises(error, match=match):
        jax.jit(PageTable.from_arrays)(*(np.array(x) for x in arguments))


def test_everything_is_built_inside_jit():
    @jax.jit
    def build(pages, lengths, first):
        verify = PageTable.from_verify(pages, k.verify_row_ends(first, 3), 3)
        full = PageTable.from_full_pages(pages, k.decode_row_ends(lengths, ratio=2), ratio=2)
        return verify.live_ends(), full.slots(jnp.array([[0, 70], [129, 400]]))

    ends, slots = build(np.array([[1, 2], [3, 4]]), np.array([9, 99]), np.array([7, 300]))
    assert np.array_equal(ends, [8, 9, 10, 128, 128, 128])
    assert np.array_equal(slots, [[128, 198], [8 * 64 + 1, -1]])


def test_row_ends_saturate():
    last = 2**31 - 1
    assert k.decode_row_ends([2**40, -(2**31), -(2**40)]).tolist() == [last, 0, 0]
    assert k.decode_row_ends(np.array([-(2**31)], np.int32)).tolist() == [0]
    assert k.verify_row_ends([2**40, last - 3], 3).tolist() == [last, last, last, last - 2, last - 1, last]
    assert k.prefill_row_ends([last - 1], [0, 4], 4).tolist() == [last] * 4


def test_sizes_and_ranks_of_row_ends():
    for error, match, make in (
        (ValueError, "ratio: expected an integer of at least 1, got 0", lambda: k.decode_row_ends([5], ratio=0)),
        (TypeError, "ratio: expected an integer", lambda: k.decode_row_ends([5], ratio=1.5)),
        (ValueError, r"seq_lens: expected shape \[sequences\], got \[1, 1\]", lambda: k.decode_row_ends([[5]])),
        (ValueError, "rows_per_sequence: expected an integer of at least 1", lambda: k.verify_row_ends([5], 0)),
        (TypeError, "num_rows: expected an integer", lambda: k.prefill_row_ends([5], [0, 1], 1.0)),
        (ValueError, r"row_ends: expected shape \[rows\], got \[\]", lambda: PageTable.from_rows([[1]], 5)),
        (TypeError, "rows_per_sequence: .*static", lambda: jax.jit(lambda n: k.verify_row_ends([5], n))(2)),
        (ValueError, "max_query_len: ", lambda: PageTable.from_arrays([[1]], [5], [0, 1], max_query_len=-1)),
    ):
        with pytest.raises(error, match=match):
            make()
