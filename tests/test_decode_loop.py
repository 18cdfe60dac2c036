"""A decode loop inside one ``lax.scan``: keys appended, pages allocated, drafts verified, rejected and overwritten.

Two sequences, six rows each a step (one token and five drafts). A random number of the drafts is accepted; the pools
are truncated to what was, and the next step's keys go over the rejected ones'. The same loop in Python, with a model of
the memory that knows no pages, says what each step must read and select.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from cases import random_fp4
from steps import FEW, bf16, same

import k2i_jax as k
from k2i_jax import reference

SPEC, ROWS, SEQUENCES, STEPS = FEW, 6, 2, 86  # 3.5 tokens a step on average: 300 tokens
WIDTH, PAGES = 8, 15


def inputs(step):
    """Every step's finished keys and queries: another step writes another key at the same position."""
    layers = {}
    for entry in SPEC.schedule:
        rng = np.random.default_rng([step, entry.layer])
        rows = SEQUENCES * ROWS
        weights = rng.integers(-3, 4, (rows, SPEC.heads)).astype(np.float32)
        keys = random_fp4(rng, rows, scales=(125, 126)) if entry.owns_keys else None
        layers[entry.layer] = k.LayerInputs(random_fp4(rng, rows, SPEC.heads, scales=(125, 126)), weights, keys)
    return layers


def advance(k2i, state, layers, accepted):
    """One step: append, look up, truncate to the accepted tokens."""
    planes, pools, lengths = state
    tables, ok = {}, []
    for ratio in SPEC.ratios:
        new = (lengths + ROWS) // ratio - lengths // ratio
        pools = {**pools, ratio: (appended := k.append(pools[ratio], new, max_new=ROWS))[0]}
        ok.append(appended[1].ok)
        ends = k.verify_row_ends(lengths, ROWS, ratio=ratio)
        tables[ratio] = k.PageTable.from_verify(pools[ratio].pages, ends, ROWS)
    positions = (lengths[:, None] + jnp.arange(ROWS, dtype=jnp.int32)).reshape(-1)
    result = k2i.step(planes, layers, positions, tables)
    lengths = lengths + accepted
    pools = {ratio: k.truncate(pool, lengths // ratio) for ratio, pool in pools.items()}
    return (result.planes, pools, lengths), (result.selections, jnp.stack(ok))


def start():
    planes = {
        entry.layer: k.IndexKPlane.zeros(PAGES, "page8" if entry.ratio == 1 else "page64")
        for entry in SPEC.schedule
        if entry.owns_keys
    }
    pools = {ratio: k.PagePool.create(PAGES, SEQUENCES, WIDTH) for ratio in SPEC.ratios}
    return planes, pools, jnp.zeros(SEQUENCES, jnp.int32)


class Memory:
    """What each sequence's keys must be, by position, as float64; and what a step must select."""

    def __init__(self):
        self.keys = {entry.layer: [{} for _ in range(SEQUENCES)] for entry in SPEC.schedule if entry.owns_keys}
        self.lengths = [0] * SEQUENCES

    def step(self, layers, accepted):
        selected, blocks = {}, {}
        for entry in SPEC.schedule:
            data = layers[entry.layer]
            queries = reference.dequantize(data.queries.payload, data.queries.scale)
            if entry.owns_keys:
                values = reference.dequantize(data.keys.payload, data.keys.scale)
                for s in range(SEQUENCES):
                    for row in range(ROWS):
                        position = self.lengths[s] + row
                        if (position + 1) % entry.ratio == 0:
                            self.keys[entry.layer][s][position // entry.ratio] = values[s * ROWS + row]
            chosen = []
            for s in range(SEQUENCES):
                held = self.keys[entry.keys][s]
                for row in range(ROWS):
                    end = (self.lengths[s] + row + 1) // entry.ratio
                    keys = np.array([held[j] for j in range(end)]).reshape(end, 128)
                    index = s * ROWS + row
                    dots = np.maximum(queries[index] @ keys.T, 0)
                    logits = (bf16(data.weights[index]) @ dots)[None]
                    if entry.role == "source":
                        blocks[index] = set(reference.select_candidate_blocks(logits, [end], SPEC.topk_blocks)[0])
                    allowed = [blocks[index]] if entry.role == "reindex" else None
                    chosen += reference.select_topk(logits, [end], SPEC.topk, allowed)
            selected[entry.layer] = chosen
        self.lengths = [n + a for n, a in zip(self.lengths, accepted, strict=True)]
        return selected


def test_300_tokens_in_a_scan():
    rng = np.random.default_rng(0)
    accepted = rng.integers(1, ROWS + 1, (STEPS, SEQUENCES)).astype(np.int32)
    assert accepted.sum(axis=0).min() >= 290
    layers = [inputs(step) for step in range(STEPS)]
    k2i, traces = k.build_k2i(SPEC, True), []

    @functools.partial(jax.jit, donate_argnums=0)
    def loop(state, layers, accepted):
        def body(state, step):
            traces.append(1)
            return advance(k2i, state, *step)

        return jax.lax.scan(body, state, (layers, accepted))

    stacked = jax.tree.map(lambda *x: jnp.stack(x), *layers)
    state = start()
    (planes, pools, lengths), (selections, ok) = loop(state, stacked, accepted)
    assert len(traces) == 1
    assert jax.tree.leaves(state[0])[0].is_deleted()  # the pools were donated, not copied
    assert np.asarray(ok).all()
    assert np.array_equal(lengths, accepted.sum(axis=0))

    # Step by step: the same slots, the same pages in the end, and in positions what a memory without pages selects.
    memory, eager = Memory(), start()
    for step in range(STEPS):
        eager, (found, _) = advance(k2i, eager, layers[step], accepted[step])
        assert same(jax.tree.map(lambda x, i=step: x[i], selections), found), f"step {step}"
        wanted = memory.step(layers[step], accepted[step].tolist())
        for layer, rows in wanted.items():
            padded = [row + [-1] * (SPEC.topk - len(row)) for row in rows]
            assert np.asarray(found[layer].positions).tolist() == padded, f"step {step}, layer {layer}"
    assert same((planes, pools, lengths), eager)
