"""The score, ``logit[r, j] = sum_h w[r, h] * relu(q[r, h] . k[j])``: validation, choice of implementation, gradient.

DeepGEMM and aiter call it ``paged_mqa_logits``.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from k2i_jax._check import AnyArray, check_array
from k2i_jax.candidates import CandidateTable, check_candidates
from k2i_jax.fp4 import FP4Array
from k2i_jax.implementations import IMPLEMENTATIONS
from k2i_jax.kernels import xla
from k2i_jax.layout import PAYLOAD_BYTES, SCALE_BYTES
from k2i_jax.page_table import PageTable, check_table
from k2i_jax.plane import IndexKPlane, check_plane

MAX_HEADS = 128


def index_logits(
    queries: FP4Array,
    weights: Float[AnyArray, "rows heads"],
    plane: IndexKPlane,
    table: PageTable,
    *,
    weight_scale: Any = 1.0,
    implementation: str | None = None,
    interpret: bool = False,
) -> Float32[Array, "rows 64*P"]:
    """Scores every position that each row sees (FULL; DeepGEMM's and aiter's ``paged_mqa_logits``).

    Args:
      queries: payload u8[rows, H, 64], scale u8[rows, H, 4]; H a multiple of 16, at most 128.
      weights: f32 or bf16 [rows, H]; V4.1's hold ``128^-0.5 * H^-0.5`` already.
      plane: the keys.
      table: page ids and row ends of the same rows.
      weight_scale: multiplies the weights, in float32.
      implementation: None (the best for the device the code is lowered for) or a name.
      interpret: run the Pallas kernels in interpret mode, on any host.

    Returns:
      f32[rows, 64 P]. Exactly -inf at and past a row's end, and where a page id lies outside the plane.
      Differentiable with respect to ``weights`` and ``weight_scale`` (reverse mode); nothing else has a gradient.

    Raises:
      TypeError, ValueError: wrong types or shapes, or an implementation that does not exist or cannot do this.
    """
    check_plane(plane)
    check_table(table)
    weights = _check_queries(queries, weights, table.row_ends.shape[0])
    _check_implementation(implementation, interpret)
    return _index_logits(queries, weights, plane, table, weight_scale, implementation=implementation)


def candidate_logits(
    queries: FP4Array,
    weights: Float[AnyArray, "rows heads"],
    plane: IndexKPlane,
    candidate_table: CandidateTable,
    *,
    weight_scale: Any = 1.0,
    implementation: str | None = None,
    interpret: bool = False,
) -> Float32[Array, "rows 8*B"]:
    """Scores the candidate blocks of each row only (REINDEX): column ``8 i + t`` is position ``8 ids[i] + t``.

    The bits are :func:`index_logits`' at the same positions. The arguments are its, with ``candidate_table`` (see
    ``k2i_jax.candidate_table``) in place of the page table.
    """
    check_plane(plane)
    check_candidates(candidate_table)
    weights = _check_queries(queries, weights, candidate_table.row_ends.shape[0])
    _check_implementation(implementation, interpret)
    return _candidate_logits(queries, weights, plane, candidate_table, weight_scale, implementation=implementation)


def _check_queries(queries, weights, rows):
    if not isinstance(queries, FP4Array):
        raise TypeError(f"queries: expected a k2i_jax.FP4Array, got {type(queries).__name__}")
    check_array("queries.payload", queries.payload, (jnp.uint8,), (rows, "heads", PAYLOAD_BYTES))
    heads = queries.payload.shape[1]
    check_array("queries.scale", queries.scale, (jnp.uint8,), (rows, heads, SCALE_BYTES))
    if heads % 16 or not 0 < heads <= MAX_HEADS:
        raise ValueError(f"queries: expected a multiple of 16 heads up to {MAX_HEADS}, got {heads}")
    check_array("weights", weights, (jnp.float32, jnp.bfloat16), (rows, heads))
    return jnp.asarray(weights)


def _check_implementation(implementation, interpret) -> None:
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation: expected None or one of {sorted(IMPLEMENTATIONS)}, got {implementation!r}")
    if interpret:
        raise ValueError(f"interpret: is about the Pallas kernels; implementation={implementation!r} has none")


@functools.partial(jax.jit, static_argnames="implementation")
def _index_logits(queries, weights, plane, table, weight_scale, *, implementation):
    return _scaled_logits("index", implementation, queries, weights, plane, table, weight_scale)


@functools.partial(jax.jit, static_argnames="implementation")
def _candidate_logits(queries, weights, plane, candidates, weight_scale, *, implementation):
    return _scaled_logits("candidate", implementation, queries, weights, plane, candidates, weight_scale)


def _scaled_logits(kind, implementation, queries, weights, plane, columns, weight_scale):
    weights = weights.astype(jnp.float32) * jnp.asarray(weight_scale, jnp.float32)
    if 0 in (*weights.shape, columns.width, *getattr(columns, "pages", weights).shape):
        return jnp.full((weights.shape[0], columns.width), -jnp.inf, jnp.float32)
    return _logits(kind, implementation or "xla", queries, weights, plane, columns)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _logits(kind, implementation, queries, weights, plane, columns):
    return getattr(IMPLEMENTATIONS[implementation].load(), f"{kind}_logits")(queries, weights, plane, columns)


def _logits_forward(kind, implementation, queries, weights, plane, columns):
    return _logits(kind, implementation, queries, weights, plane, columns), (queries, plane, columns)


def _logits_backward(kind, implementation, saved, gradient):
    queries, plane, columns = saved
    backward = getattr(xla, f"{kind}_weight_gradient")
    return None, backward(queries, plane, columns, gradient), None, None


_logits.defvjp(_logits_forward, _logits_backward)
