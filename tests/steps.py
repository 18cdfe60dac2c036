"""Whole steps for the tests: random problems whose sums are exact in float32, and the same step in NumPy.

Weights are small integers and scales lie close together, so float32 and float64 give the same logits, ties included:
selections must agree exactly, whatever rounds where.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from cases import bits, packed_plane, random_fp4

import k2i_jax as k
from k2i_jax import reference

PADDING = np.array([0, -1, 2**31 - 1, -(2**31)])
FEW = k.K2iSpec(  # one layer of each kind, small numbers
    num_layers=6, full_layers=((1, 2), (3, 1)), source_layer=3, reindex_layers=(4,), heads=16, topk=20, topk_blocks=4,
    weight_scale=1.0,
)  # fmt: skip
TWO_LEVELS = dataclasses.replace(FEW, full_layers=((3, 1),))  # a source and one layer that reindexes


@functools.cache
def built(spec, page8=None, **options) -> k.K2i:
    return k.build_k2i(spec, page8, **options)


def same(found, expected) -> bool:
    """Whether two pytrees hold the same bits."""
    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    return len(found) == len(expected) and all(
        np.array_equal(bits(x), bits(y)) for x, y in zip(found, expected, strict=True)
    )


class Problem(NamedTuple):
    """Arguments of ``step``, and per owner layer the keys that were in the plane before."""

    planes: dict[int, k.IndexKPlane]
    layers: dict[int, k.LayerInputs]
    positions: np.ndarray
    tables: dict[int, k.PageTable]
    old: dict[int, tuple[np.ndarray, k.FP4Array]]

    @property
    def args(self):
        return self[:4]


def random_problem(
    seed: int,
    spec: k.K2iSpec,
    tokens,
    rows,
    *,
    total_rows: int | None = None,
    columns: int = 5,
    num_pages: int = 24,
    layouts: Any = "page64",
    raw: bool = True,
) -> Problem:
    """Sequences of ``tokens`` tokens, of which the last ``rows`` are this step's; rows past them are padding.

    Args:
      layouts: one for all planes, or by ratio.
      raw: whether projections come as floats, for the chain, or finished as FP4.
    """
    rng = np.random.default_rng(seed)
    starts = np.concatenate([[0], np.cumsum(rows)])
    total = total_rows or int(starts[-1])
    positions = rng.integers(-5, 500, total).astype(np.int32)  # of padded rows: anything
    for s, (length, count) in enumerate(zip(tokens, rows, strict=True)):
        positions[starts[s] : starts[s + 1]] = np.arange(length - count, length)
    tables, pages_of = {}, {}
    for ratio in spec.ratios:
        pages = rng.choice(PADDING, (len(tokens), columns)).astype(np.int32)
        free = list(rng.permutation(np.arange(1, num_pages)))
        for s, length in enumerate(tokens):
            used = -(-(length // ratio) // 64)
            pages[s, :used] = [free.pop() for _ in range(used)]
        ends = np.maximum(positions + 1, 0) // ratio
        ends[starts[-1] :] = rng.integers(-3, 99, total - starts[-1])
        tables[ratio], pages_of[ratio] = k.PageTable.from_arrays(pages, ends, starts), pages
    planes, layers, old = {}, {}, {}
    for entry in spec.schedule:
        weights = jnp.asarray(rng.integers(-3, 4, (total, spec.heads)), jnp.bfloat16)
        queries = rng.standard_normal((total, spec.heads, 128)), (total, spec.heads)
        inputs = [_floats(queries[0]) if raw else random_fp4(rng, *queries[1], scales=(125, 126)), weights, None, None]
        if entry.owns_keys:
            slots = [
                pages_of[entry.ratio][s, j // 64].astype(np.int64) * 64 + j % 64
                for s, (length, count) in enumerate(zip(tokens, rows, strict=True))
                for j in range((length - count) // entry.ratio)
            ]
            stored = random_fp4(rng, len(slots), scales=(125, 126))
            layout = layouts if isinstance(layouts, str) else layouts[entry.ratio]
            old[entry.layer] = np.array(slots, np.int64), stored
            planes[entry.layer] = packed_plane(layout, num_pages, slots, stored.payload, stored.scale)
            if raw:
                inputs[2:] = _floats(rng.standard_normal((total, 128))), _floats(rng.choice([0.5, 1, -1], 128))
            else:
                inputs[2] = random_fp4(rng, total, scales=(125, 126))
        layers[entry.layer] = k.LayerInputs(*inputs)
    return Problem(planes, layers, positions, tables, old)


def _floats(x):
    return jnp.asarray(x, jnp.bfloat16)


# --- the step in NumPy ------------------------------------------------------------------------------------------------


def bf16(x):
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def fp4_by_grid(x: np.ndarray, floor: float) -> k.FP4Array:
    """The nearest grid point of each value, ties to the even code; 32 share 2^e, the least with 6 * 2^e >= amax."""
    groups = np.asarray(x, np.float64).reshape(*x.shape[:-1], -1, 32)
    amax = np.maximum(np.abs(groups).max(axis=-1), floor)
    exponent = np.ceil(np.log2(amax / 6))  # float64: off by one at most, next to a power of two
    exponent += 6 * 2.0**exponent < amax
    exponent -= 6 * 2.0 ** (exponent - 1) >= amax
    distance = np.abs(np.abs(groups / 2.0 ** exponent[..., None])[..., None] - reference.GRID)
    tie_breaker = np.array([0, 1, 0, 1, 0, 1, 0, 1]) * 1e-9
    codes = np.argmin(distance + tie_breaker, axis=-1)
    codes = (codes + 8 * ((groups < 0) & (codes > 0))).reshape(*x.shape[:-1], -1, 2).astype(np.uint8)
    return k.FP4Array(codes[..., 0] | codes[..., 1] << 4, (exponent + 127).astype(np.uint8))


def rotated(x, rotations):
    tail = x[..., 64:].reshape(*x.shape[:-1], 32, 2)
    real, imaginary = rotations[..., 0], rotations[..., 1]
    even, odd = tail[..., 0], tail[..., 1]
    turned = np.stack([even * real - odd * imaginary, even * imaginary + odd * real], axis=-1)
    return np.concatenate([x[..., :64], bf16(turned).reshape(*x.shape[:-1], 64)], axis=-1)


def rotations_of(spec, positions):
    angles = (positions.astype(np.float32)[:, None] * spec.frequencies).astype(np.float64)
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)


def packed(x) -> k.FP4Array:
    """Quantised twice, as the chain does."""
    first = fp4_by_grid(x, 6 * 2.0**-126)
    return fp4_by_grid(reference.dequantize(first.payload, first.scale), 6 * 2.0**-13)


def numpy_keys(spec, x, weight, positions) -> k.FP4Array:
    x, total = np.asarray(x, np.float32), np.asarray(x, np.float32) ** 2
    while total.shape[-1] > 1:
        total = total[..., : total.shape[-1] // 2] + total[..., total.shape[-1] // 2 :]
    inverse = np.float32(1) / np.sqrt(total / np.float32(128) + np.float32(spec.norm_eps))
    return packed(rotated(bf16(np.asarray(weight, np.float32) * (x * inverse)), rotations_of(spec, positions)))


def numpy_queries(spec, x, positions) -> k.FP4Array:
    return packed(rotated(np.asarray(x, np.float32), rotations_of(spec, positions)[:, None]))


def numpy_step(spec: k.K2iSpec, problem: Problem):
    """Planes, selections (positions and slots, as lists) and candidate ids, from ``reference`` and the above."""
    planes, found, allowed = {}, {}, None
    for entry in spec.schedule:
        inputs, table = problem.layers[entry.layer], problem.tables[entry.ratio]
        raw = not isinstance(inputs.queries, k.FP4Array)
        queries = numpy_queries(spec, inputs.queries, problem.positions) if raw else inputs.queries
        sees = [reference.row_slots(table, row) for row in range(len(problem.positions))]
        if entry.owns_keys:
            planes[entry.layer] = _written(spec, entry, problem, sees)
        weights = bf16(np.asarray(inputs.weights, np.float32) * np.float32(spec.weight_scale))
        logits, _ = reference.index_logits(queries, weights, planes[entry.keys], table)
        ends = [len(x) for x in sees]
        if entry.role == "source":
            allowed = [set(x) for x in reference.select_candidate_blocks(logits, ends, spec.topk_blocks)]
        positions = reference.select_topk(logits, ends, spec.topk, allowed if entry.role == "reindex" else None)
        slots = [[sees[row][p] for p in chosen] for row, chosen in enumerate(positions)]
        found[entry.layer] = positions, slots
    return planes, found, allowed


def _written(spec, entry, problem, sees) -> k.IndexKPlane:
    """The plane with old and new keys, every other byte as it was."""
    inputs, positions, ratio = problem.layers[entry.layer], problem.positions, entry.ratio
    keys = inputs.keys
    if not isinstance(keys, k.FP4Array):
        keys = numpy_keys(spec, keys, inputs.norm_weight, positions // ratio * ratio)
    slots, old = problem.old[entry.layer]
    rows = [
        row
        for row, p in enumerate(positions.tolist())
        if p >= 0 and (p + 1) % ratio == 0 and p // ratio < len(sees[row])
    ]
    slots = np.append(slots, [sees[row][positions[row] // ratio] for row in rows]).astype(np.int64)
    assert len(set(slots.tolist())) == len(slots)
    before = problem.planes[entry.layer]
    payload = np.concatenate([old.payload, np.asarray(keys.payload)[rows]])
    scale = np.concatenate([old.scale, np.asarray(keys.scale)[rows]])
    return packed_plane(before.layout, before.num_pages, slots, payload, scale)


def check_against_numpy(spec: k.K2iSpec, problem: Problem, result: k.StepResult):
    planes, found, allowed = numpy_step(spec, problem)
    for layer, plane in planes.items():
        assert same(result.planes[layer], plane), f"plane of layer {layer}"
    for layer, (positions, slots) in found.items():
        selection = result.selections[layer]
        assert selection.count.tolist() == [len(x) for x in positions]
        for ours, expected in ((selection.positions, positions), (selection.slots, slots)):
            padded = [x + [-1] * (spec.topk - len(x)) for x in expected]
            assert np.asarray(ours).tolist() == padded, f"layer {layer}"
    if isinstance(result.candidates, k.CandidateTable):
        ids = [sorted(x) for x in allowed]
        assert [[i for i in row if i >= 0] for row in np.asarray(result.candidates.ids).tolist()] == ids
