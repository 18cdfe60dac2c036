"""The score in plain JAX: gather 1024 keys, decode, multiply, sum over heads; one row at a time.

The same bits whatever surrounds a key. Each (row, tile) runs one loop body of one static shape, and nothing in it
depends on where in the tile a key lies:

- a dot never spans two scale groups and takes bare codes. Its products are multiples of 1/4 up to 36, so the dot is
  exact in any order and in any precision that holds e2m1 exactly (bfloat16 does). The scales follow, as powers of
  two, so that nothing overflows or vanishes on the way to a sum that f32 holds;
- the four groups are added as (0 + 1) + (2 + 3), the heads by halving. The barrier before the heads' sum keeps
  the compiler from contracting a product and an addition into one rounding.

A scale byte 255 makes its own column NaN. Memory: one tile of 1024 keys (1.3 MB at 32 heads) beyond inputs
and output.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from k2i_jax._varying import varying
from k2i_jax.fp4 import FP4Array, decode_e2m1, scale_by_powers
from k2i_jax.layout import PAGE_SIZE, SCALE_BYTES, SUB_PAGE_SIZE, gather_keys
from k2i_jax.plane import IndexKPlane

TILE = 1024  # keys a step


def _operand(payload, scale):
    """``u8[n, 4, 16], u8[n, 4] -> f32[4, n, 16] twice, i32[4, n]``: codes of the even and odd dims, scale bytes."""
    payload = payload.transpose(1, 0, 2)
    return decode_e2m1(payload & 15), decode_e2m1(payload >> 4), scale.T.astype(jnp.int32)


def _dots(query, key):
    """Operands of H queries and n keys ``-> f32[H, n]``: relu of the dot products."""

    def half(q, k):
        dims = (((2,), (2,)), ((0,), (0,)))
        return lax.dot_general(q, k, dims, precision=lax.Precision.DEFAULT, preferred_element_type=jnp.float32)

    q_scale, k_scale = query[2][:, :, None], key[2][:, None, :]
    groups = scale_by_powers(half(query[0], key[0]) + half(query[1], key[1]), q_scale + k_scale - 254)
    groups = jnp.where((q_scale == 255) | (k_scale == 255), jnp.nan, groups)
    return jnp.maximum((groups[0] + groups[1]) + (groups[2] + groups[3]), 0.0)


def _sum_heads(x):
    while x.shape[0] > 1:
        half = x.shape[0] // 2
        pairs = x[:half] + x[half : 2 * half]
        x = jnp.concatenate([pairs, x[2 * half :]]) if x.shape[0] % 2 else pairs
    return x[0]


class _Source:
    """Where the columns of each row come from: ``unit`` consecutive keys per table entry (64 or 8)."""

    def __init__(self, plane: IndexKPlane, entries, row_entries, ends, unit: int):
        """``entries`` i32[S, E] in units of ``unit`` slots; ``row_entries`` i32[R] the row of it each row uses."""
        self.step = TILE // unit  # entries a tile
        self.width = entries.shape[1] * unit
        if entries.shape[1] < self.step:
            entries = jnp.pad(entries, ((0, 0), (0, self.step - entries.shape[1])), constant_values=-1)
        self.plane, self.entries, self.row_entries, self.ends, self.unit = (
            plane,
            entries,
            row_entries,
            ends,
            unit,
        )

    @property
    def operands(self):
        return self.plane, self.entries, self.row_entries, self.ends

    def tiles(self, row):
        """Tiles that hold a live column of ``row``."""
        return (self.ends[row] + TILE - 1) // TILE

    def load(self, row, tile):
        """Payload u8[TILE, 4, 16], scale u8[TILE, 4], live bool[TILE] and the first column of a tile.

        The last tile is moved back so that it ends with the table: its columns are computed twice, to equal bits.
        """
        first = jnp.minimum(tile * self.step, self.entries.shape[1] - self.step)
        entry = lax.dynamic_slice(self.entries, (self.row_entries[row], first), (1, self.step))[0]
        live = (entry >= 0) & (entry < self.plane.num_pages * (PAGE_SIZE // self.unit))
        entry = jnp.where(live, entry, 0)
        per_page = PAGE_SIZE // self.unit
        page, key = entry // per_page, entry % per_page * self.unit
        payload, scale = gather_keys(self.plane.layout, self.plane.payload, self.plane.scale, page, key, self.unit)
        column = first * self.unit + jnp.arange(TILE, dtype=jnp.int32)
        live = jnp.repeat(live, self.unit) & (column < self.ends[row])
        return (
            payload.reshape(TILE, SCALE_BYTES, 16),
            scale.reshape(TILE, SCALE_BYTES),
            live,
            first * self.unit,
        )


def _queries(queries: FP4Array, row):
    payload = queries.payload[row]
    return _operand(payload.reshape(payload.shape[0], SCALE_BYTES, 16), queries.scale[row])


def _tile_dots(query, source: _Source, row, tile):
    payload, scale, live, first = source.load(row, tile)
    query, key = lax.optimization_barrier((query, _operand(payload, scale)))
    return _dots(query, key), live, first


def _loop(count, body, init):
    """``lax.fori_loop`` from 0 with an int32 counter, also where 64-bit integers are on."""
    return lax.fori_loop(jnp.int32(0), jnp.asarray(count, jnp.int32), body, init)


def _score(queries: FP4Array, weights, source: _Source) -> Float32[Array, "rows width"]:
    rows = weights.shape[0]

    def score_row(row, out):
        query = _queries(queries, row)

        def score_tile(tile, out):
            dots, live, first = _tile_dots(query, source, row, tile)
            products = lax.optimization_barrier(dots * weights[row][:, None])
            logits = jnp.where(live, _sum_heads(products), -jnp.inf)
            return lax.dynamic_update_slice(out, logits[None], (row, first))

        return _loop(source.tiles(row), score_tile, out)

    out = jnp.full((rows, source.entries.shape[1] * source.unit), -jnp.inf, jnp.float32)
    out = varying(out, queries, weights, source.operands)
    return _loop(rows, score_row, out)[:, : source.width]


def _weight_gradient(queries: FP4Array, source: _Source, gradient) -> Float32[Array, "rows heads"]:
    """``sum over live columns of gradient * relu(q . k)``, tile by tile."""
    rows, heads = queries.payload.shape[:2]
    gradient = jnp.pad(gradient, ((0, 0), (0, max(0, TILE - gradient.shape[1]))))

    def row_gradient(row, out):
        query = _queries(queries, row)

        def tile_gradient(tile, total):
            dots, live, first = _tile_dots(query, source, row, tile)
            live &= first + jnp.arange(TILE) >= tile * TILE  # a tile that was moved back overlaps the one before
            part = lax.dynamic_slice(gradient, (row, first), (1, TILE))[0]
            live &= part != 0  # also where a scale byte 255 made the logit NaN: that column's weight is then nothing
            return total + jnp.where(live, dots, 0.0) @ jnp.where(live, part, 0.0)

        total = _loop(source.tiles(row), tile_gradient, jnp.zeros_like(out[0]))
        return out.at[row].set(total)

    out = varying(jnp.zeros((rows, heads), jnp.float32), queries, source.operands, gradient)
    return _loop(rows, row_gradient, out)


def _full_source(plane, table) -> _Source:
    return _Source(plane, table.pages, jnp.maximum(table.row_sequences(), 0), table.live_ends(), PAGE_SIZE)


def _candidate_source(plane, candidates) -> _Source:
    rows, blocks = candidates.virtual_pages.shape
    ends = jnp.clip(candidates.row_ends, 0, blocks * SUB_PAGE_SIZE)
    return _Source(plane, candidates.virtual_pages, jnp.arange(rows, dtype=jnp.int32), ends, SUB_PAGE_SIZE)


def index_logits(queries: FP4Array, weights, plane, table) -> Float32[Array, "rows width"]:
    return _score(queries, weights, _full_source(plane, table))


def candidate_logits(queries: FP4Array, weights, plane, candidates) -> Float32[Array, "rows width"]:
    return _score(queries, weights, _candidate_source(plane, candidates))


def index_weight_gradient(queries: FP4Array, plane, table, gradient) -> Float32[Array, "rows heads"]:
    return _weight_gradient(queries, _full_source(plane, table), gradient)


def candidate_weight_gradient(queries: FP4Array, plane, candidates, gradient) -> Float32[Array, "rows heads"]:
    return _weight_gradient(queries, _candidate_source(plane, candidates), gradient)
