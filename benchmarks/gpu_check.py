"""Checks and times the compiled Pallas kernels on the GPU of this host, in one call.

    python benchmarks/gpu_check.py [check] [pools] [time]      (no word: all three)

``check`` compares with float64 on random shapes, every other page filled with bytes of NaN scales; ``pools`` scores
the same key bytes on a low and a high page of 3 and 5 GiB pools; ``time`` times a jitted chain of calls on distinct
inputs and prints, next to each time, GB/s by the formula 68 B * keys * sequences + 4 B * rows * keys.
"""

import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np

from k2i_jax.kernels import pallas_score
from k2i_jax.kernels.config import Config, default_config

Space = types.SimpleNamespace
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


# --- cases ----------------------------------------------------------------------------------------------------------


def natural_keys(payload, scale, layout):
    """u8[pages, 64, 64] and u8[pages, 64, 4] of a plane's bytes, key after key."""
    pages = len(payload)
    if layout == "page8":
        payload = payload.reshape(pages, 8, 4, 4, 2, 16).transpose(0, 1, 4, 2, 3, 5)
        scale = scale.reshape(pages, 8, 4, 8).transpose(0, 1, 3, 2)
    else:
        payload = payload.reshape(pages, 4, 64, 16).transpose(0, 2, 1, 3)
        scale = scale.reshape(pages, 4, 16, 4).transpose(0, 3, 2, 1)
    return payload.reshape(pages, 64, 64), scale.reshape(pages, 64, 4)


def values(payload, scale):
    """float64[..., 128] of FP4 rows, low and high nibbles apart."""
    scale = np.repeat(np.ldexp(1.0, scale.astype(int) - 127), 16, axis=-1)
    return np.concatenate([E2M1[payload & 15] * scale, E2M1[payload >> 4] * scale], axis=-1)


def make_case(rng, *, layout, lengths, rows_of, heads, width, pages, spread=4):
    """Queries, weights, plane, table on the host; pages that no row sees hold NaN scales."""
    sequences, rows = len(rows_of), int(np.sum(rows_of))
    table = np.stack([rng.permutation(np.arange(1, pages))[:width] for _ in range(sequences)]).astype(np.int32)
    payload = rng.integers(0, 256, (pages, 4096)).astype(np.uint8)
    scale = rng.integers(120, 120 + spread, (pages, 256)).astype(np.uint8)
    starts = np.concatenate([[0], np.cumsum(rows_of)]).astype(np.int32)
    seen = np.zeros(pages, bool)
    for s in range(sequences):
        ends = lengths[starts[s] : starts[s + 1]]
        if len(ends):
            seen[table[s, : -(-max(ends.max(), 0) // 64)]] = True
    scale[~seen] = 255
    queries = Space(
        payload=rng.integers(0, 256, (rows, heads, 64)).astype(np.uint8),
        scale=rng.integers(120, 120 + spread, (rows, heads, 4)).astype(np.uint8),
    )
    weights = (rng.standard_normal((rows, heads)) / heads).astype(np.float32)
    plane = Space(payload=payload, scale=scale, layout=layout)
    columns = Space(pages=table, row_ends=np.asarray(lengths, np.int32), query_start_loc=starts, max_query_len=None)
    return queries, weights, plane, columns


def reference(queries, weights, plane, table, row):
    """float64 logits of one row and the sum of their terms' magnitudes."""
    sequence = int(np.searchsorted(table.query_start_loc, row, side="right")) - 1
    payload, scale = natural_keys(plane.payload, plane.scale, plane.layout)
    pages = np.clip(table.pages[sequence], 0, len(payload) - 1)
    keys = values(payload[pages], scale[pages]).reshape(-1, 128)
    dots = np.maximum(values(queries.payload[row], queries.scale[row]) @ keys.T, 0)
    weight = weights[row].astype(np.float64)
    live = np.arange(keys.shape[0]) < table.row_ends[row]
    live &= np.repeat((table.pages[sequence] >= 0) & (table.pages[sequence] < len(payload)), 64)
    return np.where(live, weight @ dots, -np.inf), np.where(live, np.abs(weight) @ dots, 0)


def run(case, config=None, candidates=None):
    queries, weights, plane, table = case
    on_device = lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x
    device = lambda space: Space(**{name: on_device(value) for name, value in vars(space).items()})
    plane, table = device(plane), device(table if candidates is None else candidates)
    call = pallas_score.index_logits if candidates is None else pallas_score.candidate_logits

    @jax.jit
    def score(payload, scale, weights, *arrays):
        keys, scales, *rest = arrays
        names = [k for k, v in vars(table).items() if isinstance(v, jax.Array)]
        columns = Space(**{**vars(table), **dict(zip(names, rest, strict=True))})
        plane_ = Space(payload=keys, scale=scales, layout=plane.layout)
        return call(Space(payload=payload, scale=scale), weights, plane_, columns, config=config)

    arrays = [v for v in vars(table).values() if isinstance(v, jax.Array)]
    return score(queries.payload, queries.scale, weights, plane.payload, plane.scale, *arrays)


def bits(x):
    return np.asarray(x).view(np.int32)


# --- correctness ----------------------------------------------------------------------------------------------------


def check_case(name, case, config=None):
    out = np.asarray(run(case, config))
    worst = 0.0
    for row in range(out.shape[0]):
        expected, magnitude = reference(*case, row)
        live = np.isfinite(expected)
        assert (np.isneginf(out[row]) == ~live).all(), f"{name}: row {row}: -inf in the wrong places"
        if live.any():
            error = np.linalg.norm((out[row] - expected)[live]) / max(np.linalg.norm(magnitude[live]), 1e-300)
            worst = max(worst, error)
    assert worst <= 1e-6, f"{name}: error {worst}"
    print(f"  {name:58s} worst error {worst:.1e}")
    return out


def check():
    rng = np.random.default_rng(0)
    print("correctness against float64; pages that no row sees are poisoned")
    shapes = [
        ("decode", [1] * 5, np.array([0, 1, 63, 512, 2000]), 32),
        ("boundaries", [1] * 8, np.array([7, 8, 9, 64, 65, 511, 513, 2048]), 32),
        ("verify 6", [6] * 3, np.array([395, 396, 397, 398, 399, 400, *range(59, 65), *[2048] * 6]), 32),
        ("ragged", [0, 3, 1, 0, 9, 2], rng.integers(0, 2049, 15), 32),
        ("16 heads", [2] * 2, np.array([100, 101, 2000, 2001]), 16),
        ("48 heads", [1] * 2, np.array([100, 2001]), 48),
        ("64 heads", [3] * 2, np.array([100, 101, 102, 2000, 2001, 2002]), 64),
        ("128 heads", [1] * 2, np.array([100, 2001]), 128),
    ]
    for spread in (4, 20, 60):
        for name, rows_of, lengths, heads in shapes if spread == 4 else shapes[:4]:
            for layout in ("page64", "page8"):
                facts = dict(lengths=lengths, rows_of=rows_of, heads=heads, width=32, pages=300, spread=spread)
                case = make_case(np.random.default_rng(7), layout=layout, **facts)
                check_case(f"{name}, {layout}, scales over {spread} powers", case)

    *_, table = case = make_case(
        rng, layout="page8", lengths=np.array([2000] * 6), rows_of=[6], heads=32, width=33, pages=64, spread=30
    )
    base = bits(run(case))
    for _ in range(19):
        assert (bits(run(case)) == base).all()
    print("  20 repeats: bitwise equal")
    for rows in (1, 2, 3, 4, 6):
        for splits in (1, 3, 7):
            assert (bits(run(case, Config("decode", 64, rows, 4, 1, 1, splits))) == base).all(), (rows, splits)
    print("  rows a program 1, 2, 3, 4, 6 and splits 1, 3, 7: bitwise equal")
    check_candidates(case, base)

    table.pages = np.where(rng.random(table.pages.shape) < 0.3, rng.choice([-1, -(2**31), 64, 2**31 - 1]), table.pages)
    table.pages = table.pages.astype(np.int32)
    check_case("page ids -1, -2^31, past the plane, 2^31 - 1", case)
    table.query_start_loc = np.array([2, 4], np.int32)
    out = np.asarray(run(case))
    assert np.isneginf(out[[0, 1, 4, 5]]).all()
    assert np.isfinite(out[2:4]).any()
    print("  rows of no sequence: -inf")


def check_candidates(case, base):
    table, rng = case[3], np.random.default_rng(3)
    blocks = np.stack([np.sort(rng.permutation(250)[:37]) for _ in range(6)])
    virtual = table.pages[0][blocks // 8] * 8 + blocks % 8
    candidates = Space(virtual_pages=virtual.astype(np.int32), row_ends=np.array([0, 1, 8, 200, 290, 296], np.int32))
    out = bits(run(case, candidates=candidates)).reshape(6, 37, 8)
    expected = np.take_along_axis(base.reshape(6, -1, 8), blocks[..., None], axis=1)
    live = (np.arange(296) < candidates.row_ends[:, None]).reshape(6, 37, 8)
    assert (out[live] == expected[live]).all()
    assert np.isneginf(out.view(np.float32)[~live]).all()
    print("  candidate logits: the bits of the whole context's")


def check_pools():
    rng = np.random.default_rng(1)
    queries, weights, *_ = make_case(
        rng, layout="page8", lengths=np.array([64]), rows_of=[1], heads=32, width=1, pages=3
    )
    page = jnp.asarray(rng.integers(0, 256, 4096), jnp.uint8)
    scales = jnp.asarray(rng.integers(120, 126, 256), jnp.uint8)
    print("the same key bytes on low and high pages")
    for gib in (3, 5):
        pages = gib * 2**30 // 4096
        spots = jnp.array([3, pages // 2 + 5, pages - 1])
        payload = jnp.full((pages, 4096), 0x77, jnp.uint8).at[spots].set(page)
        scale = jnp.full((pages, 256), 131, jnp.uint8).at[spots].set(scales)
        for layout in ("page64", "page8"):
            plane = Space(payload=payload, scale=scale, layout=layout)
            table = Space(
                pages=np.asarray(spots, np.int32)[None], row_ends=np.array([192], np.int32),
                query_start_loc=np.array([0, 1], np.int32), max_query_len=1,
            )  # fmt: skip
            out = bits(run((queries, weights, plane, table))).reshape(3, 64)
            assert (out[0] == out[1]).all()
            assert (out[0] == out[2]).all()
            print(f"  {gib} GiB, {layout}: pages {spots.tolist()} give the same bits")
        del payload, scale, plane


# --- speed ----------------------------------------------------------------------------------------------------------

CHAIN = 8


def device_time(score, inputs) -> float:
    """Seconds of one call: median over repeats of a jitted chain of calls, each on its own queries and tables."""

    @jax.jit
    def chain(*inputs):
        seen = jnp.float32(0)
        for i in range(CHAIN):
            step = [x[i] if distinct else x for distinct, x in zip(score.distinct, inputs, strict=True)]
            step[0] = step[0] ^ (seen != seen).astype(jnp.uint8)  # one call after the other
            seen = score(*step)[0, 0]
        return seen

    chain(*inputs).block_until_ready()
    times = []
    for _ in range(15):
        start = time.perf_counter()
        chain(*inputs).block_until_ready()
        times.append(time.perf_counter() - start)
    return float(np.median(times)) / CHAIN


def random_plane(pages, seed=0):
    keys = jax.random.split(jax.random.key(seed))
    payload = jax.random.bits(keys[0], (pages, 4096), jnp.uint8)
    return payload, 120 + (jax.random.bits(keys[1], (pages, 256), jnp.uint8) & 3)


def time_shape(layout, sequences, rows_each, keys, *, config=None, candidates=0):
    """Microseconds and GB/s of one shape; a pool of 100 MB at least, so that it does not stay in the L2 cache."""
    rng = np.random.default_rng(0)
    width, rows = keys // 64, sequences * rows_each
    pages = max(sequences * width, 65536)
    payload, scale = random_plane(pages)
    q = rng.integers(0, 256, (CHAIN, rows, 32, 64)).astype(np.uint8)
    q_scale = rng.integers(120, 124, (CHAIN, rows, 32, 4)).astype(np.uint8)
    weights = rng.standard_normal((CHAIN, rows, 32)).astype(np.float32)
    if candidates:
        ids = np.stack([np.sort(rng.permutation(keys // 8)[:candidates]) for _ in range(CHAIN * rows)])
        table = np.stack([rng.permutation(pages)[:width] for _ in range(CHAIN * rows)])
        virtual = np.take_along_axis(table, ids // 8, axis=1) * 8 + ids % 8
        tables = [virtual.reshape(CHAIN, rows, candidates).astype(np.int32), np.full(rows, 8 * candidates, np.int32)]
        read = 8 * candidates

        def score(q, q_scale, w, payload, scale, virtual, ends):
            columns = Space(virtual_pages=virtual, row_ends=ends)
            plane = Space(payload=payload, scale=scale, layout=layout)
            return pallas_score.candidate_logits(Space(payload=q, scale=q_scale), w, plane, columns, config=config)

        score.distinct = (1, 1, 1, 0, 0, 1, 0)
        total = 68 * read * rows + 4 * read * rows
    else:
        table = np.stack([rng.permutation(pages)[: sequences * width].reshape(sequences, width) for _ in range(CHAIN)])
        starts = np.arange(sequences + 1, dtype=np.int32) * rows_each
        tables = [table.astype(np.int32), np.full(rows, keys, np.int32), starts]

        def score(q, q_scale, w, payload, scale, pages, ends, starts):
            columns = Space(pages=pages, row_ends=ends, query_start_loc=starts, max_query_len=rows_each)
            plane = Space(payload=payload, scale=scale, layout=layout)
            return pallas_score.index_logits(Space(payload=q, scale=q_scale), w, plane, columns, config=config)

        score.distinct = (1, 1, 1, 0, 0, 1, 0, 0)
        total = 68 * keys * sequences + 4 * rows * keys
    inputs = [jnp.asarray(x) for x in (q, q_scale, weights)] + [payload, scale] + [jnp.asarray(x) for x in tables]
    seconds = device_time(score, inputs)
    return 1e6 * seconds, total / seconds / 1e9


def time_all():
    print(f"{jax.devices()[0].device_kind}, 32 heads; a chain of {CHAIN} calls, so launch gaps count in")
    print(f"  {'shape':34s} {'page64 us':>10s} {'GB/s':>6s} {'page8 us':>10s} {'GB/s':>6s}")
    shapes = [("64 x 65536", 64, 1, 65536, 0), ("8 x 65536", 8, 1, 65536, 0), ("1 x 131072", 1, 1, 131072, 0)]
    shapes += [("8 x 65536, 6 rows", 8, 6, 65536, 0)]
    shapes += [(f"64 rows, 2048 blocks of {n // 1024}K", 64, 1, n, 2048) for n in (65536, 262144, 1048576)]
    for name, sequences, rows, keys, candidates in shapes:
        found = [time_shape(layout, sequences, rows, keys, candidates=candidates) for layout in ("page64", "page8")]
        print(f"  {name:34s} " + " ".join(f"{us:10.1f} {rate:6.0f}" for us, rate in found), flush=True)


def sweep():
    """Times of other configurations, for tuning."""
    for sequences, rows, keys in ((64, 1, 65536), (8, 1, 65536), (1, 1, 131072), (8, 6, 65536)):
        facts = dict(
            rows=sequences * rows, sequences=sequences, heads=32, width=keys, layout="page8", max_query_len=rows
        )
        base = default_config("cuda", **facts).splits
        for splits in sorted({max(1, base // 4), max(1, base // 2), base, base * 2}):
            for shared in {1, 2, 3, rows} & set(range(1, rows + 1)):
                config = Config("decode", 64, shared, 4, 1, 1, splits)
                us, _ = time_shape("page8", sequences, rows, keys, config=config)
                print(f"  {sequences} x {keys}, {rows} rows: splits {splits}, rows {shared}: {us:.1f} us", flush=True)


PARTS = {"check": check, "pools": check_pools, "time": time_all, "sweep": sweep}

if __name__ == "__main__":
    for part in sys.argv[1:] or ["check", "pools", "time"]:
        PARTS[part]()
