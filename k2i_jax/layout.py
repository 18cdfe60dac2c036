"""Where each byte of an index key lies in a page: pure address arithmetic, one table a layout.

A page holds 64 keys; a key is 64 payload bytes (two e2m1 codes each) and 4 scale bytes (e8m0, one per 32
dims). A layout is a list of *digits*: an offset inside the page is a mixed-radix number whose digits are
``(coordinate // stride) % size``, the slowest first. Addresses, page gathers and page rewrites all read the
same table, so there is one place to be right or wrong in.
"""

import enum
import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32, UInt8

from k2i_jax._check import check_array

PAGE_SIZE = 64  # keys a page; page tables and slots speak of these pages in every layout
SUB_PAGE_SIZE = 8  # keys a virtual page: the candidate table's unit
HEAD_DIM = 128
GROUP = 32  # dims that share one scale
PAYLOAD_BYTES = HEAD_DIM // 2  # a key
SCALE_BYTES = HEAD_DIM // GROUP  # a key
KEY_BYTES = PAYLOAD_BYTES + SCALE_BYTES


class PageLayout(enum.StrEnum):
    """Byte layout of a plane's pages."""

    PAGE64 = "page64"  # SGLang's "preshuffle"
    PAGE8 = "page8"  # aiter's "row group": eight 8-key pages in the bytes of one 64-key page
    FUSED = "fused"  # SGLang's CUDA pool: payload and scales of a page in one row; read-only here

    @classmethod
    def _missing_(cls, value):
        raise ValueError(f"layout: expected one of {[str(layout) for layout in cls]}, got {value!r}")

    @property
    def payload_width(self) -> int:
        """Bytes of one page in the payload plane."""
        return PAGE_SIZE * (KEY_BYTES if self is PageLayout.FUSED else PAYLOAD_BYTES)

    @property
    def scale_width(self) -> int | None:
        """Bytes of one page in the scale plane; None where the scales live in the payload plane."""
        return None if self is PageLayout.FUSED else PAGE_SIZE * SCALE_BYTES


class Digit(NamedTuple):
    """One digit of an offset: ``(coordinate // stride) % size`` with the coordinate named by ``axis``."""

    axis: str  # "t" key in the page, "b" payload byte of the key, "c" scale group of the key
    stride: int
    size: int


# Digits of t are split at 8 everywhere, so that whole virtual pages can be addressed as well as keys.
_SUB, _T = Digit("t", 8, 8), Digit("t", 1, 8)
_C, _R, _GROUP = Digit("b", 16, 4), Digit("b", 1, 16), Digit("c", 1, 4)
_PAYLOAD = {
    PageLayout.PAGE64: (_C, _SUB, _T, _R),
    PageLayout.PAGE8: (_SUB, Digit("t", 1, 4), _C, Digit("t", 4, 2), _R),
    PageLayout.FUSED: (_SUB, _T, _C, _R),
}
_SCALE = {
    PageLayout.PAGE64: (_GROUP, Digit("t", 8, 2), _T, Digit("t", 16, 4)),
    PageLayout.PAGE8: (_SUB, _GROUP, _T),
    PageLayout.FUSED: (_SUB, _T, _GROUP),
}


def _offset(digits, **coordinates):
    value = 0
    for axis, stride, size in digits:
        value = value * size + coordinates[axis] // stride % size
    return value


def payload_offset(layout: PageLayout, slot, byte):
    """Offset in the payload plane of payload byte 0..63 of the key in ``slot``.

    Plain arithmetic on whatever integers come in: Python ints and int64 arrays are exact for pools of any size.
    """
    return slot // PAGE_SIZE * layout.payload_width + _offset(_PAYLOAD[layout], t=slot % PAGE_SIZE, b=byte)


def scale_offset(layout: PageLayout, slot, group):
    """Offset in the scale plane (FUSED: in the payload plane) of the scale of dims ``32 group + 0..31``."""
    inside = _offset(_SCALE[layout], t=slot % PAGE_SIZE, c=group)
    if layout is PageLayout.FUSED:
        return slot // PAGE_SIZE * layout.payload_width + PAGE_SIZE * PAYLOAD_BYTES + inside
    return slot // PAGE_SIZE * (PAGE_SIZE * SCALE_BYTES) + inside


def split(layout: PageLayout, payload: Array, scale: Array | None) -> tuple[Array, Array]:
    """``(payload u8[pages, 4096], scale u8[pages, 256])`` of a plane, FUSED's cut out of its rows."""
    if layout is PageLayout.FUSED:
        return payload[:, : PAGE_SIZE * PAYLOAD_BYTES], payload[:, PAGE_SIZE * PAYLOAD_BYTES :]
    assert scale is not None
    return payload, scale


def _sizes(digits) -> tuple[int, ...]:
    return tuple(d.size for d in digits)


def _index(digits, page, first_key, keys):
    """Index of ``keys`` (1, 8 or 64) consecutive keys, and the digits that the index leaves over."""
    fixed = [d.axis == "t" and d.stride >= keys for d in digits]
    index = [first_key // d.stride % d.size if f else slice(None) for d, f in zip(digits, fixed, strict=True)]
    return (page, *index), [d for d, f in zip(digits, fixed, strict=True) if not f]


def _key_order(digits) -> list[int]:
    """Permutation that brings ``digits`` into the order (t, slowest first; then the rest as they stand)."""
    return sorted(range(len(digits)), key=lambda i: -digits[i].stride if digits[i].axis == "t" else i + 1)


def _gather(rows, digits, page, first_key, keys):
    index, rest = _index(digits, page, first_key, keys)
    out = rows.reshape(-1, *_sizes(digits)).at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)
    out = out.transpose(0, *(1 + i for i in _key_order(rest)))
    return out.reshape(page.shape[0], keys, -1)


def gather_keys(
    layout: PageLayout, payload: Array, scale: Array | None, page: Int32[Array, "n"], first_key, keys: int
) -> tuple[UInt8[Array, "n keys 64"], UInt8[Array, "n keys 4"]]:
    """Reads ``keys`` (1, 8 or 64) consecutive keys at ``page``, ``first_key`` (a multiple of ``keys``).

    Page ids must lie in the pool: callers clamp and mask.
    """
    payload, scale = split(layout, payload, scale)
    return (
        _gather(payload, _PAYLOAD[layout], page, first_key, keys),
        _gather(scale, _SCALE[layout], page, first_key, keys),
    )


def _scatter(rows, digits, page, key, values):
    index, rest = _index(digits, page, key, 1)
    values = values.reshape(-1, *_sizes(rest))
    view = rows.reshape(-1, *_sizes(digits))
    return view.at[index].set(values, mode="drop", wrap_negative_indices=False).reshape(rows.shape)


def scatter_keys(layout: PageLayout, payload, scale, page, key, key_payload, key_scale):
    """Writes one key each at (page, key); pages past the pool are dropped. Not for FUSED."""
    return (
        _scatter(payload, _PAYLOAD[layout], page, key, key_payload),
        _scatter(scale, _SCALE[layout], page, key, key_scale),
    )


def _rewrite(rows, source, target):
    """Moves the bytes of whole pages from one digit order to another, through a common refinement."""
    src, dst = _refine(source, target), _refine(target, source)
    rows = rows.reshape(rows.shape[0], *_sizes(src))
    return rows.transpose(0, *(1 + src.index(d) for d in dst)).reshape(rows.shape[0], math.prod(_sizes(dst)))


def _refine(digits, other):
    """Splits ``digits`` at every stride at which ``other`` splits the same axis."""
    out = []
    for axis, stride, size in digits:
        cuts = {d.stride for d in other if d.axis == axis and stride < d.stride < stride * size}
        high = stride * size
        for cut in sorted(cuts | {stride}, reverse=True):
            out.append(Digit(axis, cut, high // cut))
            high = cut
    return out


def convert_pages(source: PageLayout, target: PageLayout, payload, scale):
    """Re-orders whole pages, bit for bit: ``(payload u8[pages, 4096], scale u8[pages, 256])`` in ``target``."""
    payload, scale = split(source, payload, scale)
    return (
        _rewrite(payload, _PAYLOAD[source], _PAYLOAD[target]),
        _rewrite(scale, _SCALE[source], _SCALE[target]),
    )


def query_scale_to_aiter(scale: UInt8[Array, "rows heads 4"]) -> UInt8[Array, "rows 1 4 16 4"]:
    """Query scales in the order of aiter's kernel: ``[rows, 1, group, head % 16, head // 16]``, absent heads 0.

    Raises:
      TypeError, ValueError: wrong type or shape; more than 64 heads, which that order cannot hold.
    """
    check_array("scale", scale, (jnp.uint8,), ("rows", "heads", SCALE_BYTES))
    rows, heads, _ = scale.shape
    if heads > 64:
        raise ValueError(f"scale: aiter's order holds at most 64 heads, got {heads}; keep the natural order")
    padded = jnp.pad(scale, ((0, 0), (0, 64 - heads), (0, 0)))
    return padded.reshape(rows, 4, 16, 4).transpose(0, 3, 2, 1)[:, None]


def query_scale_from_aiter(scale: UInt8[Array, "rows 1 4 16 4"], heads: int) -> UInt8[Array, "rows heads 4"]:
    """The natural ``[rows, heads, group]`` order of query scales that come in aiter's.

    Raises:
      TypeError, ValueError: ``scale`` is no u8[rows, 1, 4, 16, 4], or ``heads`` is not in 1..64.
    """
    check_array("scale", scale, (jnp.uint8,), ("rows", 1, 4, 16, 4))
    if not 0 < heads <= 64:
        raise ValueError(f"heads: expected 1..64, got {heads}")
    return scale[:, 0].transpose(0, 3, 2, 1).reshape(scale.shape[0], 64, 4)[:, :heads]
