"""The cross-check: what it calls equal, which faults it names, how it reports."""

import dataclasses
import io
import json

import jax.numpy as jnp
import numpy as np
import pytest
from cases import golden, random_batch
from rich.console import Console

import k2i_jax as k
from k2i_jax.interop.crosscheck import crosscheck

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module", params=["two_level", "heads64"])
def inputs(request):
    case = golden(request.param)
    return {
        "queries": case.queries,
        # float32 weights that bfloat16 cannot hold, so that rounding them shows
        "weights": np.asarray(case["weights"], np.float32) * np.float32(1.001),
        "plane": case.plane("page64"),
        "table": case.table,
        "weight_scale": 0.5,
    }


def score(inputs, **changes):
    changed = {**inputs, **changes}
    scale = changed.pop("weight_scale")
    return np.array(k.index_logits(*changed.values(), weight_scale=scale))


def ends_of(inputs):
    return np.asarray(inputs["table"].live_ends())


def unwritten(logits, ends, rng):
    """As a kernel leaves them: memory past each row's end holds anything."""
    junk = rng.normal(size=logits.shape).astype(np.float32) * 1e3
    return np.where(np.arange(logits.shape[1]) < ends[:, None], logits, junk)


def test_same_bits_whatever_the_tails(inputs):
    theirs = unwritten(score(inputs), ends_of(inputs), np.random.default_rng(0))
    report = crosscheck(None, theirs, ends_of(inputs), **inputs)
    assert report.ok
    assert report.verdict == "same bits"
    assert report.columns == ends_of(inputs).sum()
    assert not report.causes


def test_torch_logits_and_no_inputs(inputs):
    ours = score(inputs)
    report = crosscheck(ours, torch.from_numpy(ours.copy()), torch.from_numpy(ends_of(inputs).copy()))
    assert report.verdict == "same bits"
    report = crosscheck(ours, ours * np.float32(1.1), ends_of(inputs))
    assert not report.ok
    assert "usual causes" in report.notes[0]


def test_another_order_of_sums_is_within_tolerance(inputs):
    ours = score(inputs)
    theirs = ours * (1 + 2e-7 * np.random.default_rng(1).normal(size=ours.shape)).astype(np.float32)
    report = crosscheck(None, theirs, ends_of(inputs), **inputs)
    assert report.ok
    assert report.verdict.startswith("equal within tolerance")
    assert 0 < report.error["largest row error"] < 1e-6


def test_sglangs_bfloat16_scorer_needs_its_own_tolerance():
    case = golden("verify")
    given = {"queries": case.queries, "weights": case["weights"], "plane": case.plane("page8"), "table": case.table}
    theirs, ends = case["sglang_torch_logits"], case["lengths"]
    assert crosscheck(None, theirs, ends, **given, tolerance=1e-2).ok
    report = crosscheck(None, theirs, ends, **given)
    assert not report.ok
    assert "none of" in report.verdict


FAULTS = {
    "layouts swapped": lambda i: {"plane": dataclasses.replace(i["plane"], layout=k.PageLayout.PAGE8)},
    "scale order: natural and aiter's": lambda i: {"queries": reordered(i["queries"], "natural")},
    "scale order: natural and aiter's order": lambda i: {"queries": reordered(i["queries"], "aiter")},
    "scale order: query scale groups in reverse": lambda i: {
        "queries": k.FP4Array(i["queries"].payload, i["queries"].scale[..., ::-1])
    },
    "scale order: key scales read in page8's order": lambda i: {"plane": scales_as_page8(i["plane"])},
    "scale order: key scales read key by key": lambda i: {"plane": key_by_key(i["plane"])},
    "nibbles swapped": lambda i: {"queries": swapped(i["queries"])},
    "weights rounded to bfloat16": lambda i: {"weights": jnp.asarray(i["weights"]).astype(jnp.bfloat16)},
    "weights rounded to float16": lambda i: {"weights": i["weights"].astype(np.float16).astype(np.float32)},
    "weight scale left out": lambda i: {"weight_scale": 1.0},
    "page table shifted: column +1": lambda i: {"table": with_pages(i["table"], jnp.roll(i["table"].pages, -1, 1))},
    "page table shifted: page ids +1": lambda i: {"table": with_pages(i["table"], i["table"].pages + 1)},
}


def swapped(queries):
    return k.FP4Array((queries.payload >> 4) | (queries.payload << 4), queries.scale)


def with_pages(table, pages):
    return dataclasses.replace(table, pages=pages)


def reordered(queries, held):
    """The queries with scale bytes in one order, read in the other."""
    rows, heads, _ = queries.scale.shape
    if held == "natural":
        buffer = np.zeros((rows, 256), np.uint8)
        buffer[:, : 4 * heads] = np.asarray(queries.scale).reshape(rows, -1)
        h = np.arange(heads)
        scale = buffer.reshape(rows, 4, 16, 4)[:, :, h % 16, h // 16].swapaxes(1, 2)
    else:
        buffer = np.zeros((rows, 4, 16, 4), np.uint8)
        for h in range(heads):
            buffer[:, :, h % 16, h // 16] = np.asarray(queries.scale)[:, h]
        scale = buffer.reshape(rows, -1)[:, : 4 * heads].reshape(rows, heads, 4)
    return k.FP4Array(queries.payload, np.ascontiguousarray(scale))


def scales_as_page8(plane):
    """A PAGE64 plane whose scale bytes alone are read in PAGE8's order."""
    scale = np.asarray(plane.scale)
    wrong = np.empty_like(scale)
    for t in range(64):
        for c in range(4):
            wrong[:, c * 64 + (t % 16) * 4 + t // 16] = scale[:, t // 8 * 32 + c * 8 + t % 8]
    return dataclasses.replace(plane, scale=wrong)


def key_by_key(plane):
    """A PAGE64 plane whose scale bytes are read as [key, group]."""
    scale = np.asarray(plane.scale)
    wrong = np.empty_like(scale)
    for t in range(64):
        for c in range(4):
            wrong[:, c * 64 + (t % 16) * 4 + t // 16] = scale[:, t * 4 + c]
    return dataclasses.replace(plane, scale=wrong)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_named(inputs, fault):
    theirs = score(inputs, **FAULTS[fault](inputs))
    theirs = unwritten(theirs, ends_of(inputs), np.random.default_rng(2))
    report = crosscheck(None, theirs, ends_of(inputs), **inputs)
    assert not report.ok
    assert report.verdict.startswith(f"differs, explained by: {fault}"), report.verdict


@pytest.mark.parametrize("tails", ["exact", "unwritten"])
@pytest.mark.parametrize("step", [-1, 1])
def test_row_ends_off_by_one(inputs, step, tails):
    ends = np.maximum(ends_of(inputs) - 3, 0)  # there are keys past each end, as the rows of a verify step have them
    starts = inputs["table"].query_start_loc
    given = {**inputs, "table": k.PageTable.from_arrays(inputs["table"].pages, ends, starts)}
    theirs = score(inputs, table=k.PageTable.from_arrays(inputs["table"].pages, ends + step * (ends > 0), starts))
    if tails == "unwritten":
        theirs = unwritten(theirs, ends + step, np.random.default_rng(3))
    report = crosscheck(None, theirs, ends, **given, tails=tails)
    assert not report.ok
    assert report.verdict == f"differs, explained by: row ends one {'lower' if step < 0 else 'higher'}"


def test_a_kernel_that_fills_whole_tiles_is_no_fault(inputs):
    ends = ends_of(inputs)
    tiles = np.minimum(-(-ends // 64) * 64, inputs["table"].width)
    table = k.PageTable.from_arrays(inputs["table"].pages, tiles, inputs["table"].query_start_loc)
    assert crosscheck(None, score(inputs, table=table), ends, **inputs).ok


def test_exact_tails_are_checked_when_promised(inputs):
    theirs, ends = score(inputs), ends_of(inputs)
    assert crosscheck(None, theirs, ends, **inputs, tails="exact").ok
    theirs[0, ends[0]] = 0
    assert crosscheck(None, theirs, ends, **inputs).ok
    report = crosscheck(None, theirs, ends, **inputs, tails="exact")
    assert not report.ok
    assert report.masks["past a row's end, not -inf there"] == 1


def test_one_wrong_score_is_found_where_it_is(inputs):
    theirs, ends = score(inputs), ends_of(inputs)
    row = int(np.argmax(ends))
    column = int(ends[row]) - 3
    theirs[row, column] += 10
    report = crosscheck(None, theirs, ends, **inputs)
    slot = int(np.asarray(inputs["table"].slots(np.full((len(ends), 1), column, np.int32)))[row, 0])
    assert not report.ok
    assert (report.worst[0]["row"], report.worst[0]["column"], report.worst[0]["slot"]) == (row, column, slot)
    theirs[row, column] = np.nan
    report = crosscheck(None, theirs, ends, **inputs)
    assert report.masks["visible to us, not finite there"] == 1
    assert report.worst[0]["column"] == column


def test_candidates_and_their_faults():
    rng = np.random.default_rng(5)
    batch = random_batch(5, (500, 333, 129), layout=k.PageLayout.PAGE8)
    given = {"queries": batch.queries, "weights": batch.weights, "plane": batch.plane}
    logits = k.index_logits(*given.values(), batch.table)
    blocks = k.select_candidate_blocks(logits, batch.table.row_ends, topk_blocks=9)
    table = k.candidate_table(blocks, batch.table)
    ends = np.asarray(table.row_ends)
    theirs = unwritten(np.array(k.candidate_logits(*given.values(), table)), ends, rng)
    assert crosscheck(None, theirs, ends, **given, table=table).verdict == "same bits"
    shifted = dataclasses.replace(table, virtual_pages=table.virtual_pages + 1)
    theirs = unwritten(np.array(k.candidate_logits(*given.values(), shifted)), ends, rng)
    report = crosscheck(None, theirs, ends, **given, table=table)
    assert report.verdict == "differs, explained by: page table shifted: virtual page ids +1"
    selected = k.select_topk(logits, batch.table, k=7)
    report = crosscheck(None, np.asarray(k.candidate_logits(*given.values(), table)), ends, **given, table=table,
                        our_selection=selected, their_selection=selected)  # fmt: skip
    assert report.ok


def test_selections_as_sets_and_ties(inputs):
    ours, ends = score(inputs), ends_of(inputs)
    mine = k.select_topk(ours, inputs["table"], k=16)
    positions = np.array(mine.positions)
    shuffled = positions[:, ::-1]
    options = {**inputs, "our_selection": mine}
    report = crosscheck(ours, ours, ends, **options, their_selection=shuffled)
    assert report.ok
    assert report.selection["rows equal"] == len(ends)
    row = int(np.argmax(ends))
    other = positions.copy()
    outside = next(p for p in range(ends[row]) if p not in set(positions[row]))
    other[row, 0] = outside
    report = crosscheck(ours, ours, ends, **options, their_selection=other)
    assert not report.ok
    assert report.selection["rows unequal"] == 1
    assert "selections differ in 1 rows" in report.verdict
    tied = ours.copy()
    tied[row, [positions[row, 0], outside]] = tied[row, positions[row, 0]] * np.array([1, 1 + 1e-7], np.float32)
    report = crosscheck(tied, tied, ends, **options, their_selection=other)
    assert report.ok
    assert report.selection["rows that differ by ties within tolerance"] == 1


def test_the_report_prints_and_travels(inputs, tmp_path):
    theirs = score(inputs, **FAULTS["nibbles swapped"](inputs))
    theirs[0, 0] = np.nan
    report = crosscheck(None, theirs, ends_of(inputs), **inputs)
    console = Console(file=io.StringIO(), width=150)
    report.print(console)
    text = console.file.getvalue()
    assert "largest differences" in text
    assert "nibbles swapped" in text
    data = json.loads(report.to_json(allow_nan=False))
    assert data["verdict"] == report.verdict
    assert data["worst"][0]["row"] == report.worst[0]["row"]
    pytest.importorskip("matplotlib")
    report.plot(tmp_path / "error.png")
    assert (tmp_path / "error.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ours": np.zeros((2, 64), np.float32), "row_ends": [65, 1]}, "row_ends: row 0 sees 65 columns"),
        ({"ours": np.zeros((3, 64), np.float32)}, r"theirs: expected \[rows, columns\]"),
        ({}, "come together"),
        ({"ours": np.zeros((2, 64), np.float32), "weights": np.ones((2, 32))}, "queries, plane, table missing"),
        ({"ours": np.zeros((2, 64), np.float32), "tails": "none"}, "tails"),
        ({"ours": np.zeros((2, 64), np.float32), "our_selection": np.zeros((2, 4), int)}, "their_selection"),
    ],
    ids=str,
)
def test_bad_arguments(changes, message):
    arguments = {"ours": None, "theirs": np.zeros((2, 64), np.float32), "row_ends": [64, 1], **changes}
    with pytest.raises(ValueError, match=message):
        crosscheck(**arguments)


def test_rows_that_see_nothing():
    report = crosscheck(np.zeros((2, 64), np.float32), np.ones((2, 64), np.float32), [0, -5])
    assert report.ok
    assert "nothing was compared" in report.notes[0]
