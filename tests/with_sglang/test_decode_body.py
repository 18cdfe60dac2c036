"""SGLang's own decode body, SOURCE then REINDEX, with this library in aiter's place."""

import sys

import numpy as np
import pytest
from cases import LAYOUTS, golden

from k2i_jax import cli
from k2i_jax.interop import sglang as bridge
from k2i_jax.interop.aiter_standin import aiter_standin
from k2i_jax.interop.dlpack import to_jax
from k2i_jax.interop.sglang_body import Backend, run_decode


def sets(ids):
    return [sorted(row[row >= 0].tolist()) for row in np.asarray(ids)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", ["two_level", "verify"])
@pytest.mark.parametrize("rowgroup", [True, False], ids=["workspace", "no workspace"])
def test_source_then_reindex_gives_the_golden_candidates_positions_and_slots(sglang, name, layout, rowgroup):
    case = golden(name)
    backend = Backend(sglang, case.arrays, layout, rowgroup=rowgroup)
    outcome = run_decode(backend)
    assert sets(outcome.candidate_ids) == sets(case["candidate_ids"])
    assert sets(outcome.positions) == sets(case["topk_positions"])
    assert sets(outcome.slots) == sets(case["topk_slots"])
    page8 = layout == "page8"
    assert [call["page8"] for call in outcome.calls] == [page8, page8]
    assert [call["pages_per_block"] for call in outcome.calls] == ([8, 1] if page8 else [1, 1])
    assert outcome.calls[1]["tables"][1] == (16 if page8 else outcome.calls[0]["tables"][1])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_sglangs_tables_and_candidates_come_in_and_our_selection_goes_out(sglang, layout):
    """The REINDEX step done here, from SGLang's live objects, and written into SGLang's buffers."""
    import k2i_jax as k

    case = golden("two_level")
    backend = Backend(sglang, case.arrays, layout)
    outcome = run_decode(backend)
    workspace = backend.forward_metadata.fp4_low_ratio_decode_workspaces[1]
    table = bridge.table_from_sglang(workspace.guarded_page_table, backend.lengths)
    assert table.width > backend.max_context_len  # SGLang's is padded, and holds a guard
    layer = backend.layer(24)
    q_fp4, q_scale, weights = sglang.decode._indexer_inputs(layer, backend.page_table[:, :1], None, None)
    queries = bridge.queries_from_sglang(q_fp4, q_scale)
    plane = bridge.plane_from_pool(backend.token_to_kv_pool, 24)
    blocks = bridge.candidates_from_sglang(backend.candidate_masks)
    weights = to_jax(weights)
    chosen = k.reindex(queries, weights, plane, table, blocks, k=backend.index_topk)
    theirs = bridge.selection_from_sglang(backend.core.sparse_page_indices(1), backend.core.sparse_raw_indices(1))
    for ours, other in zip((chosen.positions, chosen.slots, chosen.count), (theirs.positions, theirs.slots,
                           theirs.count), strict=True):  # fmt: skip
        np.testing.assert_array_equal(ours, other)
    if layout == "page8":
        page8 = backend.candidate_masks.page8
        candidates = bridge.candidate_table_from_sglang(page8.block_tables, page8.compact_lens, ids=page8.ids)
        again = k.select_topk(k.candidate_logits(queries, weights, plane, candidates), candidates, k=backend.index_topk)
        assert sets(again.positions) == sets(outcome.positions)
    for buffer in (backend.core.sparse_page_indices(1), backend.core.sparse_raw_indices(1)):
        buffer.fill_(7)
    bridge.selection_to_sglang(chosen, backend.core.sparse_page_indices(1), backend.core.sparse_raw_indices(1))
    assert sets(backend.core.sparse_page_indices(1)) == sets(outcome.slots)
    assert sets(backend.core.sparse_raw_indices(1)) == sets(outcome.positions)


def test_a_foreign_key_changes_the_outcome(sglang):
    """The body does read our scores: with one scale byte of a chosen key raised, the selection differs."""
    case = golden("two_level")
    arrays = dict(case.arrays, page64_scale=np.roll(case["page64_scale"], 1, axis=0))
    outcome = run_decode(Backend(sglang, arrays, LAYOUTS[0]))
    assert sets(outcome.positions) != sets(case["topk_positions"])


def test_the_standin_leaves_nothing_behind(sglang):
    before = sglang.candidates.topk_transform_paged_v2
    assert not sglang.indexer.aiter_has_fp4_rowgroup()
    with aiter_standin(sglang):
        assert sglang.indexer.aiter_has_fp4_rowgroup()
        assert sglang.candidates.topk_transform_paged_v2 is not before
    assert not sglang.indexer.aiter_has_fp4_rowgroup()
    assert sglang.candidates.topk_transform_paged_v2 is before
    assert not [name for name in sys.modules if name.split(".")[0] == "aiter"]


def test_prefill_kernel_of_the_standin(sglang):
    """SGLang's prefill scoring (aiter's schedule kernel, PAGE64) gives the bits of its decode scoring."""
    case = golden("two_level")
    backend = Backend(sglang, case.arrays, LAYOUTS[0])
    q_fp4, q_scale, weights = sglang.decode._indexer_inputs(backend.layer(20), backend.page_table[:, :1], None, None)
    pool, logits = backend.token_to_kv_pool, {}
    with aiter_standin(sglang) as flydsl, pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)  # raises in a CPU build of torch
        for decode in (True, False):
            out = sglang.indexer.aiter_fp4_paged_mqa_logits(
                q_fp4=q_fp4, q_scale=q_scale, k_payload=pool.get_index_k_fp4_payload_buffer(20),
                k_scale=pool.get_index_k_fp4_scale_buffer(20), weights=weights, page_table=backend.page_table,
                c4_seq_lens=backend.lengths, weight_scale=1.0, is_decode=decode,
            )  # fmt: skip
            logits[decode] = [row[:n].numpy().copy() for row, n in zip(out, backend.lengths, strict=True)]
    assert flydsl.calls[1]["prefill"]
    for a, b in zip(logits[True], logits[False], strict=True):
        np.testing.assert_array_equal(a.view(np.int32), b.view(np.int32))


def test_demo_runs_sglangs_body(sglang, capsys):
    assert cli.main(["demo", "--sglang"]) == 0
    out = capsys.readouterr().out
    assert "SGLang 0.5.23" in out
    assert "all checks hold" in out
    assert "✗" not in out
