"""Compiles the Pallas kernels for a GPU that need not be there, and counts what came out.

Lowering is jax's own; the code object comes from the triton wheel (extra ``jax_triton``), whose compiler is a relative
of the one inside XLA. Nothing here runs on a GPU.
"""

import dataclasses
import functools
import os
import subprocess
import tempfile
import types
from typing import NamedTuple

import jax
import jax.numpy as jnp

from k2i_jax._check import check_heads
from k2i_jax.kernels import isa, pallas_score
from k2i_jax.kernels._jax_private import lower_for, triton_calls
from k2i_jax.kernels.config import Config, default_config

#: target -> jax platform, device kind, Triton's backend, architecture and lanes a warp, name in ``config``.
TARGETS = {
    "gfx950": ("rocm", "gfx950", "hip", "gfx950", 64, "gfx950"),
    "gfx942": ("rocm", "gfx942", "hip", "gfx942", 64, "gfx942"),
    "sm_90": ("cuda", "NVIDIA H200", "cuda", 90, 32, "cuda"),
}


@dataclasses.dataclass(frozen=True)
class KernelReport:
    """What the compiler made of one kernel. Loop numbers are of the steady loop, a step of one warp.

    Attributes:
      target, layout, table, rows, heads: what was compiled; ``table`` is "full" or "candidates".
      config: its configuration.
      triton: version of the triton wheel.
      vgprs, spills, lds_bytes: registers a lane, spilled registers, shared memory in bytes.
      matrix: matrix instructions by name, a step.
      loads: vector loads from global memory by width in bytes, a step.
      bytes_per_key: bytes that lanes load for each key: payload, scales, a candidate's table entry. A page id, one
        for all 64 keys, is left out.
      instructions: instructions by class, a step.
      asm: the assembly.
      ir: Triton's GPU IR, which says what each thread holds.
    """

    target: str
    layout: str
    table: str
    rows: int
    heads: int
    config: Config
    triton: str
    vgprs: int
    spills: int
    lds_bytes: int
    matrix: dict[str, float]
    loads: dict[int, float]
    bytes_per_key: float
    instructions: dict[str, float]
    asm: str = dataclasses.field(repr=False)
    ir: str = dataclasses.field(repr=False)

    @property
    def name(self) -> str:
        return f"{self.table}-{self.layout}-{self.config.body}-rows{self.rows}-heads{self.heads}"

    @property
    def total(self) -> float:
        """Instructions a step."""
        return sum(self.instructions.values())


def arguments(layout: str, table: str, rows: int, heads: int, *, sequences: int = 64, pages: int = 2048):
    """A score call for shapes alone: (function of (config), operands) for ``rows`` rows a sequence."""
    shaped = jax.ShapeDtypeStruct
    total, pool = sequences * rows, 65536
    queries = types.SimpleNamespace(payload=(total, heads, 64), scale=(total, heads, 4))
    operands = [
        shaped(queries.payload, jnp.uint8),
        shaped(queries.scale, jnp.uint8),
        shaped((total, heads), jnp.float32),
    ]
    operands += [shaped((pool, 4096), jnp.uint8), shaped((pool, 256), jnp.uint8), shaped((total,), jnp.int32)]
    if table == "candidates":
        operands += [shaped((total, 2048), jnp.int32)]
    else:
        operands += [shaped((sequences, pages), jnp.int32), shaped((sequences + 1,), jnp.int32)]

    def score(payload, scale, weights, keys, key_scales, row_ends, table_entries, starts=None, *, config=None):
        q = types.SimpleNamespace(payload=payload, scale=scale)
        plane = types.SimpleNamespace(payload=keys, scale=key_scales, layout=layout)
        if table == "candidates":
            columns = types.SimpleNamespace(virtual_pages=table_entries, row_ends=row_ends)
            return pallas_score.candidate_logits(q, weights, plane, columns, config=config)
        columns = types.SimpleNamespace(
            pages=table_entries, row_ends=row_ends, query_start_loc=starts, max_query_len=rows
        )
        return pallas_score.index_logits(q, weights, plane, columns, config=config)

    return score, operands


class Code(NamedTuple):
    """A code object: its assembly, Triton's GPU IR, and what it takes, as in ``KernelReport``."""

    asm: str
    ir: str
    vgprs: int
    spills: int
    lds_bytes: int
    triton: str


def compile_call(call: dict, target: str) -> Code:
    """Compiles one of ``triton_calls`` of a function that was lowered for ``target``."""
    try:
        import triton
        from triton.backends.compiler import GPUTarget
    except ImportError as error:
        raise ImportError("compiling kernels needs the triton wheel: pip install 'k2i_jax[jax_triton]'") from error
    _, _, backend, arch, lanes, _ = TARGETS[target]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.ttir")
        with open(path, "w") as file:
            file.write(call["ir"])
        options = {"num_warps": call["num_warps"], "num_stages": call["num_stages"]}
        compiled = triton.compile(path, target=GPUTarget(backend, arch, lanes), options=options)
    if backend == "hip":
        asm = compiled.asm["amdgcn"]
        found = isa.amd_metadata(asm)
        vgprs, spills = found["vgpr_count"], found["vgpr_spill_count"] + found["sgpr_spill_count"]
    else:
        asm, vgprs, spills = _sass(compiled.asm["cubin"])
    return Code(asm, compiled.asm["ttgir"], vgprs, spills, compiled.metadata.shared, triton.__version__)


def compile_kernel(
    target: str, layout: str, table: str, rows: int, heads: int = 32, config: Config | None = None
) -> KernelReport:
    """Compiles one kernel.

    Args:
      target: "gfx950", "gfx942" or "sm_90".
      layout: "page64" or "page8".
      table: "full" or "candidates".
      rows: rows a sequence; 1 for candidates.
      heads: index heads.
      config: overrides the target's default.

    Raises:
      ImportError: without the triton wheel.
      ValueError: an unknown target, or a configuration that cannot run.
    """
    if target not in TARGETS:
        raise ValueError(f"target: expected one of {sorted(TARGETS)}, got {target!r}")
    platform, kind, _, _, lanes, device = TARGETS[target]
    score, operands = arguments(layout, table, rows, heads)
    if config is None:
        sequences, width = operands[5].shape[0] // rows, 8 * 2048 if table == "candidates" else 64 * 2048
        config = default_config(
            device,
            rows=sequences * rows,
            sequences=sequences,
            heads=heads,
            width=width,
            layout=layout,
            max_query_len=rows,
        )
    lowered = lower_for(functools.partial(score, config=config), *operands, platform=platform, kind=kind)
    [call] = triton_calls(lowered)
    code = compile_call(call, target)
    loop, steps = (isa.amd_loops if platform == "rocm" else isa.nvidia_loops)(code.asm)[0], config.buffers
    keys = 64 if config.body == "dot_scaled" else 16  # of a step, a warp's share
    return KernelReport(
        target=target, layout=layout, table=table, rows=rows, heads=heads, config=config, triton=code.triton,
        vgprs=code.vgprs, spills=code.spills, lds_bytes=code.lds_bytes,
        matrix={k: v / steps for k, v in loop.matrix.items()}, loads={k: v / steps for k, v in loop.loads.items()},
        bytes_per_key=_bytes_per_key(loop, table, lanes / (steps * keys)),
        instructions={k: v / steps for k, v in loop.classes.items()}, asm=code.asm, ir=code.ir,
    )  # fmt: skip


def _bytes_per_key(loop: isa.Loop, table: str, lanes_per_key: float) -> float:
    entries = 4 * loop.loads.get(4, 0)  # no key or scale load is 4 bytes wide
    return (loop.load_bytes - (entries if table == "full" else 0)) * lanes_per_key


def _sass(cubin: bytes) -> tuple[str, int, int]:
    """Listing, registers and spilled bytes of a cubin, by the tools inside the triton wheel."""
    import triton

    tools = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = lambda tool, *flags: (
            subprocess.run(
                [os.path.join(tools, tool), *flags, file.name], check=True, capture_output=True, text=True
            ).stdout
        )
        usage = run("cuobjdump", "-res-usage")
        listing = run("nvdisasm", "-c")
    return listing, int(isa.find(r"REG:(\d+)", usage)), int(isa.find(r"STACK:(\d+)", usage))


#: What ``report`` compiles: (layout, table, rows).
KERNELS = [
    *(("page64", "full", rows) for rows in (1, 3, 6)),
    *(("page8", "full", rows) for rows in (1, 3, 6)),
    ("page64", "candidates", 1),
    ("page8", "candidates", 1),
]


def report(target: str, *, heads: int = 32) -> list[KernelReport]:
    """Compiles a representative set of kernels for ``target`` with its default configurations.

    Raises:
      ValueError: ``heads`` is no multiple of 16 up to 128.
    """
    check_heads("heads", heads)
    return [compile_kernel(target, layout, table, rows, heads) for layout, table, rows in KERNELS]
