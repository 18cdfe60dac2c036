"""build_k2i: golden cases and the chain end to end, the step against NumPy, both layouts, verify and prefill rows."""

import dataclasses

import jax
import numpy as np
import pytest
from cases import CASES, GOLDEN, golden, packed_plane, packed_scales, random_batch, random_fp4, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import FEW, TWO_LEVELS, built, check_against_numpy, random_problem, same

import k2i_jax as k
from k2i_jax import FP4Array, K2iSpec, LayerInputs, PageTable, reference
from k2i_jax.kernels._jax_private import lower_for

MIXED = {1: "page8", 2: "page64", 4: "page64"}


# --- golden data ------------------------------------------------------------------------------------------------------

LONG = pytest.mark.long
GOLDEN_RUNS = [
    *(pytest.param(name, "page8", "xla", marks=() if name != "wide_scales" else LONG) for name in CASES),
    *(pytest.param(name, "page64", "xla", marks=() if name == "two_level" else LONG) for name in CASES),
    *(pytest.param(name, "page8", "pallas", marks=LONG) for name in CASES),
    *(pytest.param(name, "page64", "pallas", marks=LONG) for name in CASES),
]


@pytest.mark.parametrize(("name", "layout", "implementation"), GOLDEN_RUNS)
def test_golden_cases(name, layout, implementation):
    """Finished keys, queries and weights of SGLang's own code through one step: its candidates and its selection."""
    case, heads = golden(name), golden(name)["q_fp4"].shape[1]
    spec = dataclasses.replace(TWO_LEVELS, heads=heads, topk=int(case["topk"]), topk_blocks=int(case["topk_blocks"]))
    interpret = implementation == "pallas" and jax.default_backend() == "cpu"
    k2i = built(spec, layout == "page8", implementation=implementation, interpret=interpret)
    inputs = LayerInputs(case.queries, case["weights"])
    positions = case["lengths"] - 1
    result = k2i.step({3: case.plane(layout)}, {3: inputs, 4: inputs}, positions, {1: case.table})
    assert np.array_equal(result.selections[4].positions, case["topk_positions"])
    assert np.array_equal(result.selections[4].slots, case["topk_slots"])
    own = reference.select_topk(case["logits_fp64"], case["lengths"], spec.topk)
    assert [rows_of(row) for row in result.selections[3].positions] == own
    if isinstance(result.candidates, k.CandidateTable):
        for ours, theirs in zip(result.candidates.ids, case["candidate_ids"], strict=True):
            assert set(rows_of(ours)) == set(theirs[theirs >= 0].tolist())
        assert np.array_equal(result.candidates.row_ends, case["page8_lens"])
    else:
        assert case.table.width <= 8 * spec.topk_blocks
    assert same(result.selection(5), result.selections[4])


@pytest.mark.parametrize("layout", [pytest.param("page64", marks=LONG), "page8"])
def test_golden_chain(layout):
    """chain.npz from projections to slots: its keys in the plane byte for byte, the selection of its own codes."""
    with np.load(GOLDEN / "chain.npz") as arrays:
        chain = dict(arrays)
    spec = dataclasses.replace(TWO_LEVELS, heads=32, topk=8, topk_blocks=3)
    keys = k.index_keys(chain["k_in"], chain["norm_weight"], chain["freqs"])
    queries = k.index_queries(chain["q_in"], chain["freqs"])
    weights = np.random.default_rng(0).integers(-3, 4, (40, 32)).astype(np.float32)
    table = PageTable.from_verify([[2]], np.arange(1, 41), 40)
    layers = {3: LayerInputs(queries, weights, keys), 4: LayerInputs(queries, -weights)}
    result = built(spec).step({3: k.IndexKPlane.zeros(3, layout)}, layers, np.arange(40), {1: table})
    expected = packed_plane(
        layout, 3, np.arange(128, 168), chain["k_bytes"], packed_scales(chain["k_scale_i32"]), fill=0
    )
    assert same(result.planes[3], expected)
    scales = np.asarray(k.query_scale_from_aiter(chain["q_scale"], 32))
    golden_queries = FP4Array(chain["q_bytes"], scales)
    for layer, sign, allowed in ((3, 1, None), (4, -1, "candidates")):
        logits, _ = reference.index_logits(golden_queries, sign * weights, expected, table)
        if allowed is not None:
            first, _ = reference.index_logits(golden_queries, weights, expected, table)
            allowed = [set(x) for x in reference.select_candidate_blocks(first, np.arange(1, 41), 3)]
        wanted = reference.select_topk(logits, np.arange(1, 41), 8, allowed)
        assert [rows_of(row) for row in result.selections[layer].positions] == wanted
        assert [rows_of(row) for row in result.selections[layer].slots] == [[128 + p for p in row] for row in wanted]


def test_golden_chain_from_floats():
    """chain.npz's raw projections at its own positions: its angles were rounded elsewhere, so few bytes may differ."""
    with np.load(GOLDEN / "chain.npz") as arrays:
        chain = dict(arrays)
    spec = dataclasses.replace(TWO_LEVELS, heads=32, rope_original_length=0, topk_blocks=2048)
    positions = chain["positions"].astype(np.int32)
    pages = np.full((40, positions.max() // 64 + 1), -1, np.int32)
    pages[np.arange(40), positions // 64] = np.arange(1, 41)  # the page of the row's own key; earlier ones are gone
    inputs = LayerInputs(chain["q_in"], np.ones((40, 32), np.float32))
    layers = {3: dataclasses.replace(inputs, keys=chain["k_in"], norm_weight=chain["norm_weight"]), 4: inputs}
    table = PageTable.from_rows(pages, positions + 1)
    result = built(spec).step({3: k.IndexKPlane.zeros(41, "page8")}, layers, positions, {1: table})
    read = k.read_keys(result.planes[3], np.arange(1, 41) * 64 + positions % 64)
    assert (np.asarray(read.payload) == chain["k_bytes"]).mean() > 0.995
    assert (np.asarray(read.scale) == packed_scales(chain["k_scale_i32"])).mean() > 0.99


# --- against NumPy ----------------------------------------------------------------------------------------------------

SPECS = [  # (spec, projections as floats, layouts besides PAGE64)
    (FEW, True, {1: "page8", 2: "page64"}),
    (K2iSpec(6, ((0, 1), (3, 4)), 0, (2,), heads=16, topk=3, topk_blocks=1, weight_scale=0.5), False, None),
    (K2iSpec(2, ((1, 2),), heads=32, topk=33, weight_scale=-1.0), True, None),
]


@given(
    case=st.sampled_from(SPECS),
    tokens=st.lists(st.sampled_from([0, 1, 2, 63, 64, 65, 127, 128, 129, 130, 200, 255, 301]), min_size=3, max_size=3),
    rows=st.lists(st.sampled_from([0, 1, 1, 2, 6, 7]), min_size=3, max_size=3),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=12)
def test_step_is_its_composition_in_numpy(case, tokens, rows, seed):
    """Random specs, lengths, paddings: planes, candidates, selections as NumPy has them, and alike in all layouts."""
    spec, raw, layouts = case
    rows = np.minimum(rows, tokens)
    problem = random_problem(seed, spec, tokens, rows, total_rows=21, raw=raw)
    page64 = built(spec).step(*problem.args)
    check_against_numpy(spec, problem, page64)
    if layouts is None:
        return
    planes = {layer: k.repack(x, layouts[spec.index_layer(layer).ratio]) for layer, x in problem.planes.items()}
    other = built(spec).step(planes, *problem.args[1:])
    assert same((page64.selections, page64.candidates), (other.selections, other.candidates))
    assert same(page64.planes, {layer: k.repack(plane, "page64") for layer, plane in other.planes.items()})


def test_v41_flash():
    """The preset, all eight index layers, mixed planes, a verify step; and the selections that other layers reuse."""
    spec = K2iSpec.v41_flash(topk=40, topk_blocks=9, weight_scale=1.0)
    problem = random_problem(1, spec, [310, 66], [6, 6], layouts=MIXED)
    k2i = built(spec, True)
    result = k2i.step(*problem.args)
    check_against_numpy(spec, problem, result)
    for layer, index_layer in {3: 2, 13: 8, 14: 14, 19: 14, 23: 20, 24: 24, 39: 36}.items():
        assert result.selection(layer) is result.selections[index_layer]
    for layer in (1, 40):
        with pytest.raises(ValueError, match=rf"layer: expected 2\.\.39, the layers with a selection, got {layer}"):
            result.selection(layer)
    assert len({id(result.selections[x.layer]) for x in spec.schedule}) == 8
    four = [np.asarray(result.selections[x].positions) for x in (24, 28, 32, 36)]
    assert all(not np.array_equal(four[0], x) for x in four[1:])  # own queries, so own selections
    blocks = [set(rows_of(row)) for row in result.candidates.ids]
    for positions in four:
        assert all({p // 8 for p in rows_of(row)} <= ids for row, ids in zip(positions, blocks, strict=True))


@pytest.mark.parametrize("positions", [16384, 16385, pytest.param(20000, marks=LONG)])
def test_2048_blocks(positions):
    check_2048_blocks(positions, implementation="xla")


@pytest.mark.long
@pytest.mark.parametrize("positions", [16384, 16385, 20000])
def test_2048_blocks_pallas(positions):
    check_2048_blocks(positions, implementation="pallas", interpret=jax.default_backend() == "cpu")


def check_2048_blocks(positions, **implementation):
    """The preset's own numbers: at 16385 positions one block of 2049 is out, at 16384 none: no blocks are chosen."""
    spec = dataclasses.replace(TWO_LEVELS, topk=512, topk_blocks=2048)
    rng, columns = np.random.default_rng(positions), -(-positions // 64)
    pages = rng.permutation(np.arange(1, columns + 1))[None].astype(np.int32)
    keys = random_fp4(rng, positions, scales=(125, 126))
    at = np.arange(positions)
    plane = packed_plane("page8", columns + 1, pages[0][at // 64].astype(np.int64) * 64 + at % 64, *_pair(keys))
    queries = random_fp4(rng, 2, 2, 16, scales=(125, 126))
    weights = rng.integers(-3, 4, (2, 2, 16)).astype(np.float32)
    first, second = (FP4Array(queries.payload[i], queries.scale[i]) for i in range(2))
    ends = np.array([positions, positions - 9], np.int32)
    table = PageTable.from_verify(pages, ends, 2)
    k2i = built(spec, True, **implementation)
    selection, candidates = k2i.source(first, weights[0], plane, table)
    again = k2i.reindex(second, weights[1], plane, candidates)
    assert isinstance(candidates, PageTable if positions == 16384 else k.CandidateTable)

    values = reference.dequantize(*_pair(keys))  # every sum is exact in float32: see steps.py
    logits = []
    for codes, weight in ((first, weights[0]), (second, weights[1])):
        dots = np.maximum(reference.dequantize(*_pair(codes)) @ values.T, 0)
        logits.append(np.einsum("rhn,rh->rn", dots, weight))
    allowed = [set(x) for x in reference.select_candidate_blocks(logits[0], ends)]
    assert [len(x) for x in allowed] == [min(2048, -(-end // 8)) for end in ends.tolist()]
    for found, scores, among in ((selection, logits[0], None), (again, logits[1], allowed)):
        wanted = reference.select_topk(scores, ends, 512, among)
        assert [rows_of(row) for row in found.positions] == wanted
        slots = [[int(pages[0][p // 64]) * 64 + p % 64 for p in row] for row in wanted]
        assert [rows_of(row) for row in found.slots] == slots
    if positions == 20000:  # the level does something
        assert reference.select_topk(logits[1], ends, 512) != [rows_of(row) for row in again.positions]


def _pair(x):
    return np.asarray(x.payload), np.asarray(x.scale)


def test_skipping_the_candidate_level_changes_nothing():
    """Where no block can be left out, scoring the candidate table selects what scoring the pages does."""
    spec = dataclasses.replace(TWO_LEVELS, topk_blocks=40)
    batch = random_batch(3, [300, 0, 65, 320, -4, 999], heads=16, columns=5).in_layout("page8")
    selection, candidates = built(spec).source(*batch.args)
    assert candidates.pages.shape == (6, 5)
    other, blocks = k.source(*batch.args, k=20, topk_blocks=40)
    assert same(selection, other)
    other_queries = random_batch(4, [1] * 6, heads=16).queries
    found = built(spec).reindex(other_queries, batch.weights, batch.plane, candidates)
    assert same(found, k.reindex(other_queries, batch.weights, batch.plane, batch.table, blocks, k=20))


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_the_step_lowers_for_gpus(platform):
    """On a host without one: the Pallas kernels of both kinds, for whole contexts and for candidates."""
    problem = random_problem(0, FEW, [9, 7], [1, 1], columns=1, layouts=MIXED)
    k2i = built(FEW, True, implementation="pallas")
    kind = {"cuda": "NVIDIA H200", "rocm": "gfx950"}[platform]
    text = lower_for(k2i.step, *problem.args, platform=platform, kind=kind).as_text()
    assert "_index_kernel" in text
    assert "_candidate_kernel" in text
