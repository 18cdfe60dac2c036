"""What the tests share: the golden cases, and random batches whose every byte that is not live is poison.

The address formulas below are the format's own, written out once more, apart from ``k2i_jax.layout``.
"""

import functools
import pathlib
from typing import Any, NamedTuple

import numpy as np

import k2i_jax as k

GOLDEN = pathlib.Path(__file__).parent / "golden"
CASES = ("decode", "heads64", "two_level", "verify", "wide_scales")
LAYOUTS = (k.PageLayout.PAGE64, k.PageLayout.PAGE8)


def bits(x) -> np.ndarray:
    """The bytes of an array as unsigned integers, so that NaN, -0 and the last bit all count."""
    x = np.asarray(x)
    return x.view(np.dtype(f"u{x.dtype.itemsize}"))


def payload_address(layout, s, b):
    """Offset in the payload plane of payload byte b of the key in slot s."""
    c, r = b // 16, b % 16
    if layout == "page64":
        return s // 64 * 4096 + c * 1024 + s % 64 * 16 + r
    if layout == "page8":
        t = s % 8
        return s // 8 * 512 + t % 4 * 128 + c * 32 + t // 4 * 16 + r
    return s // 64 * 4352 + s % 64 * 64 + b


def scale_address(layout, s, c):
    """Offset of the scale of group c of the key in slot s."""
    t = s % 64
    if layout == "page64":
        return s // 64 * 256 + c * 64 + t % 16 * 4 + t // 16
    if layout == "page8":
        return s // 8 * 32 + c * 8 + s % 8
    return s // 64 * 4352 + 4096 + t * 4 + c


def packed_plane(layout, num_pages: int, slots, payload, scale, fill: int = 0xFF) -> k.IndexKPlane:
    """A plane that holds the keys in their slots and ``fill`` (0xFF: the scale is NaN) in all other bytes."""
    fused = layout == "fused"
    out = np.full(num_pages * (4352 if fused else 4096), fill, np.uint8)
    out_scale = out if fused else np.full(num_pages * 256, fill, np.uint8)
    slots = np.asarray(slots, np.int64)[:, None]
    out[payload_address(layout, slots, np.arange(64))] = payload
    out_scale[scale_address(layout, slots, np.arange(4))] = scale
    if fused:
        return k.IndexKPlane.from_arrays(out.reshape(num_pages, 4352), None, layout)
    return k.IndexKPlane.from_arrays(out.reshape(-1, 4096), out_scale.reshape(-1, 256), layout)


def packed_scales(packed) -> np.ndarray:
    """``i32[...] -> u8[..., 4]``: byte c is group c's scale."""
    return np.ascontiguousarray(packed, "<i4").view(np.uint8).reshape(*np.shape(packed), 4)


class Golden:
    """A case written by SGLang's own code; ``case["logits_fp64"]`` and so on are its arrays."""

    def __init__(self, name: str):
        with np.load(GOLDEN / f"{name}.npz") as arrays:
            self.arrays = dict(arrays)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]

    @property
    def queries(self) -> k.FP4Array:
        heads = np.arange(self["q_fp4"].shape[1])
        scale = self["q_scale"][:, 0][:, :, heads % 16, heads // 16]  # [rows, group, heads]
        return k.FP4Array(self["q_fp4"], np.ascontiguousarray(scale.swapaxes(1, 2)))

    @property
    def table(self) -> k.PageTable:
        starts = np.searchsorted(self["row_to_seq"], np.arange(len(self["page_table"]) + 1))
        return k.PageTable.from_arrays(self["page_table"], self["lengths"], starts)

    def plane(self, layout) -> k.IndexKPlane:
        if layout == "fused":
            return k.IndexKPlane.from_arrays(self["fused_pool"], None, layout)
        return k.IndexKPlane.from_arrays(self[f"{layout}_payload"], self[f"{layout}_scale"], layout)


@functools.cache
def golden(name: str) -> Golden:
    return Golden(name)


class Batch(NamedTuple):
    """Arguments of ``index_logits``; ``keys``, ``slots`` hold what ``plane`` was made from."""

    queries: k.FP4Array
    weights: Any
    plane: k.IndexKPlane
    table: k.PageTable
    keys: k.FP4Array
    slots: np.ndarray

    @property
    def args(self):
        return self.queries, self.weights, self.plane, self.table

    def in_layout(self, layout) -> "Batch":
        keys = self.keys
        plane = packed_plane(layout, self.plane.num_pages, self.slots, keys.payload, keys.scale)
        return self._replace(plane=plane)


def random_fp4(rng, *shape, scales=(122, 132)) -> k.FP4Array:
    """Random codes of ``shape`` vectors of 128; scale bytes between ``scales``."""
    payload = rng.integers(0, 256, (*shape, 64), dtype=np.uint8)
    return k.FP4Array(payload, rng.integers(scales[0], scales[1] + 1, (*shape, 4), dtype=np.uint8))


def random_batch(
    seed: int,
    row_ends,
    *,
    starts=None,
    heads: int = 32,
    columns: int = 17,
    num_pages: int = 70,
    scales=(122, 132),
    query_scales=None,
    layout=k.PageLayout.PAGE64,
) -> Batch:
    """Random keys in shuffled pages. No byte outside the live region is finite: garbage ids, 0xFF bytes.

    Args:
      row_ends: of each row; ``starts`` (query_start_loc) groups the rows, None for a sequence a row.
      scales, query_scales: ranges of the scale bytes; the queries' default to the keys'.
      columns: pages a table row; columns past what a sequence needs hold padding of every kind.
    """
    rng = np.random.default_rng(seed)
    row_ends = np.asarray(row_ends, np.int32)
    starts = np.arange(len(row_ends) + 1) if starts is None else np.asarray(starts)
    padding = np.array([0, -1, num_pages, 2**31 - 1, -(2**31), 1])
    pages = rng.choice(padding, (len(starts) - 1, columns)).astype(np.int32)
    free, slots = list(rng.permutation(np.arange(1, num_pages))), []
    for s in range(len(starts) - 1):
        length = int(np.clip(row_ends[starts[s] : starts[s + 1]].max(initial=0), 0, columns * 64))
        for column in range(-(-length // 64)):
            pages[s, column] = free.pop()
            slots.extend(int(pages[s, column]) * 64 + np.arange(min(64, length - 64 * column)))
    slots = np.array(slots, np.int64)
    keys = random_fp4(rng, len(slots), scales=scales)
    queries = random_fp4(rng, len(row_ends), heads, scales=query_scales or scales)
    weights = rng.standard_normal((len(row_ends), heads)).astype(np.float32) * 0.01
    plane = packed_plane(layout, num_pages, slots, keys.payload, keys.scale)
    return Batch(queries, weights, plane, k.PageTable.from_arrays(pages, row_ends, starts), keys, slots)


def rows_of(selection_row) -> list[int]:
    """The valid prefix of a row of ids; fails when a valid entry follows padding."""
    row = np.asarray(selection_row).tolist()
    count = next((i for i, x in enumerate(row) if x < 0), len(row))
    assert all(x == -1 for x in row[count:])
    return row[:count]
