"""The whole step on the GPU of this host: right, replayed, in how much memory, and what its layers cost.

    python benchmarks/gpu_step.py [check] [replay] [memory] [time] [step]      (no word: all, in this order)

``check``  three-layer steps against NumPy, both layouts and mixed ones, compiled Pallas kernels and plain JAX; the
           selection kernel against plain JAX.
``replay`` 200 calls A, B, A, ... equal to the eager parts, in three new processes each with command buffers as they
           are and switched off (``--xla_gpu_enable_command_buffer=``); all digests equal.
``memory`` measured peak of ``source`` at 4096 rows x 1M positions, in a new process; and the compiler's own account.
``time``   one FULL or SOURCE layer and four REINDEX layers over 128K positions; REINDEX over 64K, 256K and 1M; with
           either implementation of the selection.
``step``   V4.1-Flash's eight index layers, decode and verify.

Times are of a ``lax.scan`` over eight calls on distinct queries inside one jitted function, divided by eight: median of
15, no L2 flush (the keys of 8 x 128K positions are larger than it). The last line is "all of it held" or the failures.
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import steps
import test_step_replay as replay_test

import k2i_jax as k2i

FLASH = k2i.K2iSpec.v41_flash()
CALLS = 8
SWITCH = "--xla_gpu_enable_command_buffer="
failures: list[str] = []


def claim(held: bool, text: str):
    print(f"  {'holds ' if held else 'MISSED'} {text}", flush=True)
    if not held:
        failures.append(text)


def random_bytes(rng, low, high, *shape):
    return rng.integers(low, high, shape, dtype=np.uint8)


def problem(sequences, keys, *, rows_each=1, layout="page8", calls=CALLS, pages=None):
    """``calls`` sets of queries and weights, a plane of random keys and a table with pages in random order."""
    rng, rows = np.random.default_rng(0), sequences * rows_each
    count = sequences * keys // 64 if pages is None else pages
    queries = k2i.FP4Array(
        jnp.asarray(random_bytes(rng, 0, 255, calls, rows, FLASH.heads, 64)),
        jnp.asarray(random_bytes(rng, 120, 124, calls, rows, FLASH.heads, 4)),
    )
    weights = jnp.asarray(rng.standard_normal((calls, rows, FLASH.heads)), jnp.float32)
    payload, scale = random_bytes(rng, 0, 255, count + 1, 4096), random_bytes(rng, 120, 124, count + 1, 256)
    plane = k2i.IndexKPlane.from_arrays(jnp.asarray(payload), jnp.asarray(scale), layout)
    order = 1 + rng.permutation(count)[: sequences * keys // 64].reshape(sequences, -1)
    ends = keys - rows_each + 1 + np.tile(np.arange(rows_each), sequences)
    return queries, weights, plane, k2i.PageTable.from_verify(order, ends, rows_each)


# --- right and replayed -----------------------------------------------------------------------------------------------


def check_chain():
    """The write path: SGLang's bytes (sines, roots and fused multiplies may round otherwise here), and jit as eager."""
    with np.load(Path(steps.__file__).parent / "golden" / "chain.npz") as arrays:
        chain = dict(arrays)

    def both(k_in, weight, q_in, freqs):
        return k2i.index_keys(k_in, weight, freqs), k2i.index_queries(q_in, freqs)

    args = [jnp.asarray(chain[name]) for name in ("k_in", "norm_weight", "q_in", "freqs")]
    keys, queries = both(*args)
    for name, ours, theirs in (("keys", keys, "k_bytes"), ("queries", queries, "q_bytes")):
        differ = int((np.asarray(ours.payload) != chain[theirs]).sum())
        claim(differ == 0, f"chain.npz, {name}: {differ} of {chain[theirs].size} bytes differ")
    claim(steps.same(jax.jit(both)(*args), (keys, queries)), "chain: jitted is eager")
    positions = np.random.default_rng(0).integers(0, 1 << 20, 4096).astype(np.int32)
    error = np.abs(np.asarray(k2i.rope_rotations(positions, FLASH.frequencies)) - steps.rotations_of(FLASH, positions))
    claim(error.max() < 3e-7, f"rotations up to position 2^20: {error.max():.1e} from float64's cosine of the angle")


def check_selection():
    """The selection kernel against plain JAX: ties, NaN, infinities, rows of all lengths, 20 times."""
    for rows, width in ((1, 64), (5, 4096), (48, 16384), (8, 131072), (2, 1048576)):
        rng = np.random.default_rng(width)
        logits = rng.standard_normal((rows, width)).astype(np.float32)
        logits[0] = rng.integers(0, 50, width)
        logits[-1, ::7] = np.nan
        logits[-1, 1::5] = -np.inf
        ends = jnp.asarray(rng.integers(0, width + 1, rows).astype(np.int32)).at[0].set(width)
        pages = jnp.asarray(rng.permutation(rows * width // 64).reshape(rows, -1).astype(np.int32))
        table, logits = k2i.PageTable.from_rows(pages, ends), jnp.asarray(logits)
        choose = lambda name, logits=logits, table=table: (
            k2i.select_topk(logits, table, implementation=name),
            k2i.select_candidate_blocks(logits, table.row_ends, implementation=name),
        )
        expected = jax.tree.leaves(choose("xla"))
        equal = lambda found, expected=expected: all(map(np.array_equal, jax.tree.leaves(found), expected))
        same = all(equal(choose("pallas")) for _ in range(20))
        claim(same, f"selection of {rows} x {width}: pallas equals xla, 20 times")


def check():
    print("check: the write path, then steps against NumPy")
    check_chain()
    mixed = {1: "page8", 2: "page64"}
    check_selection()
    for implementation, selection in (("pallas", "pallas"), ("pallas", "xla"), ("xla", "xla")):
        k = k2i.build_k2i(steps.FEW, implementation=implementation, selection=selection)
        for layouts in ("page64", "page8", mixed):
            for seed, (tokens, rows) in enumerate((([300, 65, 6], [6, 1, 6]), ([128, 7, 311], [1, 7, 5]))):
                case = steps.random_problem(seed, steps.FEW, tokens, rows, total_rows=15, layouts=layouts, raw=False)
                try:
                    steps.check_against_numpy(steps.FEW, case, k.step(*case.args))
                    claim(True, f"{implementation}, selection {selection}, planes {layouts}, rows {rows}")
                except AssertionError as error:
                    claim(False, f"{implementation}, selection {selection}, {layouts}, rows {rows}: {str(error)[:300]}")


def replay_child():
    """One process's part of ``replay``: its digests as JSON."""
    both = replay_test.problems()
    expected = [replay_test.eager_step(steps.FEW, *case.args) for case in both]
    step = k2i.build_k2i(steps.FEW).step
    for i in range(200):
        if not steps.same(replay_test.parts(step(*both[i % 2].args)), expected[i % 2]):
            raise SystemExit(f"call {i} differs from the eager parts")
    digests = [replay_test.digest(replay_test.parts(step(*case.args))) for case in both]
    print(json.dumps({"digests": digests, "traces": step._cache_size(), "device": jax.devices()[0].device_kind}))


def child(word, flags=""):
    environment = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
    done = subprocess.run([sys.executable, __file__, word], env=environment, capture_output=True, text=True)
    if done.returncode:
        return {"error": (done.stdout + done.stderr)[-600:]}
    return json.loads(done.stdout.strip().splitlines()[-1])


def replay():
    print("replay: 200 calls A, B, A, ... in new processes")
    digests = set()
    for flags in ("", SWITCH):
        for process in range(3):
            found = child("replay-child", flags)
            held = found.get("traces") == 1
            claim(held, f"command buffers {'off' if flags else 'as they are'}, process {process}: {found}")
            digests.add(tuple(found.get("digests", [process])))
    claim(len(digests) == 1, "all processes made the same bytes")


# --- memory -----------------------------------------------------------------------------------------------------------

ROWS, WIDTH = 4096, 2**20


def memory_child():
    """Peak of ``source`` beyond its arguments and results, by the allocator; and the compiler's account."""
    queries, weights, plane, table = problem(1, WIDTH, rows_each=ROWS, calls=1)
    args = jax.tree.map(lambda x: x[0], (queries, weights))
    source = k2i.build_k2i(FLASH, implementation="pallas").source
    del queries, weights
    compiled = source.lower(*args, plane, table).compile()
    account = compiled.memory_analysis()
    device = jax.devices()[0]
    jax.block_until_ready((args, plane, table))
    before = device.memory_stats()
    start = time.perf_counter()
    out = jax.block_until_ready(compiled(*args, plane, table))
    seconds = time.perf_counter() - start
    after = device.memory_stats()
    plain = k2i.build_k2i(FLASH, implementation="xla").source.lower(*args, plane, table).compile().memory_analysis()
    in_use = after["bytes_in_use"] - before["bytes_in_use"]
    found = {
        "seconds": seconds,
        "arguments": before["bytes_in_use"],
        "results": in_use,
        "peak_before": before["peak_bytes_in_use"],
        "peak": after["peak_bytes_in_use"],
        "temporaries_measured": after["peak_bytes_in_use"] - before["bytes_in_use"] - in_use,
        "temporaries_compiler": account.temp_size_in_bytes,
        "temporaries_compiler_xla": plain.temp_size_in_bytes,
        "counts": [int(out[0].count.min()), int(out[0].count.max())],
    }
    print(json.dumps(found))


def memory():
    print(f"memory: source, {ROWS} rows x {WIDTH} positions, 32 heads")
    found = child("memory-child")
    print("  " + json.dumps(found))
    for name in ("temporaries_measured", "temporaries_compiler", "temporaries_compiler_xla"):
        size = found.get(name, 2**60)
        claim(size < 2**31, f"{name} {size / 2**20:.0f} MiB < 2048 MiB")
    claim(found.get("peak", 0) > found.get("peak_before", 1), "the peak is this call's (else it says too much)")


# --- time -------------------------------------------------------------------------------------------------------------


def microseconds(function, queries, weights, *rest) -> float:
    """Of one call; ``function(queries, weights, *rest)`` returns a pytree."""

    @jax.jit
    def chain(queries, weights, *rest):
        def body(carry, x):
            found = function(x[0], x[1] + carry, *rest)  # one call after the other
            seen = sum(jnp.sum(leaf, dtype=jnp.int32) for leaf in jax.tree.leaves(found))
            return (seen == -(2**31)).astype(jnp.float32), seen

        return jax.lax.scan(body, jnp.float32(0), (queries, weights))[1]

    jax.block_until_ready(chain(queries, weights, *rest))
    times = []
    for _ in range(15):
        start = time.perf_counter()
        jax.block_until_ready(chain(queries, weights, *rest))
        times.append(time.perf_counter() - start)
    return float(np.median(times)) / CALLS * 1e6


def four(reindex):
    """Four REINDEX layers: as many other queries and weights, the same keys and candidates."""

    def layers(queries, weights, plane, candidates):
        turned = [k2i.FP4Array(queries.payload ^ np.uint8(8 * i), queries.scale) for i in range(4)]
        return [reindex(q, weights, plane, candidates).positions for q in turned]

    return layers


def timing():
    for selection in ("pallas", "xla"):
        time_layers(selection)


def time_layers(selection: str):
    k = k2i.build_k2i(FLASH, selection=selection)
    print(f"time, selection={selection!r}: 128K positions, one FULL layer and four REINDEX layers, us")
    for sequences, rows_each in ((1, 1), (8, 1), (64, 1), (8, 6)):
        for layout in ("page64", "page8"):
            queries, weights, plane, table = problem(sequences, 131072, rows_each=rows_each, layout=layout)
            first = jax.tree.map(lambda x: x[0], (queries, weights))
            candidates = jax.block_until_ready(k.source(*first, plane, table))[1]
            full = microseconds(lambda *args: k.full(*args).positions, queries, weights, plane, table)
            source = microseconds(lambda *args: k.source(*args)[0].positions, queries, weights, plane, table)
            both = microseconds(
                lambda *args: (lambda s, c: (s.positions, c.ids))(*k.source(*args)), queries, weights, plane, table
            )
            one = microseconds(lambda *args: k.reindex(*args).positions, queries, weights, plane, candidates)
            all_four = microseconds(four(k.reindex), queries, weights, plane, candidates)
            scores = microseconds(k2i.index_logits, queries, weights, plane, table)
            some = microseconds(k2i.candidate_logits, queries, weights, plane, candidates)
            claim(
                all_four < full,
                f"{sequences} sequences x {rows_each} rows, {layout}: four REINDEX {all_four:.1f} < FULL {full:.1f} "
                f"(SOURCE {both:.1f}, its own selection alone {source:.1f}; one REINDEX {one:.1f}; the score alone: "
                f"FULL {scores:.1f}, REINDEX {some:.1f})",
            )
    print(f"time, selection={selection!r}: REINDEX of 16 rows, us")
    for layout in ("page64", "page8"):
        found = {}
        for context in (65536, 262144, 1048576):
            queries, weights, plane, table = problem(16, context, layout=layout)
            first = jax.tree.map(lambda x: x[0], (queries, weights))
            candidates = k.source(*first, plane, table)[1]
            found[context] = microseconds(lambda *args: k.reindex(*args).positions, queries, weights, plane, candidates)
            del queries, weights, plane, table, candidates
        ratio = found[1048576] / found[65536]
        claim(ratio <= 1.1, f"{layout}: {', '.join(f'{n >> 10}K {us:.1f}' for n, us in found.items())}: x{ratio:.3f}")


def whole_step():
    print("step: V4.1-Flash, eight index layers, ratio-1 plane PAGE8")
    for sequences, rows_each in ((16, 1), (8, 6)):
        tokens, rows = 131072, sequences * rows_each
        rng = np.random.default_rng(0)
        draw = lambda *shape, rng=rng: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
        tables, planes, layers = {}, {}, {}
        positions = np.repeat(tokens - rows_each, rows) + np.tile(np.arange(rows_each), sequences)
        for ratio in FLASH.ratios:
            layout = "page8" if ratio == 1 else "page64"
            *_, plane, table = problem(sequences, tokens // ratio, rows_each=rows_each, layout=layout, calls=1)
            tables[ratio] = dataclasses.replace(table, row_ends=jnp.asarray((positions + 1) // ratio, jnp.int32))
            planes |= {n: jax.tree.map(jnp.array, plane) for n, r in FLASH.full_layers if r == ratio}
        for entry in FLASH.schedule:
            keys = (draw(rows, 128), jnp.ones(128)) if entry.owns_keys else (None, None)
            layers[entry.layer] = k2i.LayerInputs(draw(rows, FLASH.heads, 128), draw(rows, FLASH.heads), *keys)
        step, times = k2i.build_k2i(FLASH, True, donate=True).step, []
        for _ in range(20):
            start = time.perf_counter()
            result = jax.block_until_ready(step(planes, layers, positions, tables))
            times.append(time.perf_counter() - start)
            planes = result.planes
        counts = {n: int(s.count.min()) for n, s in result.selections.items()}
        claim(set(counts.values()) == {512}, f"{sequences} x {rows_each} rows over 128K: every layer selects 512")
        print(f"  {np.median(times[5:]) * 1e3:.2f} ms a call, the host's part included; first call {times[0]:.1f} s")


def main() -> int:
    words = {"check": check, "replay": replay, "memory": memory, "time": timing, "step": whole_step}
    children = {"replay-child": replay_child, "memory-child": memory_child}
    asked = sys.argv[1:] or list(words)
    unknown = [word for word in asked if word not in words and word not in children]
    if unknown:
        print(f"expected words of {list(words)}, got {unknown}")
        return 2
    if asked[0] in children:
        children[asked[0]]()
        return 0
    if jax.default_backend() != "gpu":
        print(f"needs a GPU; this process runs on {jax.default_backend()}")
        return 2
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, XLA_FLAGS={os.environ.get('XLA_FLAGS', '')!r}")
    for word in asked:
        start = time.perf_counter()
        words[word]()
        print(f"  ({word}: {time.perf_counter() - start:.0f} s)", flush=True)
    print("all of it held" if not failures else f"missed: {len(failures)}\n" + "\n".join(failures))
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
