"""Prefill never holds the rectangle [rows, width]: temporaries by the compiler's own account."""

import functools

import jax
import jax.numpy as jnp
import pytest

import k2i_jax as k

GIB = 2**30
ROWS, WIDTH = 4096, 2**20  # 4096 rows x 1M positions: 16 GiB of logits
SPEC = k.K2iSpec.v41_flash()


def shapes(rows=ROWS, width=WIDTH, layout="page8", sequences=2):
    """Abstract arguments of a lookup: nothing this large is allocated."""
    shape, columns = jax.ShapeDtypeStruct, width // 64
    pages = sequences * columns + 1
    plane = k.IndexKPlane(shape((pages, 4096), jnp.uint8), shape((pages, 256), jnp.uint8), k.PageLayout(layout))
    queries = k.FP4Array(shape((rows, 32, 64), jnp.uint8), shape((rows, 32, 4), jnp.uint8))
    table = k.PageTable(*(shape(s, jnp.int32) for s in ((sequences, columns), (rows,), (sequences + 1,))))
    return queries, shape((rows, 32), jnp.float32), plane, table


def temporaries(function, *args, **options) -> int:
    return jax.jit(functools.partial(function, **options)).lower(*args).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("name", ["source", "full"])
def test_4096_rows_by_a_million_positions(name):
    """The preset's memory budget is 1 GiB; everything together stays under 2 GiB."""
    k2i = k.build_k2i(SPEC, implementation="xla")
    assert temporaries(getattr(k2i, name), *shapes()) < 2 * GIB


@pytest.mark.parametrize("layout", ["page8", pytest.param("page64", marks=pytest.mark.long)])
def test_source_alone(layout):
    """``k2i_jax.source``, the public form, by its own default: eight rows at a time."""
    assert temporaries(k.source, *shapes(layout=layout), implementation="xla") < GIB // 4


@pytest.mark.long
def test_interpreted_pallas():
    assert temporaries(k.build_k2i(SPEC, interpret=True).source, *shapes()) < 2 * GIB


def test_reindex():
    """4096 rows of 2048 candidate blocks: 16384 columns a row, in parts too, whatever the context."""
    k2i = k.build_k2i(SPEC, implementation="xla")
    found = []
    for width in (2**17, 2**20):
        queries, weights, plane, table = shapes(width=width)
        candidates = k.CandidateTable(
            *(jax.ShapeDtypeStruct(s, jnp.int32) for s in ((ROWS, 2048),) * 2), table.row_ends
        )
        found.append(temporaries(k2i.reindex, queries, weights, plane, candidates))
    assert found[1] <= found[0] + 64 * 1024
    assert found[1] < 2 * GIB


def test_the_budget_decides():
    """A quarter of the budget takes a quarter of the temporaries; a budget below one row's still runs a row."""
    found = []
    for budget in (GIB // 4, 1):
        k2i = k.build_k2i(k.K2iSpec.v41_flash(memory_budget=budget), implementation="xla")
        found.append(temporaries(k2i.source, *shapes(rows=64)))
    assert found[0] < 0.3 * GIB
    assert found[1] < 64 * 2**20
