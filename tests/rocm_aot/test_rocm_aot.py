"""Whole jitted steps, compiled for gfx950 by XLA's own ROCm compiler on a host without a GPU (`make test-rocm-aot`).

What only XLA would refuse is caught here, and the code objects it makes are read. Nothing is run.
"""

import atexit
import dataclasses
import importlib.util
import os
import re
import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import k2i_jax as k2i
from k2i_jax.implementations import IMPLEMENTATIONS

if "K2I_JAX_ROCM_STUBS" not in os.environ:
    pytest.skip(
        "needs XLA's ROCm plugin and stand-ins for ROCm's libraries: make test-rocm-aot", allow_module_level=True
    )

# XLA's AMDGPU backend reads these once: where it puts its temporary files, and that it keeps them.
_KEPT = Path(tempfile.mkdtemp())
atexit.register(shutil.rmtree, _KEPT)
os.environ |= {"TMPDIR": str(_KEPT), "TF_ROCM_KEEP_XLA_TEMPFILES": "1"}

from k2i_jax.kernels import _jax_private as private  # noqa: E402
from k2i_jax.kernels import isa  # noqa: E402

SEQUENCES, PAGES, WIDTH = 4, 4096, 256  # WIDTH: pages a sequence
PINNED_JAX = "0.11.2"  # the instruction counts below were read off this version's compiler


@pytest.fixture(scope="module")
def device():
    [plugin] = Path(importlib.util.find_spec("jax_plugins").submodule_search_locations[0]).glob("*/xla_rocm_plugin.so")
    return private.gfx950_without_a_device(str(plugin))


def arguments(device, layout, rows_each=1, heads=32):
    sharding = jax.sharding.SingleDeviceSharding(device)

    def shape(dtype, *sizes):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)

    rows, u8, i32 = SEQUENCES * rows_each, jnp.uint8, jnp.int32
    return (
        k2i.FP4Array(shape(u8, rows, heads, 64), shape(u8, rows, heads, 4)),
        shape(jnp.float32, rows, heads),
        k2i.IndexKPlane(shape(u8, PAGES, 4096), shape(u8, PAGES, 256), k2i.PageLayout(layout)),
        k2i.PageTable(shape(i32, SEQUENCES, WIDTH), shape(i32, rows), shape(i32, SEQUENCES + 1), rows_each),
    )


def compile_step(fun, *args):
    return private.lower_for(fun, *args, platform="rocm", kind="gfx950").compile()


@pytest.mark.parametrize("layout", ["page64", "page8"])
@pytest.mark.parametrize(
    ("implementation", "selection"), [*((name, None) for name in IMPLEMENTATIONS), (None, None), (None, "pallas")]
)
def test_source_and_reindex_compile_as_one_step(device, layout, implementation, selection):
    how = {"implementation": implementation, "selection": selection}

    def step(queries, weights, plane, table):
        chosen, blocks = k2i.source(queries, weights, plane, table, **how)
        return chosen, k2i.reindex(queries, weights, plane, table, blocks, **how)

    compiled = compile_step(step, *arguments(device, layout, rows_each=2))
    assert compiled.memory_analysis().output_size_in_bytes >= 2 * 8 * 512 * 8  # two selections of positions and slots


def test_launches_of_a_layer(device):
    """With the selection kernel: no loop of launches, and of REINDEX three: scores, selection, slots."""
    queries, weights, plane, table = arguments(device, "page8")
    table = dataclasses.replace(
        table, pages=jax.ShapeDtypeStruct((SEQUENCES, 2048), jnp.int32, sharding=table.pages.sharding)
    )
    k = k2i.build_k2i(k2i.K2iSpec.v41_flash(), selection="pallas")
    shapes = jax.eval_shape(k.source, queries, weights, plane, table)[1]
    candidates = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=table.pages.sharding), shapes)
    for layer, where, most in ((k.full, table, 8), (k.source, table, 15), (k.reindex, candidates, 3)):
        text = compile_step(layer, queries, weights, plane, where).as_text()
        entry = text[text.index("\nENTRY ") :]
        assert " while(" not in entry
        assert len(re.findall(r"= .* (?:fusion|custom-call|copy|sort|reduce|gather)\(", entry)) <= most


@pytest.mark.parametrize("layout", ["page64", "page8"])
def test_writes_repack_and_allocation_compile(device, layout):
    sharding = jax.sharding.SingleDeviceSharding(device)
    _, _, plane, _ = arguments(device, layout)
    pool = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        k2i.PagePool.create(PAGES, SEQUENCES, WIDTH),
    )
    rows = jax.ShapeDtypeStruct((SEQUENCES, 128), jnp.bfloat16, sharding=sharding)

    def step(plane, pool, rows):
        pool, new = k2i.append(pool, jnp.ones(SEQUENCES, jnp.int32), max_new=1)
        plane = k2i.copy_pages(plane, new.source, new.target)
        plane = k2i.write_keys(plane, new.slots[:, 0], k2i.quantize_fp4(rows))
        return k2i.repack(plane, "page8" if layout == "page64" else "page64"), pool

    compile_step(step, plane, pool, rows)


@pytest.fixture
def code_objects():
    """A function that returns the code objects that were made since the test began."""
    before = set(_KEPT.glob("*.hsaco"))
    return lambda: [path.read_bytes() for path in set(_KEPT.glob("*.hsaco")) - before]


@pytest.mark.skipif(jax.__version__ != PINNED_JAX, reason=f"counts hold for jax {PINNED_JAX}, here {jax.__version__}")
@pytest.mark.parametrize("layout", ["page64", "page8"])
@pytest.mark.parametrize(("rows_each", "most"), [(1, 140), (3, 330), (6, 610)])
def test_steady_loop_of_the_code_object(device, code_objects, layout, rows_each, most):
    """Per 64-key step of one wave at 32 heads: four 16-byte key loads, FP4 matrix instructions, no LDS, no spill."""
    import code_objects as reader

    def score(*args):
        return k2i.index_logits(*args, implementation="pallas")

    compile_step(score, *arguments(device, layout, rows_each))
    found = [(code, loops) for code in code_objects() if (loops := isa.amd_loops(reader.listing(code)))]
    [(code, [loop])] = found
    steps = loop.loads[16] // 4
    assert steps in (1, 2)
    assert loop.loads[16] == 4 * steps
    assert set(loop.matrix) == {"v_mfma_scale_f32_32x32x64_f8f6f4"}
    assert loop.matrix["v_mfma_scale_f32_32x32x64_f8f6f4"] == 4 * rows_each * steps
    assert "lds" not in loop.classes
    assert "barrier" not in loop.classes
    assert "scratch" not in loop.classes
    assert loop.instructions / steps <= most
    counts = reader.metadata(code)
    assert counts[".vgpr_spill_count"] == counts[".sgpr_spill_count"] == 0
