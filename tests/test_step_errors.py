"""What build_k2i, its lookups and its step refuse, by whose name; mostly traced alone, as a call would be."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import random_batch, random_fp4
from steps import FEW, built, random_problem, same

import k2i_jax as k
from k2i_jax import PageTable

MIXED = {1: "page8", 2: "page64"}


def few_problem(**options):
    return random_problem(7, FEW, [20, 9], [1, 1], columns=1, **options)


def test_page8_speaks_of_the_ratio_1_plane():
    mixed, page64 = few_problem(layouts=MIXED), few_problem()
    page8 = few_problem(layouts="page8")
    shapes = lambda k2i, problem: jax.eval_shape(k2i.step, *problem.args)  # traces, as a call would
    for k2i, problem in ((built(FEW), mixed), (built(FEW), page64), (built(FEW), page8)):
        shapes(k2i, problem)
    shapes(built(FEW, True), mixed)
    shapes(built(FEW, False), page64)
    for k2i, problem, message in (
        (built(FEW, True), page64, "planes[3]: page8=True means page8 for keys of ratio 1, got page64; repack(plane"),
        (built(FEW, False), mixed, "planes[3]: page8=False means page64 for keys of ratio 1, got page8"),
        (built(FEW, True), page8, "planes[1]: page8=True means page64 for keys of ratio 2, got page8"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            shapes(k2i, problem)
    batch = random_batch(0, [9], heads=16, columns=1)
    with pytest.raises(ValueError, match="plane: page8=True means page8 for keys of ratio 1, got page64"):
        built(FEW, True).source(*batch.args)
    built(FEW, True).full(*batch.args, ratio=2)
    with pytest.raises(ValueError, match="plane: page8=True means page64 for keys of ratio 2, got page8"):
        built(FEW, True).full(*batch.in_layout("page8").args, ratio=2)


def test_errors_of_step():
    problem = few_problem()
    planes, layers, positions, tables = problem.args
    step = functools.partial(jax.eval_shape, built(FEW).step)
    edit = lambda layer, **changes: {**layers, layer: dataclasses.replace(layers[layer], **changes)}
    wide = PageTable.from_rows(np.zeros((3, 1), int), [1, 1, 1])
    other = random_fp4(np.random.default_rng(0), 5, 16)
    for args, message in (
        (({1: planes[1]}, layers, positions, tables), "planes: expected keys [1, 3], got [1]"),
        ((planes, {1: layers[1]}, positions, tables), "layers: expected keys [1, 3, 4], got [1]"),
        ((planes, layers, positions, {1: tables[1]}), "tables: expected keys [1, 2], got [1]"),
        ((planes, layers, positions, {**tables, 1: wide}), "tables[1].row_ends: expected shape [2], got [3]"),
        ((planes, edit(4, keys=layers[3].keys), positions, tables), "layers[4].keys: layer 4 scores layer 3's keys"),
        ((planes, edit(3, norm_weight=None), positions, tables), "layers[3].norm_weight: expected k_norm.weight [128]"),
        ((planes, edit(3, keys=jnp.zeros((5, 128))), positions, tables), "layers[3].keys: expected shape [2, 128]"),
        ((planes, edit(3, queries=jnp.zeros((2, 9, 128))), positions, tables), "layers[3].queries: expected shape"),
        ((planes, edit(4, weights=jnp.zeros((2, 32))), positions, tables), "layers[4].weights: expected shape [2, 16]"),
        ((planes, edit(3, queries=jnp.zeros((5, 16, 128))), positions, tables), "layers[3].queries: expected shape [2"),
        ((planes, edit(3, queries=other), positions, tables), "layers[3].queries.payload: expected shape [2, 16, 64]"),
        ((planes, edit(3, keys=other), positions, tables), "layers[3].keys.payload: expected shape [2, 64]"),
        ((planes, edit(3, norm_weight=jnp.ones(64)), positions, tables), "layers[3].norm_weight: expected shape [128]"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(message)):
            step(*args)
    for args, message in (
        (([planes[1]], layers, positions, tables), r"planes: expected a dict with keys \[1, 3\], got list"),
        ((planes, {**layers, 4: (1, 2)}, positions, tables), r"layers\[4\]: expected a k2i_jax.LayerInputs, got tuple"),
        ((planes, layers, positions * 1.0, tables), "positions: expected an integer array"),
        ((planes, layers, positions, {**tables, 2: (1, 2)}), r"tables\[2\]: expected a k2i_jax.PageTable, got tuple"),
        ((planes, edit(3, queries=None), positions, tables), r"layers\[3\].queries: expected an array .*NoneType"),
        ((planes, edit(3, queries=jnp.zeros((2, 16, 128), int)), positions, tables), r"layers\[3\].queries: .*int32"),
        ((planes, edit(3, weights=positions), positions, tables), r"layers\[3\].weights: expected float32 or bfloat16"),
    ):
        with pytest.raises(TypeError, match=message):
            step(*args)
    with pytest.raises(ValueError, match="key_positions, key_slots: expected both or neither"):
        step(*problem.args, key_positions=positions)
    with pytest.raises(ValueError, match=r"key_slots\[2\]: expected shape \[2\], got \[3\]"):
        step(*problem.args, key_positions=positions, key_slots={1: positions, 2: np.zeros(3, int)})


def test_wide_integers_reach_step_unwrapped():
    """64-bit slots and positions past the pool write nothing; wrapped, they were slot 69 and position 3."""
    problem = few_problem()
    far = np.full(2, 2**32 + 69)
    step = lambda **given: built(FEW).step(*problem.args, **given).planes
    wide = step(key_positions=np.full(2, 2**32 + 3), key_slots={1: far, 2: far})
    assert same(wide, problem.planes)
    assert same(wide, step(key_positions=np.full(2, 3), key_slots={1: np.full(2, -1), 2: np.full(2, -1)}))
    near = step(key_positions=np.full(2, 3), key_slots={1: np.full(2, 69), 2: np.full(2, 69)})
    assert not same(near, problem.planes)


def test_errors_of_building_and_lookups():
    batch = random_batch(0, [300], heads=16, columns=5)
    k2i = built(FEW)
    with pytest.raises(TypeError, match=r"spec: expected a k2i_jax.K2iSpec, got int"):
        k.build_k2i(3)
    with pytest.raises(TypeError, match="page8: expected None, True or False, got 'page8'"):
        k.build_k2i(FEW, "page8")
    with pytest.raises(ValueError, match=r"implementation: expected None or one of .* got 'cuda'"):
        k.build_k2i(FEW, implementation="cuda")
    with pytest.raises(ValueError, match="interpret: runs the Pallas kernels; implementation='xla'"):
        k.build_k2i(FEW, implementation="xla", interpret=True)
    with pytest.raises(TypeError, match="page8: expected None, True or False, got 1"):
        k.build_k2i(FEW, 1)
    with pytest.raises(ValueError, match="candidates: a page table of 320 positions is no candidate table"):
        k2i.reindex(batch.queries, batch.weights, batch.plane, batch.table)
    with pytest.raises(ValueError, match=r"ratio: expected one of the spec's \[1, 2\], got 4"):
        k2i.full(*batch.args, ratio=4)
    with pytest.raises(TypeError, match=r"queries: expected a k2i_jax.FP4Array"):
        k2i.full(batch.queries.payload, *batch.args[1:])
    with pytest.raises(ValueError, match=r"weights: expected shape \[1, 16\], got \[1, 8\]"):
        k2i.full(batch.queries, batch.weights[:, :8], *batch.args[2:])
