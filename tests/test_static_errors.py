"""Static facts that do not fit: each error names the argument and says what came and what was expected."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import random_batch, random_fp4

import k2i_jax as k
from k2i_jax import CandidateBlocks, CandidateTable, FP4Array, IndexKPlane, PageLayout, PageTable

ENDS = [130, 65, 64, 1]
CANDIDATES = CandidateBlocks.from_ids(np.tile(np.arange(24), (4, 1)))


def scoring_errors():
    """(error, message, what to change in the arguments of ``index_logits``)."""
    u8 = lambda *shape: np.zeros(shape, np.uint8)
    queries = lambda heads, rows=4: FP4Array(u8(rows, heads, 64), u8(rows, heads, 4))
    weights = lambda *shape, dtype=np.float32: np.zeros(shape, dtype)
    plane = IndexKPlane(u8(16, 4096), u8(15, 256), PageLayout.PAGE8)
    table = PageTable(np.zeros((4, 3), np.int64), np.zeros(4, np.int32), np.zeros(5, np.int32))
    return [
        (TypeError, "queries: expected a k2i_jax.FP4Array, got", {"queries": u8(4, 32, 64)}),
        (ValueError, r"queries.payload: .*\[4, heads, 64\], got \[5, 32, 64\]", {"queries": queries(32, 5)}),
        (
            ValueError,
            r"queries.scale: .*\[4, 32, 4\], got \[4, 32, 1\]",
            {"queries": FP4Array(u8(4, 32, 64), u8(4, 32, 1))},
        ),
        (
            TypeError,
            r"queries.payload: expected uint8 .*int8",
            {"queries": FP4Array(np.zeros((4, 32, 64), np.int8), u8(4, 32, 4))},
        ),
        (ValueError, "queries: .*16 heads.*24", {"queries": queries(24), "weights": weights(4, 24)}),
        (ValueError, "queries: .*up to 128.*144", {"queries": queries(144), "weights": weights(4, 144)}),
        (ValueError, r"weights: .*\[4, 32\], got \[4, 16\]", {"weights": weights(4, 16)}),
        (TypeError, "weights: expected float32 or bfloat16 .*float16", {"weights": weights(4, 32, dtype=np.float16)}),
        (TypeError, "weights: .*float64", {"weights": weights(4, 32, dtype=np.float64)}),
        (TypeError, "plane: expected a k2i_jax.IndexKPlane", {"plane": (u8(16, 4096), u8(16, 256))}),
        (ValueError, r"plane.scale: expected shape \[16, 256\], got \[15, 256\]", {"plane": plane}),
        (TypeError, "plane.scale: expected an array", {"plane": IndexKPlane(u8(16, 4096), None, PageLayout.PAGE64)}),
        (
            ValueError,
            r"plane.payload: .*4096.*\[16, 4352\]",
            {"plane": IndexKPlane(u8(16, 4352), None, PageLayout.PAGE64)},
        ),
        (ValueError, "plane.scale: .*FUSED", {"plane": IndexKPlane(u8(16, 4352), u8(16, 256), PageLayout.FUSED)}),
        (TypeError, "table: expected a k2i_jax.PageTable", {"table": np.zeros((4, 3), np.int32)}),
        (TypeError, r"table.pages: expected int32 .*int64 \[4, 3\]", {"table": table}),
        (ValueError, "implementation: .*'fast'", {"implementation": "fast"}),
        (ValueError, "interpret: .*xla", {"implementation": "xla", "interpret": True}),
        (ValueError, r"weight_scale: .*\[3\]", {"weight_scale": np.ones(3, np.float32)}),
        (ValueError, r"weight_scale: .*\[32\]", {"weight_scale": np.ones(32, np.float32)}),  # would scale each head
    ]


@pytest.mark.parametrize(("error", "match", "change"), scoring_errors())
def test_errors_of_scoring(error, match, change):
    """At once and while tracing; ``candidate_logits`` checks the same arguments."""
    batch = random_batch(10, ENDS, columns=3, num_pages=16)
    names = ("queries", "weights", "plane", "table")
    arguments = dict(zip(names, batch.args, strict=True)) | change
    with pytest.raises(error, match=match):
        k.index_logits(**arguments)
    static = {x: arguments.pop(x) for x in ("implementation", "interpret") if x in arguments}
    if change.keys() & {"weights", "weight_scale", "implementation", "queries"} and "float64" not in match:
        with pytest.raises(error, match=match):
            jax.jit(lambda x: k.index_logits(**x, **static))(arguments)
    if "table" not in change:
        del arguments["table"]
        with pytest.raises(error, match=match):
            k.candidate_logits(**arguments, **static, candidate_table=k.candidate_table(CANDIDATES, batch.table))


def test_errors_of_selection():
    batch = random_batch(10, ENDS, columns=3, num_pages=16)
    table, logits = batch.table, jnp.zeros((4, 192))
    candidates, blocks = k.candidate_table(CANDIDATES, table), CANDIDATES
    short = CandidateBlocks(blocks.ids[:3], blocks.count[:3])
    uneven = CandidateTable(candidates.ids, candidates.virtual_pages[:, :5], candidates.row_ends)
    for error, match, call in (
        (ValueError, r"logits: .*\[4, 192\], got \[4, 128\]", lambda: k.select_topk(logits[:, :128], table)),
        (ValueError, r"logits: .*\[4, 192\], got \[3, 192\]", lambda: k.select_topk(logits[:3], candidates)),
        (TypeError, "logits: expected float32 .*bfloat16", lambda: k.select_topk(logits.astype(jnp.bfloat16), table)),
        (ValueError, "k: expected an integer of at least 1, got 0", lambda: k.select_topk(logits, table, k=0)),
        (TypeError, "table: expected a k2i_jax.PageTable", lambda: k.select_topk(logits, None)),
        (ValueError, r"row_ends: .*\[4\], got \[5\]", lambda: k.select_candidate_blocks(logits, np.zeros(5, int))),
        (TypeError, "row_ends: .*integer", lambda: k.select_candidate_blocks(logits, np.zeros(4))),
        (ValueError, "topk_blocks.*0", lambda: k.select_candidate_blocks(logits, table.row_ends, topk_blocks=0)),
        (TypeError, "logits: expected float32", lambda: k.select_candidate_blocks(np.zeros((4, 8)), table.row_ends)),
        (ValueError, r"blocks.ids: expected shape \[4, B\], got \[3, 24\]", lambda: k.candidate_table(short, table)),
        (
            TypeError,
            "blocks: expected a k2i_jax.CandidateBlocks",
            lambda: k.reindex(*batch.args, np.zeros((4, 3), int)),
        ),
        (ValueError, r"blocks.ids: .*\[3, 24\]", lambda: k.reindex(*batch.args, short)),
        (ValueError, r"candidate_table.virtual_pages: .*\[4, 5\]", lambda: k.candidate_logits(*batch.args[:3], uneven)),
        (TypeError, "candidate_table: expected", lambda: k.candidate_logits(*batch.args)),
        (TypeError, "k: expected an integer", lambda: k.source(*batch.args, k=2.5)),
        (
            ValueError,
            "weights: expected shape",
            lambda: k.source(batch.args[0], batch.args[1][:3], *batch.args[2:], rows_per_step=1),
        ),
        (TypeError, "weight_scale: expected a number", lambda: k.source(*batch.args, weight_scale="1")),
        (ValueError, "rows_per_step: .*0", lambda: k.source(*batch.args, rows_per_step=0)),
        (ValueError, "k: expected an integer of at least 1", lambda: k.source(*batch.args, k=0)),
        (TypeError, "ids: expected an integer array", lambda: CandidateBlocks.from_ids(np.zeros((4, 3)))),
        (ValueError, r"ids: .*\[rows, B\]", lambda: CandidateBlocks.from_ids(np.zeros(4, int))),
    ):
        with pytest.raises(error, match=match):
            call()


def test_errors_of_writing():
    plane = IndexKPlane.zeros(3, PageLayout.PAGE8)
    keys, slots = random_fp4(np.random.default_rng(0), 3), np.arange(3)
    for error, match, arguments in (
        (TypeError, "plane: expected", (None, slots, keys)),
        (TypeError, "slots: expected an integer array, got float", (plane, slots * 1.0, keys)),
        (ValueError, r"slots: .*\[1, 3\]", (plane, slots[None], keys)),
        (ValueError, r"keys.payload: .*\[2, 64\], got \[3, 64\]", (plane, slots[:2], keys)),
        (
            ValueError,
            r"keys.scale: .*\[3, 4\], got \[2, 4\]",
            (plane, slots, FP4Array(keys.payload, keys.scale[:2])),
        ),
        (TypeError, r"keys: expected a k2i_jax.FP4Array", (plane, slots, keys.payload)),
    ):
        with pytest.raises(error, match=match):
            k.write_keys(*arguments)
    with pytest.raises(TypeError, match="slots: expected an integer array"):
        k.read_keys(plane, np.zeros(3))


def errors_of_values():
    """(error, message, call): one wrong value each."""
    layout = PageLayout.PAGE8
    zeros = lambda *shape, dtype=np.uint8: np.zeros(shape, dtype)
    plane = IndexKPlane.zeros(1, layout)
    flash = lambda **numbers: lambda: k.K2iSpec.v41_flash(**numbers)
    to_aiter, from_aiter, i32, f32 = k.query_scale_to_aiter, k.query_scale_from_aiter, np.int32, np.float32
    names = "page64', 'page8', 'fused"
    return [
        (ValueError, rf"layout: expected one of \['{names}'\], got 'page16'", lambda: PageLayout("page16")),
        (ValueError, "layout: expected one of .*'page16'", lambda: k.repack(plane, "page16")),
        (TypeError, "recipe: expected None or a k2i_jax.FP4Recipe, got 'sglang'", lambda: plane.tag("sglang")),
        (TypeError, "other: expected a k2i_jax.LayoutTag, got NoneType", lambda: plane.tag().check(None)),
        (ValueError, r"scale: expected shape \[rows, heads, 4\]", lambda: to_aiter(zeros(2, 32))),
        (TypeError, r"scale: expected uint8 .* got int32", lambda: to_aiter(zeros(2, 32, 4, dtype=i32))),
        (ValueError, r"scale: expected shape \[rows, 1, 4, 16, 4\]", lambda: from_aiter(zeros(2, 32, 4), 32)),
        (ValueError, "heads: expected 1..64, got 65", lambda: from_aiter(zeros(2, 1, 4, 16, 4), 65)),
        (ValueError, r"x: expected at least one head, got \[3, 0\]", lambda: k.head_weights(zeros(3, 0, dtype=f32))),
        (TypeError, "x: .*float64.*; pass x.astype", lambda: k.quantize_fp4(zeros(32, dtype=np.float64))),
        (TypeError, "x: expected an array .*got list", lambda: k.quantize_fp4([0.0] * 32)),
        (TypeError, "reindex_layers: expected layer numbers, got 5", flash(reindex_layers=5)),
        (TypeError, "weight_scale: expected a number, got 'x'", flash(weight_scale="x")),
        (TypeError, "norm_eps: expected a number, got None", flash(norm_eps=None)),
        (TypeError, "rope_theta: expected a number, got '1e4'", flash(rope_theta="1e4")),
        (ValueError, "rope_dims: expected an integer of at least 1, got 64.0", flash(rope_dims=64.0)),
    ]  # fmt: skip


@pytest.mark.parametrize(("error", "match", "call"), errors_of_values())
def test_errors_of_values(error, match, call):
    with pytest.raises(error, match=match):
        call()


def test_a_torch_tensor_is_told_the_way_in():
    torch = pytest.importorskip("torch")
    batch = random_batch(0, [64], columns=1)
    with pytest.raises(TypeError, match=r"weights: expected float32 .*got torch.int64 .*dlpack\.to_jax"):
        k.index_logits(batch.queries, torch.zeros(1, 32, dtype=torch.int64), *batch.args[2:])
    with pytest.raises(TypeError, match=r"x: .*torch.float32 .*dlpack\.to_jax"):
        k.quantize_fp4(torch.zeros(32))


def test_printing_a_report_without_rich_names_the_extra(monkeypatch):
    from k2i_jax.interop.crosscheck import crosscheck

    report = crosscheck(np.zeros((1, 8), np.float32), np.zeros((1, 8), np.float32), [8])
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(ImportError, match=r"k2i_jax\[cli\]"):
        report.print()
