"""Keys into a plane's slots and out of them, whole planes to another layout, pages from one place to another."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Int

from k2i_jax._check import AnyArray, as_int32
from k2i_jax.fp4 import FP4Array, check_fp4
from k2i_jax.layout import PAGE_SIZE, PageLayout, convert_pages, gather_keys, scatter_keys
from k2i_jax.plane import IndexKPlane, check_plane


def _check_writable(plane: IndexKPlane, what: str) -> None:
    if plane.layout is PageLayout.FUSED:
        raise ValueError(f"plane: {what} a FUSED plane is not supported; repack(plane, 'page64') first")


def write_keys(
    plane: IndexKPlane,
    slots: Int[AnyArray, "keys"],
    keys: FP4Array,
    *,
    skip_slot_zero: bool = False,
    donate: bool = False,
) -> IndexKPlane:
    """Writes keys into their slots and returns the new plane.

    Args:
      plane: PAGE64 or PAGE8.
      slots: ``page * 64 + offset`` of each key. A slot that is negative or past the pool skips its key; of two
        keys for one slot the later wins, in both planes.
      keys: payload u8[keys, 64], scale u8[keys, 4].
      skip_slot_zero: also skip slot 0, which SGLang reserves for padding.
      donate: let the new plane take over the old one's memory (the old one is then gone). Inside your own ``jit``
        donate the plane there instead.

    Raises:
      TypeError, ValueError: wrong types or shapes, or a FUSED plane.
    """
    check_plane(plane)
    _check_writable(plane, "writing")
    slots = as_int32("slots", slots, ("keys",))
    check_fp4("keys", keys, slots.shape)
    return (_write_donating if donate else _write)(plane, slots, keys, skip_slot_zero)


def _last_wins(ids, live, dropped):
    """Order in which to write, and the ids in it: ``dropped`` for all but the last live use of each id.

    A scatter with repeated indices may mix two writes, so none is left.
    """
    ids, order = lax.sort((jnp.where(live, ids, dropped), jnp.arange(ids.shape[0], dtype=jnp.int32)), num_keys=2)
    return order, jnp.where(jnp.append(ids[:-1] != ids[1:], True), ids, dropped)


def _write_impl(plane, slots, keys, skip_slot_zero):
    if slots.shape[0] == 0:
        return plane
    end = plane.num_pages * PAGE_SIZE
    live = (slots >= (1 if skip_slot_zero else 0)) & (slots < end)
    order, slots = _last_wins(slots, live, end)
    page, key = slots // PAGE_SIZE, slots % PAGE_SIZE
    values = keys.payload[order], keys.scale[order]
    payload, scale = scatter_keys(plane.layout, plane.payload, plane.scale, page, key, *values)
    return IndexKPlane(payload, scale, plane.layout)


_write = jax.jit(_write_impl, static_argnums=3)
_write_donating = jax.jit(_write_impl, static_argnums=3, donate_argnums=0)


def read_keys(plane: IndexKPlane, slots: Int[AnyArray, "*n"]) -> FP4Array:
    """Reads the keys in ``slots``: payload u8[*n, 64], scale u8[*n, 4]; all zero where a slot is out of range.

    Raises:
      TypeError, ValueError: wrong types or shapes.
    """
    check_plane(plane)
    return _read(plane, as_int32("slots", slots))


@jax.jit
def _read(plane, slots):
    flat = slots.reshape(-1)
    live = (flat >= 0) & (flat < plane.num_pages * PAGE_SIZE)
    flat = jnp.where(live, flat, 0)
    read = gather_keys(plane.layout, plane.payload, plane.scale, flat // PAGE_SIZE, flat % PAGE_SIZE, 1)
    payload, scale = (jnp.where(live[:, None], x[:, 0], 0) for x in read)
    return FP4Array(payload.reshape(*slots.shape, -1), scale.reshape(*slots.shape, -1))


def repack(plane: IndexKPlane, layout: PageLayout | str) -> IndexKPlane:
    """The same keys in the same slots in another layout: bytes move, none changes, live or not.

    Raises:
      ValueError: ``layout`` is FUSED.
    """
    check_plane(plane)
    layout = PageLayout(layout)
    if layout is PageLayout.FUSED and plane.layout is not PageLayout.FUSED:
        raise ValueError("layout: repacking to FUSED is not supported, it is read-only here; use PAGE64 or PAGE8")
    return plane if layout is plane.layout else _repack(plane, layout)


@functools.partial(jax.jit, static_argnums=1)
def _repack(plane, layout):
    payload, scale = convert_pages(plane.layout, layout, plane.payload, plane.scale)
    return IndexKPlane(payload, scale, layout)


def copy_pages(
    plane: IndexKPlane,
    source: Int[AnyArray, "n"],
    target: Int[AnyArray, "n"],
    *,
    source_plane: IndexKPlane | None = None,
) -> IndexKPlane:
    """Copies whole pages, payload and scales together, into ``plane[target]``; a pair with an id out of range skips.

    Args:
      plane: where the pages go.
      source: page ids to read, in ``source_plane`` or, where that is None, in ``plane`` as it came in.
      target: page ids to write; of two copies to one page the later wins.
      source_plane: a pool of the same layout.

    Raises:
      ValueError: two layouts (``repack`` one of them), or id lists of different lengths.
    """
    check_plane(plane)
    other = plane if source_plane is None else source_plane
    check_plane(other, "source_plane")
    if other.layout is not plane.layout:
        raise ValueError(f"source_plane: layout {other.layout}, plane has {plane.layout}; repack one of them first")
    source = as_int32("source", source, ("pages",))
    target = as_int32("target", target, source.shape)
    return _copy_pages(plane, other, source, target)


@jax.jit
def _copy_pages(plane, other, source, target):
    live = (source >= 0) & (source < other.num_pages) & (target >= 0) & (target < plane.num_pages)
    order, target = _last_wins(target, live, plane.num_pages)
    source = jnp.where(live, source, 0)[order]
    return jax.tree.map(lambda x, y: x.at[target].set(y[source], mode="drop"), plane, other)
