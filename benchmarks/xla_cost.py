"""What xla scoring costs beside the same arithmetic on keys that are already float32.

The peer is ``relu(einsum('rhd,rkd->rhk'))`` weighted over heads: no pages, no FP4, 7.5 times the bytes. Both run in
this process, in turns; the median and the minimum are shown. Times are wall times on the default device.

    python benchmarks/xla_cost.py [--rows 64 --keys 8192 --heads 32 --repeats 15]
"""

import argparse
import datetime
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import k2i_jax as k2i
from k2i_jax.kernels.xla import TILE

LIMIT = 2.0  # xla scoring may take this many times the peer's time


def problem(rows: int, keys: int, heads: int):
    """Random queries and a pool in which every row has its own pages, in random order."""
    rng = np.random.default_rng(0)
    pages = keys // 64

    def fp4(*shape):
        payload = rng.integers(0, 256, (*shape, 64), dtype=np.uint8)
        return k2i.FP4Array(jnp.asarray(payload), jnp.asarray(rng.integers(120, 131, (*shape, 4), dtype=np.uint8)))

    order = 1 + rng.permutation(rows * pages).reshape(rows, pages).astype(np.int32)
    table = k2i.PageTable.from_rows(order, np.full(rows, keys, np.int32))
    plane = k2i.IndexKPlane.zeros(rows * pages + 1, "page64")
    stored = fp4(rows * keys)
    slots = table.slots(jnp.tile(jnp.arange(keys, dtype=jnp.int32), (rows, 1))).reshape(-1)
    plane = k2i.write_keys(plane, slots, stored, donate=True)
    dense = stored.dequantize().reshape(rows, keys, 128)
    return fp4(rows, heads), jnp.asarray(rng.normal(size=(rows, heads)).astype(np.float32)), plane, table, dense


@jax.jit
def dense_logits(queries, keys, weights):
    dots = jnp.maximum(jnp.einsum("rhd,rkd->rhk", queries, keys), 0)
    return jnp.einsum("rhk,rh->rk", dots, weights)


def alternate(functions: dict, repeats: int) -> dict[str, list[float]]:
    """Wall times in seconds of functions that run in turns, compiled beforehand."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for f in functions.values():
        jax.block_until_ready(f())
    for _ in range(repeats):
        for name, f in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(f())
            times[name].append(time.perf_counter() - start)
    return times


def temporaries(rows: int, heads: int, keys: int) -> int:
    """Bytes that the compiled step needs beyond inputs and output, for a context of ``keys``."""
    shape = jax.ShapeDtypeStruct
    pages = keys // 64
    args = (
        k2i.FP4Array(shape((rows, heads, 64), jnp.uint8), shape((rows, heads, 4), jnp.uint8)),
        shape((rows, heads), jnp.float32),
        k2i.IndexKPlane(shape((pages, 4096), jnp.uint8), shape((pages, 256), jnp.uint8), k2i.PageLayout.PAGE8),
        k2i.PageTable(shape((rows, pages), jnp.int32), shape((rows,), jnp.int32), shape((rows + 1,), jnp.int32)),
    )
    return jax.jit(k2i.index_logits).lower(*args).compile().memory_analysis().temp_size_in_bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rows", 64), ("keys", 8192), ("heads", 32), ("repeats", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    queries, weights, plane, table, dense = problem(args.rows, args.keys, args.heads)
    values = queries.dequantize()
    page8 = k2i.repack(plane, "page8")
    functions = {
        "einsum on float32 keys": lambda: dense_logits(values, dense, weights),
        "xla, page64": lambda: k2i.index_logits(queries, weights, plane, table, implementation="xla"),
        "xla, page8": lambda: k2i.index_logits(queries, weights, page8, table, implementation="xla"),
    }
    times = alternate(functions, args.repeats)
    console = Console(width=None if sys.stdout.isatty() else 118, highlight=False)
    device = jax.devices()[0]
    console.print(
        f"{args.rows} rows x {args.keys} keys (each row its own) x {args.heads} heads, float32, on {device.device_kind}"
        f", jax {jax.__version__}, {datetime.date.today()}"
    )
    peer = "einsum on float32 keys"
    out = Table("step", "median ms", "min ms", "times the peer", "bytes read and written", "GB/s")
    worst = 0.0
    for name, seconds in times.items():
        key_bytes = 512 if name == peer else 68
        moved = args.rows * args.keys * (key_bytes + 4)
        ratio = float(np.median(np.divide(seconds, times[peer])))  # turn by turn: a busy machine slows both
        worst = max(worst, ratio)
        cells = (1e3 * float(np.median(seconds)), 1e3 * min(seconds))
        rate = moved / float(np.median(seconds)) / 1e9
        formula = f"{moved / 1e6:.0f} MB = rows * keys * ({key_bytes} + 4)"
        out.add_row(name, *(f"{ms:.1f}" for ms in cells), f"{ratio:.2f}", formula, f"{rate:.2f}")
    console.print(out)
    out = Table("context", "temporaries, bytes", title=f"Memory beyond inputs and output (tile: {TILE} keys)")
    sizes = {keys: temporaries(4, args.heads, keys) for keys in (8192, 65536, 1 << 20)}
    for keys, size in sizes.items():
        out.add_row(str(keys), str(size))
    console.print(out)
    good = worst <= LIMIT and len(set(sizes.values())) == 1
    console.print(f"at most {LIMIT} times the peer, temporaries independent of the context: {'yes' if good else 'NO'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
