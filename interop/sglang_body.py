"""Runs SGLang's own ROCm decode body on a recorded case: SOURCE, then REINDEX, with this library's scorer."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from k2i_jax.interop.aiter_standin import aiter_standin
from k2i_jax.interop.devices import torch
from k2i_jax.interop.sglang_host import SGLang
from k2i_jax.layout import PageLayout

SOURCE, REINDEX = 20, 24  # layers of V4.1-Flash: the candidate source, and the first that looks among its candidates


class Outcome(NamedTuple):
    """What SGLang's body wrote, as NumPy arrays."""

    candidate_ids: np.ndarray
    source_positions: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    calls: list[dict[str, Any]]


class Backend:
    """The parts of SGLang's attention backend and pool that its decode body reads, holding a case.

    Args:
      sglang: SGLang's modules.
      arrays: a case's (see ``k2i_jax.case``).
      layout: PAGE64 or PAGE8, the plane to use.
      rowgroup: have the row-group kernel score (it alone reads PAGE8); False takes aiter's schedule kernel.
    """

    def __init__(self, sglang: SGLang, arrays: dict[str, np.ndarray], layout: PageLayout, *, rowgroup: bool = True):
        t = torch()
        self.sglang, self.arrays, self.layout = sglang, arrays, layout
        rows, self.index_topk = arrays["topk_positions"].shape
        self.topk_blocks, self.rows = int(arrays["topk_blocks"]), rows
        payload = _tensor(arrays[f"{layout}_payload"]).view(t.float4_e2m1fn_x2)
        scale = _tensor(arrays[f"{layout}_scale"])
        self.token_to_kv_pool = SimpleNamespace(
            get_index_k_fp4_payload_buffer=lambda layer: payload,
            get_index_k_fp4_scale_buffer=lambda layer: scale,
            low_ratio_index_k_page8=lambda layer: layout is PageLayout.PAGE8,
            low_ratio_index_k_is_split=lambda layer: True,
        )
        self.page_table = _tensor(arrays["page_table"][arrays["row_to_seq"]])
        self.lengths = _tensor(arrays["lengths"])
        slots = t.full((rows, self.index_topk), -1, dtype=t.int32)
        positions = slots.clone()
        self.core = SimpleNamespace(
            sparse_page_indices=lambda ratio: slots,
            sparse_raw_indices=lambda ratio: positions,
            drop_folded_sparse_indices=lambda ratio: None,
        )
        metadata = SimpleNamespace(
            page_table=self.page_table, compressed_seq_lens=self.lengths, compressed_page_size=64
        )
        workspaces = {}
        if rowgroup:
            workspaces[1] = sglang.indexer.prepare_fp4_rowgroup_decode_workspace(self.page_table, 1)
        self.forward_metadata = SimpleNamespace(
            core_metadata=self.core,
            low_ratio_indexer_metadata=lambda ratio: metadata,
            fp4_low_ratio_decode_workspaces=workspaces,
        )
        self.low_ratio_identity_skip = False
        self.low_ratio_candidate_span: int | None = None
        self.candidate_masks: Any = None
        self.max_context_len = self.page_table.shape[1] * 64
        self._drop_opus_topk_csr = lambda ratio: None

    def layer(self, layer_id: int) -> SimpleNamespace:
        """A SOURCE or REINDEX layer of ratio 1."""
        t = torch()
        queries, weights = _tensor(self.arrays["q_input"]).bfloat16(), _tensor(self.arrays["weights"]).bfloat16()
        heads = queries.shape[1]
        indexer = SimpleNamespace(
            n_heads=heads,
            n_local_heads=heads,
            index_head_dim=128,
            rope_head_dim=0,  # the case's queries are rotated already: SGLang's packer alone is left to run
            weights_proj_hip_max_tokens=0,
            queries=lambda q_lora, freqs_cis, positions: queries,
            head_weights=lambda x: weights,
            is_candidate_source=layer_id == SOURCE,
            uses_candidates=layer_id == REINDEX,
            candidate_block_size=8,
            candidate_topk_blocks=self.topk_blocks,
            index_topk=self.index_topk,
        )
        return SimpleNamespace(compress_ratio=1, layer_id=layer_id, indexer=indexer, freqs_cis=t.empty(0))

    def batch(self) -> SimpleNamespace:
        """A decode batch of as many requests as the case has rows."""
        mode = SimpleNamespace(
            is_decode=lambda: True, is_target_verify=lambda: False, is_extend=lambda: False, name="DECODE"
        )
        return SimpleNamespace(forward_mode=mode, seq_lens_cpu=self.lengths, batch_size=self.rows)


def run_decode(backend: Backend, layer_call: Any = None, **options: Any) -> Outcome:
    """One decode step of two index layers, through SGLang's ``low_ratio_index_topk_hip_decode``.

    Args:
      backend: the case.
      layer_call: called with (backend, layer, batch, positions) in place of SGLang's decode body, for hooks.
      **options: of the scoring.
    """
    sglang, batch, t = backend.sglang, backend.batch(), torch()
    pos, hidden = t.zeros(backend.rows, dtype=t.int64), t.empty(backend.rows, 1)
    if layer_call is None:

        def layer_call(backend, layer, batch, pos):
            sglang.decode.low_ratio_index_topk_hip_decode(backend, layer, hidden, None, pos, batch)

    with aiter_standin(sglang, **options) as flydsl, _packing_once(sglang):
        layer_call(backend, backend.layer(SOURCE), batch, pos)
        masks = backend.candidate_masks  # a prefill publishes a request at a time
        ids = np.concatenate([mask.ids.numpy() for mask in (masks if isinstance(masks, list) else [masks])])
        source = backend.core.sparse_raw_indices(1).numpy().copy()
        layer_call(backend, backend.layer(REINDEX), batch, pos)
    positions, slots = backend.core.sparse_raw_indices(1), backend.core.sparse_page_indices(1)
    return Outcome(ids, source, positions.numpy().copy(), slots.numpy().copy(), flydsl.calls)


@contextlib.contextmanager
def _packing_once(sglang: SGLang) -> Iterator[None]:
    """SGLang's packer, asked once for each set of queries: Triton's interpreter takes a second for a row of them."""
    body: Any = sglang.decode
    packer = body.pack_fp4_query_flydsl

    def pack(queries):
        key = hash(queries.contiguous().view(torch().uint8).numpy().tobytes())
        if key not in _packed:
            _packed[key] = packer(queries)
        return tuple(x.clone() for x in _packed[key])

    body.pack_fp4_query_flydsl = pack
    try:
        yield
    finally:
        body.pack_fp4_query_flydsl = packer


_packed: dict[int, Any] = {}


def _tensor(array):
    """As a torch tensor in memory of its own (torch aligns it to 64 bytes)."""
    return torch().tensor(np.ascontiguousarray(array))
