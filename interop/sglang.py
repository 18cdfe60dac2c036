"""SGLang 0.5.23's index-K pools, queries and tables as k2i_jax objects, without a copy, and selections back.

Everything here imports torch's memory as it is (see ``k2i_jax.interop.dlpack``): the results are good for the current
step, and must neither be kept nor donated. SGLang itself is not imported; its objects are recognised by their methods.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from k2i_jax._check import check_array
from k2i_jax.candidates import CandidateBlocks, CandidateTable
from k2i_jax.fp4 import FP4Array
from k2i_jax.interop.devices import torch
from k2i_jax.interop.dlpack import ALIGNMENT, to_jax, to_torch
from k2i_jax.layout import KEY_BYTES, PAGE_SIZE, PageLayout, query_scale_from_aiter, query_scale_to_aiter
from k2i_jax.page_table import FULL_PAGE_SIZE, PageTable
from k2i_jax.plane import IndexKPlane
from k2i_jax.select import Selection


def plane_from_pool(pool: Any, layer_id: int, *, ratio: int | None = None) -> IndexKPlane:
    """The index keys that a layer reads, over the pool's own memory.

    The layout is what the pool itself says of this layer (``low_ratio_index_k_is_split``,
    ``low_ratio_index_k_page8``): the environment variable may be set and the pool still be PAGE64. A REINDEX layer
    owns no keys, and gets the buffers of the layer that does, as the pool's accessors resolve it.

    The accessors of the buffers wait: with a hierarchical cache, or while a prefill peer sends pages, they return when
    this layer's pages have been loaded (``wait_layer_transfer``), and may block the host until then.

    Args:
      pool: SGLang's ``DeepSeekV4TokenToKVPool``, or anything with those methods.
      layer_id: the model's layer, FULL, SOURCE or REINDEX.
      ratio: the layer's compress ratio, if known: then the pool's page size for it must be that of the buffers.

    Raises:
      TypeError: the pool lacks a method; the message names it.
      ValueError: pages of another size than 64 slots (SGLang's FUSED pool on Blackwell may hold 128), keys that are
        not FP4 with head dim 128, or a page size that contradicts ``ratio``.
    """
    split = _ask(pool, "low_ratio_index_k_is_split", layer_id)
    if split:
        payload = _ask(pool, "get_index_k_fp4_payload_buffer", layer_id)
        scale = _ask(pool, "get_index_k_fp4_scale_buffer", layer_id)
        if payload.ndim != 5 or payload.shape[1:3] != (1, 4) or payload.shape[4] != 16:
            raise ValueError(f"pool: expected a payload buffer [pages, 1, 4, 64, 16], got {list(payload.shape)}")
        size = payload.shape[3]
        layout = PageLayout.PAGE8 if _ask(pool, "low_ratio_index_k_page8", layer_id) else PageLayout.PAGE64
    else:
        payload, scale = _ask(pool, "get_index_k_with_scale_buffer", layer_id), None
        if payload.ndim != 2 or payload.shape[1] % KEY_BYTES:
            raise ValueError(
                f"pool: {list(payload.shape)} bytes hold no FP4 index keys ({KEY_BYTES} bytes a key); an FP8 pool "
                "(SGLang without its FP4 indexer) is not read here"
            )
        size, layout = payload.shape[1] // KEY_BYTES, PageLayout.FUSED
    if size != PAGE_SIZE:
        raise ValueError(
            f"pool: layer {layer_id} has pages of {size} slots, only {PAGE_SIZE} are read; re-page it, or start SGLang "
            f"so that its index pages hold {PAGE_SIZE} (128 come with DeepGEMM's sparse paged logits)"
        )
    if ratio is not None:
        stated = _ask(pool, "get_index_k_page_size", ratio)
        if stated != size:
            raise ValueError(f"ratio: the pool's pages of ratio {ratio} hold {stated} slots, layer {layer_id}'s {size}")
    pages = payload.shape[0]
    flat = [None if x is None else to_jax(_bytes(x).view(pages, -1)) for x in (payload, scale)]
    return IndexKPlane.from_arrays(flat[0], flat[1], layout)


def _ask(pool, method: str, *arguments):
    found = getattr(pool, method, None)
    if found is None:
        raise TypeError(
            f"pool: {type(pool).__name__} has no {method}(); expected SGLang's DeepSeekV4TokenToKVPool "
            "(`k2i-jax sglang check` compares the installed SGLang)"
        )
    return found(*arguments)


def _bytes(tensor):
    return tensor.view(torch().uint8)


def _bring(tensor):
    """As JAX sees it: the same memory if it can be, else a copy (of tables and weights, which are small)."""
    if not hasattr(tensor, "data_ptr"):
        return jnp.asarray(tensor)
    whole = tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0 and tensor.dtype != torch().int64
    return to_jax(tensor, copy=not whole)


def queries_from_sglang(q_fp4: Any, q_scale: Any) -> FP4Array:
    """Packed queries as SGLang's packer writes them; scales leave aiter's order for the natural one.

    Args:
      q_fp4: int8, uint8 or float4_e2m1fn_x2 ``[rows, H, 64]``, or ``[rows, 1, H, 64]`` as aiter takes it.
      q_scale: u8 ``[rows, 1, 4, 16, 4]`` (group, head % 16, head // 16).

    Raises:
      ValueError: other shapes.
    """
    payload, scale = _bring(_bytes(q_fp4)), _bring(q_scale)
    if payload.ndim == 4 and payload.shape[1] == 1:
        payload = payload[:, 0]
    check_array("q_fp4", payload, (jnp.uint8,), ("rows", "heads", 64))
    check_array("q_scale", scale, (jnp.uint8,), (payload.shape[0], 1, 4, 16, 4))
    return FP4Array(payload, query_scale_from_aiter(scale, payload.shape[1]))


def queries_to_sglang(queries: FP4Array) -> tuple[Any, Any]:
    """Queries as SGLang's scorers take them: ``(q_fp4 int8 [rows, H, 64], q_scale u8 [rows, 1, 4, 16, 4])``.

    Raises:
      ValueError: more than 64 heads, which aiter's order cannot hold.
    """
    scale = query_scale_to_aiter(jnp.asarray(queries.scale))
    return to_torch(jnp.asarray(queries.payload)).view(torch().int8), to_torch(scale)


def table_from_sglang(
    pages: Any,
    row_ends: Any,
    *,
    query_start_loc: Any = None,
    page_tokens: int = PAGE_SIZE,
    ratio: int = 1,
    max_query_len: int | None = None,
) -> PageTable:
    """A page table of SGLang's, whatever follows each row's end (padding, or memory nobody wrote).

    Args:
      pages: int32 ``[sequences, columns]``; rows may be strided (they are copied then).
      row_ends: int32 ``[rows]``, in index keys: aiter's ``row_ends``, SGLang's ``compressed_seq_lens``.
      query_start_loc: int32 ``[sequences + 1]``; None for a sequence a row.
      page_tokens: 64 for tables of index pages (of every layout), 256 for a FULL-page table of tokens.
      ratio: tokens a key; read for ``page_tokens=256`` only.
      max_query_len: most rows a sequence, a hint.

    Raises:
      TypeError, ValueError: other page sizes or shapes.
    """
    pages, row_ends = _bring(pages), _bring(row_ends).reshape(-1)
    starts = None if query_start_loc is None else _bring(query_start_loc)
    if page_tokens == FULL_PAGE_SIZE:
        return PageTable.from_full_pages(pages, row_ends, ratio=ratio, query_start_loc=starts)
    if page_tokens != PAGE_SIZE:
        raise ValueError(f"page_tokens: expected {PAGE_SIZE} (index pages) or {FULL_PAGE_SIZE}, got {page_tokens}")
    if starts is None:
        return PageTable.from_rows(pages, row_ends)
    return PageTable.from_arrays(pages, row_ends, starts, max_query_len=max_query_len)


def candidates_from_sglang(candidates: Any) -> CandidateBlocks:
    """The blocks that a SOURCE layer of SGLang's published, in ascending order.

    Args:
      candidates: SGLang's ``CandidateBlocks`` (or ``CandidatePage8Table``), or its ids: int32 ``[rows, B]`` in any
        order, -1 for none.
    """
    return CandidateBlocks.from_ids(_bring(getattr(candidates, "ids", candidates)))


def candidate_table_from_sglang(block_tables: Any, row_ends: Any, *, ids: Any = None) -> CandidateTable:
    """The candidate table of SGLang's page-8 scorer, from a ``CandidatePage8Table``'s three arrays.

    The columns stay in SGLang's order (its newest block is last, the others come as they were selected); padding
    entries, page 0 there, lie past the row ends.

    Args:
      block_tables: int32 ``[rows, B]`` 8-slot pages.
      row_ends: int32 ``[rows]``, ``compact_lens`` there: columns that a row can reach.
      ids: int32 ``[rows, B]`` block ids; without them the table can be scored, but has no positions.
    """
    pages, ends = _bring(block_tables), _bring(row_ends).reshape(-1)
    return CandidateTable(jnp.full_like(pages, -1) if ids is None else _bring(ids), pages, ends)


def selection_from_sglang(page_indices: Any, raw_indices: Any) -> Selection:
    """SGLang's selected slots and positions in the order of ours: ascending by position, then -1.

    Args:
      page_indices: int32 ``[rows, k]`` slots, negative for none.
      raw_indices: int32 ``[rows, k]`` positions of the same entries.
    """
    slots, positions = np.asarray(_bring(page_indices)), np.asarray(_bring(raw_indices))
    check_array("raw_indices", positions, (jnp.int32,), slots.shape)
    live = positions >= 0
    order = np.argsort(np.where(live, positions, np.iinfo(np.int32).max), axis=1, kind="stable")
    positions, slots = (np.take_along_axis(np.where(live, x, -1), order, 1) for x in (positions, slots))
    return Selection(jnp.asarray(positions), jnp.asarray(slots), jnp.asarray(live.sum(axis=1, dtype=np.int32)))


def selection_to_sglang(selection: Selection, page_indices: Any, raw_indices: Any = None) -> None:
    """Writes a selection into SGLang's buffers, in place: slots, and positions if there is a buffer for them.

    Args:
      selection: ours, ``[rows, k]``.
      page_indices: int32 tensor ``[rows, k]`` (``sparse_page_indices``), rows possibly strided.
      raw_indices: likewise (``sparse_raw_indices``), or None.

    Raises:
      ValueError: a buffer of another shape.
    """
    for name, buffer, values in (
        ("page_indices", page_indices, selection.slots),
        ("raw_indices", raw_indices, selection.positions),
    ):
        if buffer is None:
            continue
        if tuple(buffer.shape) != tuple(values.shape):
            raise ValueError(f"{name}: expected {list(values.shape)}, got {list(buffer.shape)}")
        buffer.copy_(to_torch(values))
