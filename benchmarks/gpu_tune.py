"""Kernel times of the Pallas score over configurations: rows a program, splits, register limits, buffers. NVIDIA only.

    python benchmarks/gpu_tune.py [--rounds 9]

Same data, timing and shapes as ``gpu_peers.py``, whose defaults these numbers decide.
"""

import argparse
import functools

import gpu_peers
import jax
from rich.console import Console
from rich.table import Table

import k2i_jax as k2i
from k2i_jax.kernels.config import Config, default_config

LAYOUT = "page64"
MULTIPROCESSORS = 132
CHOICES = {  # rows a sequence: (rows a program, registers, buffers)
    1: [(1, 80, 1), (1, 96, 1), (1, 96, 2), (1, 128, 1), (1, 128, 2)],
    6: [(2, 96, 1), (2, 128, 1), (3, 128, 1), (3, 168, 1), (6, 168, 1), (6, 248, 1)],
}


def variants(sequences: int, keys: int, rows_each: int) -> dict[str, Config]:
    """The default, and what ``CHOICES`` names."""
    rows = sequences * rows_each
    found = {"default": default_config("cuda", rows=rows, sequences=sequences, heads=32, width=keys, layout=LAYOUT,
                                       max_query_len=rows_each)}  # fmt: skip
    for shared, registers, buffers in CHOICES[rows_each]:
        resident = MULTIPROCESSORS * (65536 // (128 * registers))  # programs that run at a time
        for waves in (1, 2, 3):
            splits = resident * waves // (sequences * -(-rows_each // shared))
            if splits * 4 <= keys // 64:
                name = f"rows {shared}, registers {registers}, buffers {buffers}, {waves} waves, splits {splits}"
                found[name] = Config("decode", 64, shared, 4, 1, buffers, splits, registers)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    console = Console(width=150, highlight=False)
    for sequences, keys, rows_each in [(8, 65536, 1), (1, 131072, 1), (64, 65536, 1), (8, 65536, 6)]:
        operands = gpu_peers.problem(sequences, keys, LAYOUT, rows_each)
        functions = {}
        for name, config in variants(sequences, keys, rows_each).items():
            score = jax.jit(functools.partial(k2i.index_logits, implementation="pallas", config=config))
            functions[name] = functools.partial(score, *operands)
        table = Table(f"{sequences} x {keys}, {rows_each} rows", "kernel, us")
        for name, us in gpu_peers.kernel_times(functions, args.rounds).items():
            table.add_row(name, f"{us:.1f}")
        console.print(table)


if __name__ == "__main__":
    main()
