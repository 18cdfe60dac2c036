"""A layer's pool of index keys: two byte planes that only make sense together, and a layout."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, UInt8

from k2i_jax._check import INT32_MAX, check_array
from k2i_jax.fp4 import FP4Recipe
from k2i_jax.layout import KEY_BYTES, PAGE_SIZE, PAYLOAD_BYTES, SCALE_BYTES, PageLayout
from k2i_jax.tag import LayoutTag

_PAYLOAD_SHAPES = {  # of one page: flat, SGLang's, the layout's own
    PageLayout.PAGE64: [(4096,), (1, 4, 64, 16), (4, 64, 16)],
    PageLayout.PAGE8: [(4096,), (1, 4, 64, 16)],
    PageLayout.FUSED: [(PageLayout.FUSED.payload_width,)],
}
_SCALE_SHAPES = {
    PageLayout.PAGE64: [(256,), (1, 4, 64), (4, 16, 4)],
    PageLayout.PAGE8: [(256,), (1, 4, 64)],
}
_VIRTUAL_SHAPES = {"payload": (4, 4, 2, 16), "scale": (4, 8)}  # PAGE8's own, of one virtual page


@functools.partial(jax.tree_util.register_dataclass, data_fields=["payload", "scale"], meta_fields=["layout"])
@dataclasses.dataclass(frozen=True)
class IndexKPlane:
    """One layer's index keys. Build it with :meth:`zeros` or :meth:`from_arrays`.

    Attributes:
      payload: u8[pages, 4096] (FUSED: u8[pages, 4352], scales included).
      scale: u8[pages, 256]; None for FUSED.
      layout: the pages' byte layout; static, so that jitted code is compiled for it.
    """

    payload: UInt8[Array, "pages bytes"]
    scale: UInt8[Array, "pages 256"] | None
    layout: PageLayout

    @property
    def num_pages(self) -> int:
        return self.payload.shape[0]

    @classmethod
    def zeros(cls, num_pages: int, layout: PageLayout | str) -> "IndexKPlane":
        """An empty pool of ``num_pages`` 64-slot pages (68 B a slot).

        Raises:
          ValueError: FUSED, which is read-only here, or a pool whose slots do not fit an int32.
        """
        layout = PageLayout(layout)
        if layout is PageLayout.FUSED:
            raise ValueError("layout: FUSED planes are read-only; use PAGE64 or PAGE8")
        _check_num_pages(num_pages)
        return cls(
            jnp.zeros((num_pages, PAGE_SIZE * PAYLOAD_BYTES), jnp.uint8),
            jnp.zeros((num_pages, PAGE_SIZE * SCALE_BYTES), jnp.uint8),
            layout,
        )

    @classmethod
    def from_arrays(cls, payload: Any, scale: Any, layout: PageLayout | str) -> "IndexKPlane":
        """Wraps the bytes of an existing pool.

        Args:
          payload: ``[pages, 4096]``, SGLang's ``[pages, 1, 4, 64, 16]`` (both layouts), or the layout's own
            shape (PAGE64 ``[pages, 4, 64, 16]``, PAGE8 ``[8 pages, 4, 4, 2, 16]``), as uint8, int8 or float4_e2m1fn
            (then the last axis counts codes). FUSED: u8 ``[pages, 4352]``. An eager reshape copies in JAX.
          scale: ``[pages, 256]``, ``[pages, 1, 4, 64]``, or PAGE64 ``[pages, 4, 16, 4]``, PAGE8 ``[8 pages, 4, 8]``,
            as uint8, int8 or float8_e8m0fnu. FUSED: None.
          layout: what the bytes are in. It cannot be told from the bytes: read the pool's own flag.

        Raises:
          TypeError, ValueError: another dtype or shape, one plane without the other, planes of unequal length.
        """
        layout = PageLayout(layout)
        if payload is None or (scale is None) != (layout is PageLayout.FUSED):
            rule = "payload alone" if layout is PageLayout.FUSED else "payload and scale together"
            raise ValueError(f"scale: a {layout} plane is {rule}; got payload {_shape(payload)}, scale {_shape(scale)}")
        payload = _flatten("payload", _as_bytes("payload", payload), layout, _PAYLOAD_SHAPES)
        if scale is not None:
            scale = _flatten("scale", _as_bytes("scale", scale), layout, _SCALE_SHAPES)
            if scale.shape[0] != payload.shape[0]:
                raise ValueError(f"scale: has {scale.shape[0]} pages, payload has {payload.shape[0]}")
        _check_num_pages(payload.shape[0])
        return cls(payload, scale, layout)

    def tag(self, recipe: FP4Recipe | None = None, ratio: int | None = None) -> LayoutTag:
        """The facts a peer must share before raw pages may move; see :class:`LayoutTag`.

        Raises:
          TypeError: ``recipe`` is no ``FP4Recipe``.
        """
        if recipe is not None and not isinstance(recipe, FP4Recipe):
            raise TypeError(f"recipe: expected None or a k2i_jax.FP4Recipe, got {recipe!r}")
        return LayoutTag.of(self.layout, recipe.label if recipe else None, ratio)


def _shape(x):
    return "None" if x is None else list(x.shape)


def _check_num_pages(num_pages: int) -> None:
    if not 0 < num_pages <= INT32_MAX // PAGE_SIZE:
        raise ValueError(f"num_pages: expected 1..{INT32_MAX // PAGE_SIZE} (slots are int32), got {num_pages}")


def _as_bytes(name: str, x: Any) -> Array:
    x = jnp.asarray(x)
    sub_byte = jnp.float4_e2m1fn if name == "payload" else jnp.float8_e8m0fnu
    if x.dtype not in (jnp.uint8, jnp.int8, sub_byte):
        raise TypeError(f"{name}: expected uint8, int8 or {jnp.dtype(sub_byte)}, got {x.dtype} {list(x.shape)}")
    if x.dtype == jnp.float4_e2m1fn:
        if x.shape[-1] % 2:
            raise ValueError(f"payload: two codes make a byte, so the last axis must be even, got {list(x.shape)}")
        x = x.reshape(*x.shape[:-1], -1, 2)
    return x if x.dtype == jnp.uint8 else lax.bitcast_convert_type(x, jnp.uint8)


def _flatten(name: str, x: Array, layout: PageLayout, shapes: dict) -> Array:
    for page in shapes[layout]:
        if x.shape[1:] == page:
            return x if len(page) == 1 else x.reshape(x.shape[0], -1)
    if layout is PageLayout.PAGE8 and x.shape[1:] == _VIRTUAL_SHAPES[name] and x.shape[0] % 8 == 0:
        return x.reshape(x.shape[0] // 8, -1)
    if layout is PageLayout.FUSED and x.ndim == 2 and x.shape[1] % KEY_BYTES == 0:
        raise ValueError(f"payload: {x.shape[1]} bytes a page are {x.shape[1] // KEY_BYTES} slots; only 64 are read")
    wanted = " or ".join(str(["pages", *page]) for page in shapes[layout])
    if layout is PageLayout.PAGE8:
        wanted += f" or {['8 * pages', *_VIRTUAL_SHAPES[name]]}"
    raise ValueError(f"{name}: expected {wanted} for {layout}, got {list(x.shape)}")


def check_plane(plane: Any, name: str = "plane") -> None:
    """Raises unless ``plane`` is an ``IndexKPlane`` with consistent arrays (it may have been built by hand)."""
    if not isinstance(plane, IndexKPlane):
        raise TypeError(f"{name}: expected a k2i_jax.IndexKPlane, got {type(plane).__name__}")
    layout = PageLayout(plane.layout)
    check_array(f"{name}.payload", plane.payload, (jnp.uint8,), ("pages", layout.payload_width))
    if layout.scale_width is None:
        if plane.scale is not None:
            raise ValueError(f"{name}.scale: a FUSED plane keeps its scales in payload, got {_shape(plane.scale)}")
    else:
        check_array(f"{name}.scale", plane.scale, (jnp.uint8,), (plane.num_pages, layout.scale_width))
