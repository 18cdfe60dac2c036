"""Kernel times of the Pallas score beside SGLang's Triton kernel and DeepGEMM's FP8 one, in one process on one GPU.

    python benchmarks/gpu_peers.py --sglang FOLDER --deepgemm FOLDER [--rounds 15] [--json FILE]

The folders hold unpacked wheels (see ``benchmarks/peers/``); a peer without a folder is left out. All run in turns,
each after a 512 MB fill that empties the L2 cache, on random data. Times are those of the score kernels alone (two
launches where the decode body's exact pass is one of its own), from CUPTI through torch's profiler, which sees XLA's
launches too: the median of the rounds.
GB/s = (B a key * keys * sequences + 4 B * rows * keys * sequences) / time.
"""

import argparse
import datetime
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs the rest of the memory

import jax
import jax.numpy as jnp
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import k2i_jax as k2i

sys.path.insert(0, str(Path(__file__).parent / "peers"))

HEADS = 32
SHAPES = [(64, 65536), (8, 65536), (1, 131072), (64, 16384)]
VERIFY_ROWS = 6
KERNELS = ("_index_kernel", "_candidate_kernel", "_fp4_index_logits_paged_kernel", "paged_mqa_logits")
score = jax.jit(lambda *args: k2i.index_logits(*args, implementation="pallas"))
score_candidates = jax.jit(lambda *args: k2i.candidate_logits(*args, implementation="pallas"))


def random_bytes(key, low, high, *shape):
    return jax.random.randint(key, shape, low, high, jnp.int32).astype(jnp.uint8)


def problem(sequences, keys, layout, rows_each=1, seed=0):
    """Queries, weights, plane and table of ``sequences`` x ``keys``, pages in random order."""
    pages, rows = sequences * keys // 64, sequences * rows_each
    key = jax.random.split(jax.random.key(seed), 5)
    queries = k2i.FP4Array(
        random_bytes(key[0], 0, 256, rows, HEADS, 64), random_bytes(key[1], 120, 131, rows, HEADS, 4)
    )
    plane = k2i.IndexKPlane.from_arrays(
        random_bytes(key[2], 0, 256, pages + 1, 4096), random_bytes(key[3], 120, 131, pages + 1, 256), layout
    )
    order = 1 + np.random.default_rng(seed).permutation(pages).reshape(sequences, -1).astype(np.int32)
    table = k2i.PageTable.from_verify(order, np.full(rows, keys, np.int32), rows_each)
    return queries, jax.random.normal(key[4], (rows, HEADS)), plane, table


def candidate_problem(sequences, context, layout):
    """The same with 2048 random blocks a row in place of the page table."""
    queries, weights, plane, table = problem(sequences, context, layout)
    rng = np.random.default_rng(1)
    ids = np.stack([np.sort(rng.permutation(context // 8)[:2048]) for _ in range(sequences)]).astype(np.int32)
    return queries, weights, plane, k2i.candidate_table(k2i.CandidateBlocks.from_ids(ids), table)


def score_kernels(run) -> list[float]:
    """Microseconds of each score kernel that ``run`` launches, in order of their start, as CUPTI saw them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        run()
        torch.cuda.synchronize()
    events = [
        (event.time_range.start, event.self_device_time_total)
        for event in profile.events()
        if any(name in event.name for name in KERNELS) and "metadata" not in event.name
    ]
    return [microseconds for _, microseconds in sorted(events) if microseconds]


def kernel_times(functions: dict, rounds: int) -> dict[str, float]:
    """Median microseconds of the score kernels that each function launches, run in turns with a cold L2."""
    scratch = torch.empty(512 << 20, dtype=torch.uint8, device="cuda")
    for f in functions.values():
        jax.block_until_ready(f())
    launches = [len(score_kernels(lambda f=f: jax.block_until_ready(f()))) for f in functions.values()]

    def turns():
        for i in range(rounds):
            for f in functions.values():
                scratch.fill_(i % 251)
                torch.cuda.synchronize()
                jax.block_until_ready(f())
                torch.cuda.synchronize()

    times = score_kernels(turns)
    if 0 in launches or len(times) != rounds * sum(launches):
        raise RuntimeError(f"expected {rounds} rounds of {launches} kernels, CUPTI saw {len(times)}")
    sums = np.add.reduceat(np.reshape(times, (rounds, -1)), np.cumsum([0, *launches[:-1]]), axis=1)
    return dict(zip(functions, np.median(sums, axis=0).tolist(), strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sglang", help="folder of the unpacked SGLang wheel")
    parser.add_argument("--deepgemm", help="folder of the unpacked sgl-deep-gemm and apache-tvm-ffi wheels")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="write the results there")
    args = parser.parse_args()
    console = Console(width=150, highlight=False)
    results: list[dict] = []

    def measure(shape, functions):
        for name, us in kernel_times(functions, args.rounds).items():
            results.append({"shape": shape, "what": name, "us": us})

    for sequences, keys in SHAPES:
        functions = {}
        for layout in ("page64", "page8"):
            operands = problem(sequences, keys, layout)
            functions[f"k2i {layout}"] = lambda operands=operands: score(*operands)
            if (sequences, keys) == (8, 65536):
                verify = problem(sequences, keys, layout, VERIFY_ROWS)
                functions[f"k2i {layout}, {VERIFY_ROWS} rows"] = lambda operands=verify: score(*operands)
        if args.sglang:
            import sglang_triton

            functions["SGLang Triton FP4"] = sglang_triton.Scorer(args.sglang, sequences, keys, HEADS)
        if args.deepgemm:
            import deepgemm

            functions["DeepGEMM FP8"] = deepgemm.Scorer(args.deepgemm, sequences, keys, HEADS)
        measure(f"{sequences} x {keys}", functions)
        del functions
        torch.cuda.empty_cache()
    for context in (65536, 262144, 1048576):
        functions = {}
        for layout in ("page64", "page8"):
            operands = candidate_problem(16, context, layout)
            functions[f"k2i {layout}, REINDEX"] = lambda operands=operands: score_candidates(*operands)
        measure(f"16 rows, context {context}", functions)

    device = f"{torch.cuda.get_device_name()}, jax {jax.__version__}, torch {torch.__version__}"
    console.print(f"{HEADS} heads, {device}, {datetime.date.today()}; `{' '.join(['python', *sys.argv])}`")
    table = Table("shape (sequences x keys)", "what", "kernel, us", "GB/s")
    for r in results:
        table.add_row(r["shape"], r["what"], f"{r['us']:.1f}", f"{moved(r) / r['us'] / 1e3:.0f}")
    console.print(table)
    if args.json:
        Path(args.json).write_text(json.dumps({"device": device, "results": results}, indent=1))
    return 0


def moved(result: dict) -> float:
    """Bytes that the step must read and write."""
    if "REINDEX" in result["what"]:
        return 16 * 2048 * 8 * (68 + 4)
    sequences, keys = map(int, result["shape"].split(" x "))
    rows = VERIFY_ROWS if "rows" in result["what"] else 1
    return sequences * keys * ((132 if "FP8" in result["what"] else 68) + 4 * rows)


if __name__ == "__main__":
    sys.exit(main())
