"""The score, ``logit[r, j] = sum_h w[r, h] * relu(q[r, h] . k[j])``: validation, choice of implementation, gradient.

DeepGEMM and aiter call it ``paged_mqa_logits``.
"""

import functools
import logging
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from k2i_jax._check import FLOATS, AnyArray, check_array, check_heads
from k2i_jax._varying import varying
from k2i_jax.candidates import CandidateTable, check_candidates
from k2i_jax.fp4 import FP4Array, check_fp4
from k2i_jax.implementations import IMPLEMENTATIONS, check_name, refuse_platform
from k2i_jax.kernels import xla
from k2i_jax.kernels.config import Config
from k2i_jax.layout import PageLayout
from k2i_jax.page_table import PageTable, check_table
from k2i_jax.plane import IndexKPlane, check_plane

_log = logging.getLogger(__name__)


def index_logits(
    queries: FP4Array,
    weights: Float[AnyArray, "rows heads"],
    plane: IndexKPlane,
    table: PageTable,
    *,
    weight_scale: Any = 1.0,
    implementation: str | None = None,
    interpret: bool = False,
    config: Config | None = None,
) -> Float32[Array, "rows 64*P"]:
    """Scores every position that each row sees (FULL; DeepGEMM's and aiter's ``paged_mqa_logits``).

    Args:
      queries: payload u8[rows, H, 64], scale u8[rows, H, 4]; H a multiple of 16, at most 128.
      weights: f32 or bf16 [rows, H]; V4.1's hold ``128^-0.5 * H^-0.5`` already.
      plane: the keys.
      table: page ids and row ends of the same rows.
      weight_scale: multiplies the weights, in float32.
      implementation: None (the best for the device the code is lowered for) or a name.
        "pallas" named on a platform that it does not lower for raises when lowered.
      interpret: run the Pallas kernels in interpret mode, on any host.
      config: how the Pallas kernels are cut (``k2i_jax.kernels.config.Config``); None chooses by device and shape.

    Returns:
      f32[rows, 64 P]. Exactly -inf at and past a row's end, and where a page id lies outside the plane.
      Differentiable with respect to ``weights`` and ``weight_scale`` (reverse mode); nothing else has a gradient.

    Raises:
      TypeError, ValueError: wrong types or shapes, an implementation that does not exist or cannot read the layout.
      NotImplementedError: a named implementation lowered for a platform that it lacks.
    """
    check_plane(plane)
    check_table(table)
    weights = check_queries(queries, weights, weight_scale, table.row_ends.shape[0])
    choice = _resolve(implementation, interpret, config, plane)
    return _score("index", choice, queries, weights, plane, table, weight_scale)


def candidate_logits(
    queries: FP4Array,
    weights: Float[AnyArray, "rows heads"],
    plane: IndexKPlane,
    candidate_table: CandidateTable,
    *,
    weight_scale: Any = 1.0,
    implementation: str | None = None,
    interpret: bool = False,
    config: Config | None = None,
) -> Float32[Array, "rows 8*B"]:
    """Scores the candidate blocks of each row only (REINDEX): column ``8 i + t`` is position ``8 ids[i] + t``.

    The bits are :func:`index_logits`' at the same positions. The arguments are its, with ``candidate_table`` (see
    ``k2i_jax.candidate_table``) in place of the page table.
    """
    check_plane(plane)
    check_candidates(candidate_table)
    weights = check_queries(queries, weights, weight_scale, candidate_table.row_ends.shape[0])
    choice = _resolve(implementation, interpret, config, plane)
    return _score("candidate", choice, queries, weights, plane, candidate_table, weight_scale)


def check_queries(queries, weights, weight_scale, rows):
    """The weights as an array; raises unless they and the queries are those of ``rows`` rows."""
    check_fp4("queries", queries, (rows, "heads"))
    heads = queries.payload.shape[1]
    check_heads("queries", heads)
    check_array("weights", weights, FLOATS, (rows, heads))
    if not hasattr(weight_scale, "dtype") and not isinstance(weight_scale, int | float):
        raise TypeError(f"weight_scale: expected a number, got {weight_scale!r}")
    if jnp.shape(weight_scale):
        raise ValueError(
            f"weight_scale: expected a scalar, got shape {list(jnp.shape(weight_scale))}; scale the weights"
        )
    return jnp.asarray(weights)


def _resolve(implementation, interpret, config, plane) -> "_Choice":
    """What to run: a name, or None where the platform decides; says why a request cannot be met."""
    name = check_name(implementation, interpret)
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"config: expected a k2i_jax.kernels.config.Config, got {type(config).__name__}")
    if plane.layout is PageLayout.FUSED:
        if name == "pallas":
            raise ValueError(
                "implementation: pallas does not read FUSED planes; repack(plane, 'page64') first, or use xla"
            )
        name = "xla"
    if config is not None and name == "xla":
        raise ValueError("config: tunes the Pallas kernels; xla has none")
    return _Choice(name, interpret, config)


class _Choice(NamedTuple):
    name: str | None
    interpret: bool
    config: Config | None


@functools.partial(jax.jit, static_argnums=(0, 1))
def _score(kind, choice, queries, weights, plane, columns, weight_scale):
    weights = weights.astype(jnp.float32) * jnp.asarray(weight_scale, jnp.float32)
    if 0 in (*weights.shape, columns.width, *getattr(columns, "pages", weights).shape):
        return jnp.full((weights.shape[0], columns.width), -jnp.inf, jnp.float32)
    return _logits(kind, choice, queries, weights, plane, columns)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _logits(kind, choice, *args):
    run_xla = getattr(xla, f"{kind}_logits")
    if choice.name == "xla":
        return run_xla(*args)
    try:  # imported here: the Pallas kernels need jax internals that plain JAX scoring can do without
        module = IMPLEMENTATIONS["pallas"].load()
    except ImportError as error:
        if choice.name == "pallas" or choice.config is not None:
            raise
        _log.warning("scoring with implementation='xla': %s", error)
        return run_xla(*args)
    run = functools.partial(getattr(module, f"{kind}_logits"), config=choice.config)
    if choice.interpret:
        return run(*args, interpret=True)
    if choice.name == "pallas":
        return lax.platform_dependent(*args, cuda=run, rocm=run, default=_refuse)
    return lax.platform_dependent(*args, cuda=run, rocm=run, default=run_xla)


def _logits_forward(kind, choice, queries, weights, plane, columns):
    return _logits(kind, choice, queries, weights, plane, columns), (queries, plane, columns)


def _logits_backward(kind, choice, saved, gradient):
    queries, plane, columns = saved
    backward = getattr(xla, f"{kind}_weight_gradient")
    return None, backward(queries, plane, columns, gradient), None, None


_logits.defvjp(_logits_forward, _logits_backward)


def _refuse(queries, weights, plane, columns):
    nothing = jnp.zeros((weights.shape[0], columns.width), jnp.float32)
    return refuse_platform(varying(nothing, queries, weights, plane, columns))
