"""What ``jax.shard_map`` asks for: a loop's first carry and a kernel's output vary over their operands' mesh axes."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def _axes(x: Any) -> frozenset:
    kind = getattr(jax.typeof(x), "manual_axis_type", None)
    return frozenset() if kind is None else kind.varying


def varying(x: Any, *like: Any) -> Any:
    """The pytree ``x``, each leaf varying over every mesh axis that a leaf of ``like`` varies over; outside
    ``shard_map`` unchanged.
    """
    axes = frozenset().union(*(_axes(leaf) for leaf in jax.tree.leaves(like)))

    def cast(leaf):
        missing = tuple(sorted(axes - _axes(leaf), key=str))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, x) if axes else x


def shaped(shape: tuple[int, ...], dtype: Any, *like: Any) -> jax.ShapeDtypeStruct:
    """A kernel's output that varies as ``like`` does."""
    example = jax.typeof(varying(jnp.zeros((), jnp.int32), *like))
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=getattr(example, "manual_axis_type", None))
