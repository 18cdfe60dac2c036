"""SGLang's objects in, selections out, with stand-ins for its pool: shapes, strides, padding and errors."""

from types import SimpleNamespace

import numpy as np
import pytest
from cases import LAYOUTS, bits, golden, random_batch

import k2i_jax as k
from k2i_jax.interop import sglang as bridge
from k2i_jax.interop.sglang_check import run
from k2i_jax.interop.sglang_host import find_sglang

torch = pytest.importorskip("torch")


def tensor(x):
    return torch.tensor(np.ascontiguousarray(x))


def pool_of(payload, scale, page8, page_size=64):
    return SimpleNamespace(
        low_ratio_index_k_is_split=lambda layer: scale is not None,
        low_ratio_index_k_page8=lambda layer: page8,
        get_index_k_fp4_payload_buffer=lambda layer: payload,
        get_index_k_fp4_scale_buffer=lambda layer: scale,
        get_index_k_with_scale_buffer=lambda layer: payload,
        get_index_k_page_size=lambda ratio: page_size,
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_plane_shares_memory_and_gives_native_bits(layout):
    case = golden("verify")
    payload = tensor(case[f"{layout}_payload"]).view(torch.float4_e2m1fn_x2)
    scale = tensor(case[f"{layout}_scale"])
    plane = bridge.plane_from_pool(pool_of(payload, scale, layout == "page8"), 20, ratio=1)
    assert plane.layout is layout
    assert plane.payload.unsafe_buffer_pointer() == payload.data_ptr()
    assert plane.scale.unsafe_buffer_pointer() == scale.data_ptr()
    args = case.queries, case["weights"]
    native = k.index_logits(*args, case.plane(layout), case.table)
    np.testing.assert_array_equal(bits(k.index_logits(*args, plane, case.table)), bits(native))


@pytest.mark.parametrize(
    ("payload", "scale", "complaint"),
    [
        ((3, 8704), None, "pages of 128 slots, only 64"),
        ((3, 8448), None, "hold no FP4 index keys"),
        ((3, 1, 4, 128, 16), (3, 1, 4, 128), "pages of 128 slots, only 64"),
        ((3, 4096), (3, 1, 4, 64), r"expected a payload buffer \[pages, 1, 4, 64, 16\]"),
    ],
)
def test_other_pools_are_refused(payload, scale, complaint):
    made = [None if shape is None else torch.zeros(shape, dtype=torch.uint8) for shape in (payload, scale)]
    with pytest.raises(ValueError, match=complaint):
        bridge.plane_from_pool(pool_of(*made, False), 20)


def test_a_pool_without_the_methods_and_one_that_contradicts_itself():
    with pytest.raises(TypeError, match=r"SimpleNamespace has no low_ratio_index_k_is_split\(\)"):
        bridge.plane_from_pool(SimpleNamespace(), 20)
    buffers = torch.zeros(3, 1, 4, 64, 16, dtype=torch.uint8), torch.zeros(3, 1, 4, 64, dtype=torch.uint8)
    with pytest.raises(ValueError, match="pages of ratio 2 hold 128 slots"):
        bridge.plane_from_pool(pool_of(*buffers, False, page_size=128), 20, ratio=2)


def test_tables_with_strided_rows_tails_and_full_pages():
    batch = random_batch(5, (300, 70, 640), columns=17)
    pages, ends = np.asarray(batch.table.pages), np.asarray(batch.table.row_ends)
    wide = torch.full((6, 24), 2**31 - 1, dtype=torch.int32)  # every other row, and a tail nobody wrote
    wide[::2, :17] = tensor(pages)
    expected = bits(k.index_logits(*batch.args))
    table = bridge.table_from_sglang(wide[::2], tensor(ends))
    logits = k.index_logits(batch.queries, batch.weights, batch.plane, table)
    np.testing.assert_array_equal(bits(logits[:, : expected.shape[1]]), expected)
    assert bool((logits[:, expected.shape[1] :] == -np.inf).all())
    starts = torch.arange(4, dtype=torch.int32)
    same = bridge.table_from_sglang(tensor(pages), tensor(ends).long(), query_start_loc=starts, max_query_len=1)
    np.testing.assert_array_equal(bits(k.index_logits(batch.queries, batch.weights, batch.plane, same)), expected)
    full = bridge.table_from_sglang(tensor([[2, 1]]), tensor([130]).int(), page_tokens=256, ratio=2)
    assert full.pages.tolist() == [[4, 5, 2, 3]]
    with pytest.raises(ValueError, match="page_tokens: expected 64"):
        bridge.table_from_sglang(tensor(pages), tensor(ends), page_tokens=128)


def test_queries_both_ways():
    case = golden("heads64")
    q_fp4, q_scale = bridge.queries_to_sglang(case.queries)
    np.testing.assert_array_equal(q_scale.numpy(), case["q_scale"])
    for payload in (q_fp4, q_fp4[:, None], q_fp4.view(torch.float4_e2m1fn_x2)):
        back = bridge.queries_from_sglang(payload, q_scale)
        np.testing.assert_array_equal(bits(back.payload), bits(case.queries.payload))
        np.testing.assert_array_equal(bits(back.scale), bits(case.queries.scale))
    with pytest.raises(ValueError, match="q_scale: expected shape"):
        bridge.queries_from_sglang(q_fp4, q_scale[:1])


def test_selection_both_ways_and_candidates():
    case = golden("two_level")
    rng = np.random.default_rng(0)
    order = np.argsort(rng.random(case["topk_positions"].shape), axis=1)
    slots, positions = (np.take_along_axis(case[name], order, 1) for name in ("topk_slots", "topk_positions"))
    back = bridge.selection_from_sglang(tensor(slots), tensor(positions))
    np.testing.assert_array_equal(back.positions, case["topk_positions"])
    np.testing.assert_array_equal(back.slots, case["topk_slots"])
    np.testing.assert_array_equal(back.count, (case["topk_positions"] >= 0).sum(axis=1))
    buffer = torch.zeros(5, 128, dtype=torch.int32)
    bridge.selection_to_sglang(back, buffer[:, :64])
    np.testing.assert_array_equal(buffer[:, :64].numpy(), case["topk_slots"])
    assert not buffer[:, 64:].any()
    with pytest.raises(ValueError, match=r"raw_indices: expected \[5, 64\], got \[5, 128\]"):
        bridge.selection_to_sglang(back, buffer[:, :64], buffer)
    blocks = bridge.candidates_from_sglang(SimpleNamespace(ids=tensor(case["candidate_ids"])))
    chosen = k.reindex(case.queries, case["weights"], case.plane("page8"), case.table, blocks, k=64)
    np.testing.assert_array_equal(chosen.positions, case["topk_positions"])
    table = bridge.candidate_table_from_sglang(
        tensor(case["page8_tables"]), tensor(case["page8_lens"]), ids=tensor(case["page8_ids"])
    )
    logits = k.candidate_logits(case.queries, case["weights"], case.plane("page8"), table)
    again = np.sort(np.asarray(k.select_topk(logits, table, k=64).positions), axis=1)
    np.testing.assert_array_equal(again, np.sort(case["topk_positions"], axis=1))


def test_sglang_check_without_sglang(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="expected the package's folder"):
        run(str(tmp_path))
    (tmp_path / "sglang").mkdir()  # a folder of that name is no SGLang
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = find_sglang()
    assert found is None or found != tmp_path / "sglang"


@pytest.mark.skipif(find_sglang() is not None, reason="SGLang is here")
def test_what_needs_sglang_says_how_to_get_it():
    from k2i_jax.interop.sglang_host import import_sglang

    with pytest.raises(ImportError, match="make test-sglang"):
        import_sglang()
