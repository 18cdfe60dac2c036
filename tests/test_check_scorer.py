"""check_scorer: a right scorer passes, and each kind of wrong one fails in the line that is about it."""

import json

import numpy as np
import pytest

import k2i_jax as k
from k2i_jax.candidates import CandidateTable
from k2i_jax.interop import dlpack
from k2i_jax.interop.crosscheck import check_scorer

torch = pytest.importorskip("torch")

KEYWORDS = {
    "q_fp4", "q_scale", "k_payload", "k_scale", "weights", "weight_scale", "block_tables", "query_start_loc",
    "row_ends", "max_query_len", "max_seq_len", "page8", "pages_per_block", "is_decode",
}  # fmt: skip


def scorer(**given):
    """What somebody's kernel computes, by this package: FULL logits, or a virtual page a table entry."""
    assert set(given) == KEYWORDS
    heads = given["q_fp4"].shape[1]
    layout = k.PageLayout.PAGE8 if given["page8"] else k.PageLayout.PAGE64
    virtual = given["page8"] and given["pages_per_block"] == 1

    def score(q, q_scale, payload, scale, weights, pages, starts, ends):
        queries = k.FP4Array(q.view("uint8"), k.query_scale_from_aiter(q_scale, heads))
        plane = k.IndexKPlane(payload, scale, layout)
        if not virtual:
            table = k.PageTable.from_arrays(pages, ends, starts)
            return k.index_logits(queries, weights, plane, table, weight_scale=given["weight_scale"])
        ids = np.broadcast_to(np.arange(pages.shape[1], dtype=np.int32), pages.shape)
        table = CandidateTable(np.asarray(ids), pages, ends)
        return k.candidate_logits(queries, weights, plane, table, weight_scale=given["weight_scale"])

    planes = given["k_payload"].view(torch.uint8).view(-1, 4096), given["k_scale"].view(-1, 256)
    tables = given["block_tables"].contiguous(), given["query_start_loc"], given["row_ends"]
    logits = dlpack.call(score, given["q_fp4"], given["q_scale"], *planes, given["weights"], *tables)
    live = torch.arange(logits.shape[1]) < given["row_ends"][:, None]
    return torch.where(live, logits, float("nan"))  # as a kernel that leaves the tails alone


def failures(report):
    return {check.name for _, check in report.checks if not check.holds}


@pytest.fixture(scope="module")
def passed():
    return check_scorer(scorer)


def test_a_right_scorer_passes(passed):
    assert passed, str(passed)
    problems = {problem for problem, _ in passed.checks}
    assert problems == {"SGLang's verify case", "boundary lengths, 32 heads", "boundary lengths, 64 heads"}
    assert {check.layout for _, check in passed.checks} == {"page64", "page8", "both"}
    assert len(json.loads(passed.to_json())) == len(passed.checks)
    assert str(passed).startswith("ok   SGLang's verify case")


def test_unwritten_tails_fail_a_promise_of_exact_ones():
    report = check_scorer(scorer, heads=(), tails="exact")
    assert failures(report) == {"-inf past each row's end"}


def test_wrong_layout_of_page8():
    def wrong(**given):
        if given["page8"] and given["pages_per_block"] == 8:
            given.update(page8=False, pages_per_block=1)
        return scorer(**given)

    found = failures(check_scorer(wrong, heads=()))
    assert {"error against float64", "PAGE8 has the bits of PAGE64"} <= found


def test_another_order_of_sums_in_page8():
    def wrong(**given):
        logits = scorer(**given)
        return logits * (1 + 1e-7 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))) if given[
            "page8"] else logits  # fmt: skip

    found = failures(check_scorer(wrong, heads=()))
    assert "PAGE8 has the bits of PAGE64" in found
    assert "error against float64" not in found


def test_a_scorer_that_differs_from_call_to_call():
    generator = torch.Generator().manual_seed(0)

    def wrong(**given):
        logits = scorer(**given)
        return logits * (1 + 2e-7 * torch.randn(logits.shape, generator=generator))

    assert "3 calls give the same bits" in failures(check_scorer(wrong, heads=()))


@pytest.mark.parametrize("argument", ["block_tables", "row_ends", "k_payload", "weights"])
def test_a_scorer_that_remembers_an_argument(argument):
    remembered = {}

    def wrong(**given):
        tensor = given[argument]
        first, _ = remembered.setdefault(tensor.data_ptr(), (tensor.clone(), tensor))  # held: no address comes twice
        return scorer(**{**given, argument: first})

    assert "replay A, B, A follows its arguments" in failures(check_scorer(wrong, heads=(32,), repeats=1))


def test_candidates_read_as_whole_pages():
    def wrong(**given):
        if given["pages_per_block"] == 1 and given["page8"]:
            given["block_tables"] = given["block_tables"] // 8 * 8
        return scorer(**given)

    found = failures(check_scorer(wrong, heads=()))
    assert "candidate logits have the bits of the FULL ones" in found
    assert "error against float64" not in found


def test_an_exception_is_a_finding():
    def wrong(**given):
        raise RuntimeError("no such kernel")

    report = check_scorer(wrong, heads=())
    assert not report
    assert "RuntimeError: no such kernel" in str(report)


def test_logits_of_another_shape_are_a_finding():
    report = check_scorer(lambda **given: scorer(**given)[:, :10], heads=())
    assert "expected [" in str(report)


def test_unknown_tails():
    with pytest.raises(ValueError, match="tails"):
        check_scorer(scorer, tails="maybe")
