"""One compiled step, called again: no retrace, no stale result, in this process and in fresh ones; donated planes."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from steps import FEW, TWO_LEVELS, built, random_problem, same

import k2i_jax as k

MIXED = {1: "page8", 2: "page64"}
TOKENS = ([300, 65], [70, 129])  # of A and of B, each with other pages, keys and queries


def problems(spec=FEW):
    return [random_problem(seed, spec, tokens, [6, 6], layouts=MIXED) for seed, tokens in enumerate(TOKENS)]


def eager_step(spec, planes, layers, positions, tables):
    """The step from its public parts, none of them inside another's jit."""
    rotations = lambda p: k.rope_rotations(p, spec.frequencies)
    planes, selections, candidates = dict(planes), {}, None
    for entry in spec.schedule:
        inputs, table = layers[entry.layer], tables[entry.ratio]
        if entry.owns_keys:
            at = positions // entry.ratio * entry.ratio
            keys = k.index_keys(inputs.keys, inputs.norm_weight, rotations(at), eps=spec.norm_eps)
            slots = k.key_slots(table, positions, ratio=entry.ratio)
            planes[entry.layer] = k.write_keys(planes[entry.layer], slots, keys, skip_slot_zero=True)
        queries = k.index_queries(inputs.queries, rotations(positions))
        weights = k.head_weights(inputs.weights, scale=spec.weight_scale)
        args = queries, weights, planes[entry.keys]
        if entry.role == "reindex":
            logits = k.candidate_logits(*args, candidates)
            selections[entry.layer] = k.select_topk(logits, candidates, k=spec.topk)
            continue
        logits = k.index_logits(*args, table)
        selections[entry.layer] = k.select_topk(logits, table, k=spec.topk)
        if entry.role == "source":
            blocks = k.select_candidate_blocks(logits, table.live_ends(), topk_blocks=spec.topk_blocks)
            candidates = k.candidate_table(blocks, table)
    return planes, selections, candidates


def parts(result):
    return result.planes, result.selections, result.candidates


def digest(tree) -> str:
    return hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(tree))).hexdigest()


def test_200_replays():
    """A, B, A, ... with other tables, lengths, keys: always what the eager parts give, from one trace."""
    both, traces = problems(), []
    expected = [eager_step(FEW, *problem.args) for problem in both]
    assert not same(expected[0][1], expected[1][1])
    k2i = k.build_k2i(FEW)

    @jax.jit
    def step(*args):
        traces.append(1)
        return k2i.step(*args)

    for i in range(200):
        assert same(parts(step(*both[i % 2].args)), expected[i % 2])
    assert len(traces) == step._cache_size() == 1


def test_donated_planes_are_replaced():
    """With ``donate`` the old planes are gone and the new ones are right, call after call, from one trace."""
    both = problems(TWO_LEVELS)
    k2i, plain = k.build_k2i(TWO_LEVELS, donate=True), built(TWO_LEVELS)
    for problem in (*both, both[0]):
        copies = jax.tree.map(jnp.array, problem.planes)
        expected = plain.step(*problem.args)
        found = k2i.step(copies, *problem.args[1:])
        assert same(parts(found), parts(expected))
        again = k2i.step(found.planes, *problem.args[1:])  # the same keys once more: nothing changes
        assert same(parts(again), parts(expected))
        assert all(x.is_deleted() for x in jax.tree.leaves((copies, found.planes)))
    assert k2i.step._cache_size() == 1


def test_64_bit_mode():
    """With ``jax_enable_x64`` and 64-bit positions: the same bits in the same 32-bit types or narrower ones."""
    problem = problems(TWO_LEVELS)[0]
    expected = parts(built(TWO_LEVELS).step(*problem.args))
    with jax.enable_x64(True):
        wide = problem.positions.astype(np.int64)
        found = parts(k.build_k2i(TWO_LEVELS).step(problem.planes, problem.layers, wide, problem.tables))
    assert [x.dtype for x in jax.tree.leaves(found)] == [x.dtype for x in jax.tree.leaves(expected)]
    assert same(found, expected)


@pytest.mark.long
def test_fresh_processes_agree():
    """Three new processes make the bytes that this one makes."""
    k2i = built(TWO_LEVELS)
    here = [digest(parts(k2i.step(*problem.args))) for problem in problems(TWO_LEVELS)]
    script = (
        "from test_step_replay import *\n"
        "k2i = k.build_k2i(TWO_LEVELS)\n"
        "a, b = problems(TWO_LEVELS)\n"
        "print(*(digest(parts(k2i.step(*p.args))) for p in (a, b, a)))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    started = [
        subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for process in started:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0
        assert output.split() == [here[0], here[1], here[0]]
