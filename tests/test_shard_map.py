"""Rows of a mesh axis each in ``jax.shard_map``, whose default checks which values vary over it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import random_batch
from steps import TWO_LEVELS, built, random_problem, same

import k2i_jax as k

BATCH = random_batch(3, [320, 65, 0, 200], columns=5, num_pages=30)
MESH = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("ranks",))  # one device is checked as many are
ROWS, WHOLE = jax.P("ranks"), jax.P()


def sharded(function):
    """``function(queries, weights, plane, pages, row_ends)`` with rows on the mesh axis and the plane on every rank."""
    return jax.jit(jax.shard_map(function, mesh=MESH, in_specs=(ROWS, ROWS, WHOLE, ROWS, ROWS), out_specs=ROWS))


def score(queries, weights, plane, pages, row_ends, **options):
    return k.index_logits(queries, weights, plane, k.PageTable.from_rows(pages, row_ends), **options)


def two_levels(queries, weights, plane, pages, row_ends, rows_per_step=8, **options):
    table = k.PageTable.from_rows(pages, row_ends)
    options |= {"k": 20}
    first, blocks = k.source(queries, weights, plane, table, topk_blocks=5, rows_per_step=rows_per_step, **options)
    return first, blocks, k.reindex(queries, weights, plane, table, blocks, **options)


def gradient(queries, weights, plane, pages, row_ends, **options):
    def loss(weights):
        logits = score(queries, weights, plane, pages, row_ends, **options)
        return jnp.where(jnp.isfinite(logits), logits, 0.0).sum()

    return jax.grad(loss)(weights)


def allocate(queries, weights, plane, pages, row_ends):
    pool, found = k.append(k.PagePool.create(40, row_ends.shape[0], 8), row_ends, max_new=512)
    return found.slots, k.truncate(pool, row_ends // 2).lengths


def write(queries, weights, plane, pages, row_ends):
    slots = k.PageTable.from_rows(pages, row_ends).slots(jnp.zeros((row_ends.shape[0], 1), jnp.int32))
    keys = jax.tree.map(lambda x: x[:, 0], queries)
    return k.read_keys(k.write_keys(plane, slots[:, 0], keys), slots)


FUNCTIONS = {
    "score": score,
    "score, xla": functools.partial(score, implementation="xla"),
    "two levels": two_levels,
    "two levels, in parts": functools.partial(two_levels, rows_per_step=3),
    "gradient": gradient,
    "allocate": allocate,
    "write": write,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_inside_shard_map(name):
    args = *BATCH.args[:3], BATCH.table.pages, BATCH.table.row_ends
    assert same(sharded(FUNCTIONS[name])(*args), jax.jit(FUNCTIONS[name])(*args))


def test_kernels_are_traced_inside_shard_map():
    """All platforms' branches are: none may vary otherwise than the rest."""

    def function(queries, weights, plane, pages, row_ends):
        table = k.PageTable.from_rows(pages, row_ends)
        logits = k.index_logits(queries, weights, plane, table, implementation="pallas")
        return k.select_topk(logits, table, k=20, implementation="pallas").slots

    args = *BATCH.args[:3], BATCH.table.pages, BATCH.table.row_ends
    assert jax.eval_shape(sharded(function), *args).shape == (4, 20)


def test_a_step_inside_shard_map():
    problem = random_problem(5, TWO_LEVELS, [200, 130], [2, 1], columns=5)
    planes, layers, positions, tables = problem.args
    pages = np.asarray(tables[1].pages)[np.asarray(tables[1].row_sequences())]

    def step(planes, layers, positions, pages, row_ends):
        table = k.PageTable.from_rows(pages, row_ends)
        return tuple(built(TWO_LEVELS).step(planes, layers, positions, {1: table}).selections.values())

    owner = k.LayerInputs(ROWS, ROWS, ROWS, WHOLE)  # queries, weights and keys by rows, one norm for all
    specs = {n: owner if x.keys is not None else k.LayerInputs(ROWS, ROWS) for n, x in layers.items()}
    shards = jax.shard_map(step, mesh=MESH, in_specs=(WHOLE, specs, ROWS, ROWS, ROWS), out_specs=ROWS)
    args = planes, layers, positions, pages, tables[1].row_ends
    assert same(jax.jit(shards)(*args), jax.jit(step)(*args))
