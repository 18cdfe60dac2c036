"""SGLang's writer, packer and pools, byte for byte."""

import numpy as np
import pytest
from cases import LAYOUTS, bits, golden

import k2i_jax as k
from k2i_jax.interop import sglang as bridge

CASES = ("decode", "two_level", "verify")
WRITTEN = 150  # keys and query rows go through Triton's interpreter, which takes 10 ms for one of them


def torch_of(array):
    import torch

    return torch.tensor(np.ascontiguousarray(array))


def holding(pool, case, layout):
    """``pool`` with a golden case's bytes in the pages of the ratio-1 plane."""
    pages = len(case[f"{layout}_scale"])
    pool.get_index_k_fp4_payload_buffer(20).view(torch_of(case["q_fp4"]).dtype)[:pages] = torch_of(
        case[f"{layout}_payload"]
    )
    pool.get_index_k_fp4_scale_buffer(20)[:pages] = torch_of(case[f"{layout}_scale"])
    return pool


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_writer_gives_the_golden_bytes_and_ours(make_pool, layout):
    case, some = golden("verify"), np.s_[:WRITTEN]
    pool = make_pool(page8=layout == "page8", pages=len(case["page8_scale"]))
    keys, slots = torch_of(case["k_input"][some]).bfloat16(), torch_of(case["slots"][some])
    pool.index_pools[1].set_index_fp4(0, slots, keys)  # SGLang's store_fp4_index_k_cache_split, as its pool calls it
    plane = bridge.plane_from_pool(pool, 20, ratio=1)
    assert plane.layout is layout
    ours = k.write_keys(
        k.IndexKPlane.zeros(plane.num_pages, layout), case["slots"][some], k.quantize_fp4(case["k_input"][some])
    )
    written, whole = k.read_keys(plane, case["slots"][some]), k.read_keys(case.plane(layout), case["slots"][some])
    for what in ("payload", "scale"):
        np.testing.assert_array_equal(bits(getattr(plane, what)), bits(getattr(ours, what)))
        np.testing.assert_array_equal(bits(getattr(written, what)), bits(getattr(whole, what)))
        for page in np.unique(case["slots"][some] // 64):  # whole pages, where all of a page's keys were written
            if (case["slots"][some] // 64 == page).sum() == (case["slots"] // 64 == page).sum():
                golden_page = case[f"{layout}_{what}"][page].reshape(-1)
                np.testing.assert_array_equal(bits(getattr(plane, what))[page], golden_page)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_plane_is_the_pools_own_memory(make_pool, layout):
    pool = make_pool(page8=layout == "page8")
    for layer in (20, 24):  # 24 owns no keys: the pool resolves it to 20's buffers
        plane = bridge.plane_from_pool(pool, layer)
        assert plane.payload.unsafe_buffer_pointer() == pool.get_index_k_fp4_payload_buffer(20).data_ptr()
        assert plane.scale.unsafe_buffer_pointer() == pool.get_index_k_fp4_scale_buffer(20).data_ptr()
        assert plane.layout is layout
    other = bridge.plane_from_pool(pool, 19, ratio=2)
    assert other.layout is k.PageLayout.PAGE64  # the switch concerns the ratio-1 pool alone
    assert other.payload.unsafe_buffer_pointer() != plane.payload.unsafe_buffer_pointer()


def test_the_pools_flag_counts_not_the_environment(make_pool, monkeypatch):
    monkeypatch.setenv("SGLANG_HIP_DSV41_INDEX_K_PAGE8", "1")
    assert bridge.plane_from_pool(make_pool(page8=False), 20).layout is k.PageLayout.PAGE64


def test_the_accessors_wait_for_a_transfer(make_pool):
    waited = []
    pool = make_pool()
    pool.layer_transfer_counter = type("Counter", (), {"wait_until": staticmethod(waited.append)})
    bridge.plane_from_pool(pool, 24)
    assert set(waited) == {24}


@pytest.mark.parametrize("name", CASES)
def test_fused_pool(make_pool, name):
    case = golden(name)
    pool = make_pool(fused=True, pages=len(case["fused_pool"]))
    buffer = pool.get_index_k_with_scale_buffer(20)
    buffer[: len(case["fused_pool"])] = torch_of(case["fused_pool"])
    plane = bridge.plane_from_pool(pool, 24, ratio=1)
    assert plane.layout is k.PageLayout.FUSED
    assert plane.payload.unsafe_buffer_pointer() == buffer.data_ptr()
    split = k.index_logits(case.queries, case["weights"], case.plane("page64"), case.table)
    np.testing.assert_array_equal(bits(k.index_logits(case.queries, case["weights"], plane, case.table)), bits(split))


def test_fused_pages_of_128_slots_are_refused_with_that_number(make_pool):
    with pytest.raises(ValueError, match="pages of 128 slots"):
        bridge.plane_from_pool(make_pool(fused=True, page_size=128), 20)


def test_a_contradicting_ratio_is_refused(make_pool):
    pool = make_pool()
    pool.index_pools[2].page_size = 128
    with pytest.raises(ValueError, match="ratio 2 hold 128 slots, layer 20's 64"):
        bridge.plane_from_pool(pool, 20, ratio=2)


@pytest.mark.parametrize("name", [*CASES, "heads64", "wide_scales"])
def test_packer_gives_our_query_bytes(sglang, name):
    case = golden(name)
    q_fp4, q_scale = sglang.indexer.pack_fp4_query_flydsl(torch_of(case["q_input"][:3]).bfloat16())
    np.testing.assert_array_equal(q_fp4.numpy().view(np.uint8), case["q_fp4"][:3])
    np.testing.assert_array_equal(q_scale.numpy(), case["q_scale"][:3])
    ours = k.quantize_fp4(case["q_input"][:3])
    theirs = bridge.queries_from_sglang(q_fp4, q_scale)
    np.testing.assert_array_equal(bits(theirs.payload), bits(ours.payload))
    np.testing.assert_array_equal(bits(theirs.scale), bits(ours.scale))
    back = bridge.queries_to_sglang(ours)
    assert back[0].dtype == q_fp4.dtype
    assert (back[0] == q_fp4).all()
    assert (back[1] == q_scale).all()


@pytest.mark.parametrize("name", CASES)
def test_logits_of_an_imported_plane_have_the_native_bits(make_pool, name, layout):
    case = golden(name)
    pool = holding(make_pool(page8=layout == "page8", pages=len(case["page64_payload"])), case, layout)
    args = case.queries, case["weights"]
    native = k.index_logits(*args, case.plane(layout), case.table)
    imported = k.index_logits(*args, bridge.plane_from_pool(pool, 20), case.table)
    np.testing.assert_array_equal(bits(imported), bits(native))
