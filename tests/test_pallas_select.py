"""The selection kernel: NumPy's choice and plain JAX's, lowered for both kinds of GPU, compiled without spills."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import k2i_jax as k2i
from k2i_jax import _radix
from k2i_jax.kernels import pallas_select
from k2i_jax.kernels._jax_private import lower_for, triton_calls

GPUS = {"rocm": "gfx950", "cuda": "NVIDIA H200"}
top_columns = functools.partial(pallas_select.top_columns, interpret=True)


def hard_rows(seed, n):
    """u32[6, n]: any keys, few distinct ones, none, the largest alone, half of them absent, neighbours in value."""
    rng = np.random.default_rng(seed)
    any_keys = lambda: rng.integers(0, 2**32, n, dtype=np.uint32)
    rows = [any_keys(), rng.integers(0, 3, n), np.zeros(n), np.full(n, 2**32 - 1)]
    rows += [np.where(rng.random(n) < 0.5, 0, any_keys()), 2**31 + rng.integers(0, 2, n)]
    return np.stack(rows).astype(np.uint32)


def choose(keys, count, k):
    """The contract's words in NumPy: largest first, of equal ones the lowest column, then ascending."""
    columns = np.full((len(keys), k), -1, np.int32)
    for out, row, wanted in zip(columns, keys, count, strict=True):
        order = np.argsort(-row.astype(np.int64), kind="stable")
        order = order[row[order] > 0][:wanted]
        out[: len(order)] = np.sort(order)
    return columns, np.sum(columns >= 0, axis=1)


def check(keys, count, k):
    columns, found = top_columns(jnp.asarray(keys), jnp.asarray(count, jnp.int32), k)
    expected, expected_found = choose(keys, np.clip(count, 0, k), k)
    assert columns.dtype == found.dtype == jnp.int32
    np.testing.assert_array_equal(columns, expected)
    np.testing.assert_array_equal(found, expected_found)


@pytest.mark.parametrize("k", [1, 8, 512])
@pytest.mark.parametrize("n", [1, 7, 8, 9, 63, 64, 65, 511, 512, 513, 2049])
def test_against_numpy(n, k):
    check(hard_rows(n * k, n), [k, k, k, k - 1, k // 2, k + 3], k)


def test_counts_of_nothing_and_below():
    check(hard_rows(0, 100), [0, 0, 0, 0, -5, 0], 16)


def test_one_count_for_all_rows():
    keys = hard_rows(4, 200)
    for found, expected in zip(top_columns(keys, jnp.array([70]), 100), choose(keys, [70] * 6, 100), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (65, 8), (513, 512), (300, 400), (16385, 512)])
def test_of_logits(n, k):
    """The keys that the kernel makes of logits: NaN and -inf left out, -0 and +0 equal, nothing past a row's end."""
    rng = np.random.default_rng(n)
    logits = rng.standard_normal((4, n)).astype(np.float32)
    logits[0, ::3], logits[0, 1::3], logits[2], logits[3] = np.nan, -np.inf, 0, rng.choice([-0.0, 0.0, np.inf, -1], n)
    ends = np.array([n, n // 2, n - 1, n], np.int32)
    live = (np.arange(n) < ends[:, None]) & (logits > -np.inf)
    rank = np.unique(np.where(live, logits, -np.inf) + 0.0, return_inverse=True)[1].reshape(4, n) + 1
    columns, found = pallas_select.top_of_logits(jnp.asarray(logits), jnp.asarray(ends), k, interpret=True)
    expected, expected_found = choose(np.where(live, rank, 0), [k] * 4, k)
    np.testing.assert_array_equal(columns, expected)
    np.testing.assert_array_equal(found, expected_found)


def test_against_the_radix_selection():
    keys, count = hard_rows(3, 1000), jnp.array([512, 512, 512, 511, 256, 512], jnp.int32)
    columns, _ = top_columns(jnp.asarray(keys), count, 512)
    np.testing.assert_array_equal(columns, _radix.columns_of(_radix.top(jnp.asarray(keys), count), 512))


@pytest.mark.parametrize(("limit", "n", "k"), [(64, 65, 8), (64, 1000, 8), (64, 1000, 32), (64, 5000, 3), (8, 100, 4)])
def test_wide_rows_by_groups(monkeypatch, limit, n, k):
    """Two levels and more, to the same choice: ties across groups, keys of zero in chosen groups."""
    monkeypatch.setattr(pallas_select, "LIMIT", limit)
    check(hard_rows(n, n), [k, k, k, k - 1, k // 2, k], k)


def test_one_column_beyond_the_limit():
    n = pallas_select.LIMIT + 1
    check(hard_rows(1, n)[[1, 5]], [512, 512], 512)


def test_no_rows_and_no_entries():
    for rows, k in ((0, 4), (3, 0)):
        columns, found = top_columns(jnp.zeros((rows, 5), jnp.uint32), jnp.zeros(rows, jnp.int32), k)
        assert columns.shape == (rows, k)
        assert found.shape == (rows,)


def test_what_it_cannot_do(monkeypatch):
    wide = jnp.zeros((1, pallas_select.LIMIT + 1), jnp.uint32)
    with pytest.raises(ValueError, match=r"8192 of more than 16384 columns at most, got 8193 of 16385; use xla"):
        top_columns(wide, jnp.zeros(1, jnp.int32), 8193)
    monkeypatch.setattr(pallas_select, "MAX_RESULTS", 7)
    with pytest.raises(ValueError, match="7 entries at most, got 2 x 4"):
        top_columns(jnp.zeros((2, 5), jnp.uint32), jnp.zeros(2, jnp.int32), 4)


def test_under_vmap_and_jit():
    keys = np.stack([hard_rows(seed, 130) for seed in range(3)])
    count = np.full((3, 6), 9, np.int32)
    columns, found = jax.jit(jax.vmap(lambda keys, count: top_columns(keys, count, 9)))(keys, count)
    for batch in range(3):
        expected, expected_found = choose(keys[batch], count[batch], 9)
        np.testing.assert_array_equal(columns[batch], expected)
        np.testing.assert_array_equal(found[batch], expected_found)


def test_with_64_bit_types():
    with jax.enable_x64(True):
        check(hard_rows(2, 70), [8, 8, 8, 7, 4, 8], 8)
        for platform, kind in GPUS.items():
            lower(platform, kind, 70, 8)
            lower(platform, kind, 70, 8, dtype=jnp.float32)


def lower(platform, kind, n, k, batch=(), dtype=jnp.uint32):
    shapes = jax.ShapeDtypeStruct((*batch, 4, n), dtype), jax.ShapeDtypeStruct((*batch, 4), jnp.int32)
    of = pallas_select.top_columns if dtype == jnp.uint32 else pallas_select.top_of_logits
    select = lambda keys, bound: of(keys, bound, k)
    return triton_calls(lower_for(jax.vmap(select) if batch else select, *shapes, platform=platform, kind=kind))


@pytest.mark.parametrize("platform", GPUS)
@pytest.mark.parametrize(
    ("n", "k"), [(1, 1), (7, 4), (65, 64), (2048, 2048), (16384, 512), (131072, 512), (1 << 20, 512)]
)
def test_it_lowers_for_gpus(platform, n, k):
    calls = lower(platform, GPUS[platform], n, k)
    assert len(calls) == (1 if n <= 16384 else 2 if n <= 131072 else 3)
    assert all(call["grid_x"] == 4 for call in calls)
    lanes = 64 if platform == "rocm" else 32
    assert all(call["num_warps"] * lanes <= 512 for call in calls)
    assert all("arith.cmpi ugt" in call["ir"] for call in calls)  # keys are unsigned
    assert not any("f64" in call["ir"] for call in calls)


@pytest.mark.parametrize("platform", GPUS)
def test_it_lowers_for_gpus_under_vmap(platform):
    [call] = lower(platform, GPUS[platform], 300, 20, batch=(3,))
    assert call["grid_x"] * call["grid_y"] * call["grid_z"] == 12


def problem():
    """Logits with ties, NaN and -inf, rows of many lengths, one of them in no sequence."""
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((7, 1024)).astype(np.float32)
    logits[1] = rng.integers(0, 9, 1024)
    logits[2, ::3], logits[2, 1::3], logits[3] = np.nan, -np.inf, -np.inf
    logits[4, :100] = np.where(rng.random(100) < 0.5, 0.0, -0.0)
    table = k2i.PageTable(
        jnp.asarray(rng.permutation(112).reshape(7, 16).astype(np.int32)),
        jnp.array([1024, 1023, 900, 600, 100, 8, 0], jnp.int32),
        jnp.array([0, 1, 2, 3, 4, 5, 6, 6], jnp.int32),
    )
    return jnp.asarray(logits), table


def assert_same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("k", [1, 7, 512, 2000])
def test_select_topk(k):
    logits, table = problem()
    assert_same(k2i.select_topk(logits, table, k=k, interpret=True), k2i.select_topk(logits, table, k=k))


@pytest.mark.parametrize(("topk_blocks", "block_size"), [(1, 8), (16, 8), (2048, 8), (5, 100)])
def test_select_candidate_blocks(topk_blocks, block_size):
    logits, table = problem()
    select = functools.partial(
        k2i.select_candidate_blocks, logits, table.live_ends(), topk_blocks=topk_blocks, block_size=block_size
    )
    assert_same(select(implementation="pallas", interpret=True), select())


@pytest.mark.parametrize("layout", ["page64", "page8"])
def test_source_and_reindex(layout):
    rng = np.random.default_rng(1)
    codes = lambda *shape: jnp.asarray(rng.integers(0, 256, shape, dtype=np.uint8))
    scales = lambda *shape: jnp.asarray(rng.integers(120, 130, shape, dtype=np.uint8))
    queries = k2i.FP4Array(codes(2, 16, 64), scales(2, 16, 4))
    plane = k2i.IndexKPlane(codes(8, 4096), scales(8, 256), k2i.PageLayout(layout))
    table = k2i.PageTable.from_rows(jnp.array([[3, 1, 2], [5, 7, 0]], jnp.int32), jnp.array([190, 101], jnp.int32))
    weights = jnp.asarray(rng.standard_normal((2, 16)), jnp.float32)
    run = lambda **how: k2i.source(queries, weights, plane, table, k=20, topk_blocks=6, interpret=True, **how)
    assert_same(run(selection="pallas"), run())
    blocks = run()[1]
    again = lambda **how: k2i.reindex(queries, weights, plane, table, blocks, k=20, interpret=True, **how)
    assert_same(again(selection="pallas"), again())


def test_names_are_checked_and_platforms_refused():
    logits, table = problem()
    with pytest.raises(ValueError, match=r"implementation: expected None or one of .*got 'sort'"):
        k2i.select_topk(logits, table, implementation="sort")
    with pytest.raises(ValueError, match="implementation='xla' has no interpret mode"):
        k2i.select_candidate_blocks(logits, table.row_ends, implementation="xla", interpret=True)
    with pytest.raises(ValueError, match=r"selection: expected None or one of .*got 'sort'"):
        k2i.build_k2i(k2i.K2iSpec.v41_flash(), selection="sort")
    if jax.default_backend() == "cpu":
        with pytest.raises(NotImplementedError, match="lowered for cpu"):
            k2i.select_topk(logits, table, implementation="pallas")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("target", ["gfx950", "gfx942", "sm_90"])
def test_it_compiles_without_spills(target):
    pytest.importorskip("triton", reason="needs the triton wheel (extra jax_triton)")
    from k2i_jax.kernels.compile import TARGETS, compile_call

    platform, kind = TARGETS[target][:2]
    keys, logits = jnp.uint32, jnp.float32
    widest = [(16384, 512, keys), (16384, 512, logits), (16384, 2048, keys), (16384, 2048, logits)]
    for n, k, dtype in [(2048, 2048, keys), (10000, 512, logits), *widest, (131072, 512, keys)]:
        for call in lower(platform, kind, n, k, dtype=dtype):
            code = compile_call(call, target)
            assert code.spills == 0
            assert code.lds_bytes <= 64 * 1024
            assert code.vgprs <= 128  # 512 threads: all registers of a multiprocessor
    assert compile_call(call | {"num_warps": 1}, target).spills > 0  # they would be seen: 256 or 128 keys a thread
