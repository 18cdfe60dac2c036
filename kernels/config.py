"""Tuning of the Pallas kernels: what can be chosen, what is chosen by default, what is refused."""

import dataclasses
from typing import Literal

BODIES = ("dot_scaled", "decode")
LDS_BYTES = {"gfx942": 64 * 1024, "gfx950": 160 * 1024, "cuda": 227 * 1024}
MAX_THREADS = 1024
MAX_ROWS = 8


@dataclasses.dataclass(frozen=True)
class Config:
    """How the score kernels are cut into programs. Any valid one gives the same bits (per body).

    Attributes:
      body: "dot_scaled" (FP4 matrix instructions) or "decode" (e2m1 to f16 in registers).
      keys: keys a step: 64 for each warp with "dot_scaled", 64 with "decode".
      rows: rows of a sequence a program scores together, sharing each key it reads; 1 to 8.
      num_warps: warps a program.
      num_stages: Triton's software pipelining; 1 leaves the key loads where ``buffers`` puts them.
      buffers: key tiles held in registers ahead of their use, 1 or 2.
      splits: programs that share a sequence's keys.
      registers: most registers a thread, on NVIDIA GPUs; None leaves it to the compiler.
    """

    body: Literal["dot_scaled", "decode"]
    keys: int
    rows: int
    num_warps: int
    num_stages: int
    buffers: int
    splits: int
    registers: int | None = None


def lds_bytes(config: Config, heads: int) -> int:
    """Upper bound of the shared memory a program takes: queries, and a key tile a stage, all through it at worst."""
    element = 1 if config.body == "dot_scaled" else 4  # e2m1 pairs, or each nibble as f16
    queries = config.rows * -(-heads // 32) * 32 * 64 * element
    tiles = (config.num_stages - 1) * config.keys * (64 + 4)
    return queries + tiles + 1024


def check_config(config: Config, *, heads: int, device: str) -> None:
    """Raises ValueError, naming the field, for a configuration that cannot run.

    Args:
      config: the configuration.
      heads: index heads.
      device: "gfx942", "gfx950" or "cuda".
    """
    if device not in LDS_BYTES:
        raise ValueError(f"device: expected one of {sorted(LDS_BYTES)}, got {device!r}")
    if config.body not in BODIES:
        raise ValueError(f"body: expected one of {BODIES}, got {config.body!r}")
    for field in ("keys", "num_warps"):
        value = getattr(config, field)
        if not isinstance(value, int) or value < 1 or value & (value - 1):
            raise ValueError(f"{field}: expected a power of two, got {value!r}")
    for field, least, most in (("rows", 1, MAX_ROWS), ("num_stages", 1, 8), ("buffers", 1, 2), ("splits", 1, 65535)):
        value = getattr(config, field)
        if not isinstance(value, int) or not least <= value <= most:
            raise ValueError(f"{field}: expected {least} to {most}, got {value!r}")
    if config.registers is not None and (config.registers % 8 or not 32 <= config.registers <= 248):
        raise ValueError(f"registers: expected None or a multiple of 8 from 32 to 248, got {config.registers!r}")
    lanes = 32 if device == "cuda" else 64
    if config.num_warps * lanes > MAX_THREADS:
        raise ValueError(f"num_warps: {config.num_warps} of {lanes} lanes exceed {MAX_THREADS} threads a program")
    if config.body == "decode" and config.num_warps != 4:
        raise ValueError(f"num_warps: the decode body needs 4, got {config.num_warps}")
    if config.body == "dot_scaled" and config.num_warps == 1:
        raise ValueError("num_warps: the dot_scaled body needs at least 2; with 1 Triton leaves the FP4 instruction")
    expected = 64 if config.body == "decode" else 64 * config.num_warps
    if config.keys != expected:
        raise ValueError(
            f"keys: {config.body} with {config.num_warps} warps takes {expected} a step, got {config.keys}"
        )
    need = lds_bytes(config, heads)
    if need > LDS_BYTES[device]:
        fault = "num_stages" if config.num_stages > 2 else "rows"
        raise ValueError(f"{fault}: {need} bytes of LDS exceed {device}'s {LDS_BYTES[device]}")


_CORES = {"gfx942": 304, "gfx950": 256, "cuda": 132}  # compute units, or multiprocessors of an H200
_LEAST_STEPS = {"gfx942": 8, "gfx950": 8, "cuda": 4}  # a program
_REGISTERS = {1: 96, 2: 128, 3: 168, MAX_ROWS: 248}  # of a thread on NVIDIA GPUs, by rows a program: no spills


def default_config(
    device: str, *, rows: int, sequences: int, heads: int, width: int, layout: str, max_query_len: int | None = None
) -> Config:
    """The configuration used when none is given, from shapes alone.

    Args:
      device: "gfx942", "gfx950" or "cuda".
      rows: query rows in all.
      sequences: sequences they belong to.
      heads: index heads.
      width: columns of the logits.
      layout: "page64" or "page8"; both take the same configuration so far.
      max_query_len: rows of the longest sequence, if known.
    """
    longest = max_query_len or -(-rows // max(sequences, 1))
    most = max(1, MAX_ROWS // -(-heads // 32))
    if device == "gfx942":  # its LDS holds the decoded queries of fewer rows
        most = max(1, min(most, 7 // -(-heads // 32)))
    passes = -(-min(longest, rows) // most)
    shared = max(1, -(-min(longest, rows) // max(passes, 1)))
    body: Literal["dot_scaled", "decode"] = "dot_scaled" if device == "gfx950" else "decode"
    num_warps = 4
    keys = 64 * num_warps if body == "dot_scaled" else 64
    steps = sequences * passes * -(-width // keys)
    registers = None
    if device == "cuda":
        # as many programs as run at a time: each has its start to pay, and a second wave would end unevenly
        limit = next(limit for most, limit in _REGISTERS.items() if shared <= most)
        registers = limit if heads <= 64 else None
        programs = _CORES[device] * (65536 // (128 * limit))
        programs *= 2 if sequences * passes > programs // 16 else 1
    else:
        wave = 4 * _CORES[device]
        programs = 4 * wave if steps > 64 * wave else wave  # more programs even out the end, fewer start less often
    programs = min(programs, -(-steps // _LEAST_STEPS[device]))  # a program's start costs about a step
    splits = max(1, min(programs // max(1, sequences * passes), -(-width // keys), 65535))
    buffers = 2 if body == "dot_scaled" and shared <= 3 else 1  # registers are short with many rows
    return Config(body, keys, shared, num_warps, 1, buffers, splits, registers)
