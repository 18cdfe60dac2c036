"""Prefill to decode: SGLang writes in one process, raw page bytes move to other page ids in another, equal bits."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cases import LAYOUTS, bits, golden

import k2i_jax as k
from k2i_jax import cli

WRITER = """
import sys
import numpy as np
from k2i_jax.interop.sglang_host import import_sglang
sglang = import_sglang()
import torch
import k2i_jax as k
layout, source, out = sys.argv[1:]
case = np.load(source)
pages = len(case["page8_scale"])
payload = torch.zeros(pages, 1, 4, 64, 16, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
scale = torch.zeros(pages, 1, 4, 64, dtype=torch.uint8)
keys = torch.tensor(case["k_input"]).bfloat16()
sglang.writer.store_fp4_index_k_cache_split(
    keys, payload, scale, torch.tensor(case["slots"]), page_size=64, rne=True, page8=layout == "page8")
open(out + ".payload", "wb").write(payload.view(torch.uint8).numpy().tobytes())
open(out + ".scale", "wb").write(scale.numpy().tobytes())
plane = k.IndexKPlane.from_arrays(payload.view(torch.uint8).numpy(), scale.numpy(), layout)
open(out + ".json", "w").write(plane.tag(k.FP4Recipe.SGLANG, ratio=1).to_json())
"""


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def sent(request, sglang, tmp_path_factory):
    """What the prefill peer sends: a page's bytes of both planes, and its tag."""
    out = tmp_path_factory.mktemp("peer") / "pages"
    source = Path(__file__).parent.parent / "golden" / "verify.npz"
    environment = os.environ | {"TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", WRITER, request.param, str(source), str(out)], check=True,
                   env=environment)  # fmt: skip
    return request.param, out


def received(out, case, layout):
    """The decode peer's plane, larger, with each page under another id; and the page table that says so."""
    pages = len(case["page8_scale"])
    planes = [np.frombuffer(Path(f"{out}.{part}").read_bytes(), np.uint8).reshape(pages, -1)
              for part in ("payload", "scale")]  # fmt: skip
    moved = np.random.default_rng(0).permutation(np.arange(1, 3 * pages))[:pages]
    mine = [np.full((3 * pages, plane.shape[1]), 0xFF, np.uint8) for plane in planes]
    for plane, new in zip(planes, mine, strict=True):
        new[moved] = plane
    table = k.PageTable.from_arrays(moved[case["page_table"]], case["lengths"], case.table.query_start_loc)
    return k.IndexKPlane.from_arrays(*mine, layout), table


def test_moved_pages_score_with_the_senders_bits(sent):
    layout, out = sent
    case = golden("verify")
    plane, table = received(out, case, layout)
    tag = k.LayoutTag.from_json(Path(f"{out}.json").read_text())
    assert plane.tag(k.FP4Recipe.SGLANG, ratio=1).check(tag) == ()
    args = case.queries, case["weights"]
    before = k.index_logits(*args, case.plane(layout), case.table)  # the golden bytes, under the sender's ids
    np.testing.assert_array_equal(bits(k.index_logits(*args, plane, table)), bits(before))
    _, blocks = k.source(*args, plane, table, k=64, topk_blocks=int(case["topk_blocks"]))
    chosen = k.reindex(*args, plane, table, blocks, k=64)
    np.testing.assert_array_equal(chosen.positions, case["topk_positions"])


def test_another_layout_scrambles_without_a_fault_and_the_tag_stops_it(sent, tmp_path, capsys):
    layout, out = sent
    case = golden("verify")
    other = next(x for x in LAYOUTS if x != layout)
    plane, table = received(out, case, other)  # this peer was started with the other page-8 switch
    logits = np.asarray(k.index_logits(case.queries, case["weights"], plane, table))
    right = np.asarray(k.index_logits(case.queries, case["weights"], case.plane(layout), case.table))
    live = np.arange(logits.shape[1]) < case["lengths"][:, None]
    assert np.isfinite(logits[live]).any()
    assert not np.array_equal(logits, right)
    tag = k.LayoutTag.from_json(Path(f"{out}.json").read_text())
    with pytest.raises(ValueError, match=f"layout: {other} here, {layout} there"):
        plane.tag(k.FP4Recipe.SGLANG, ratio=1).check(tag)
    mine = tmp_path / "mine.json"
    mine.write_text(plane.tag(k.FP4Recipe.SGLANG, ratio=1).to_json())
    assert cli.main(["tag", "--compare", str(mine), f"{out}.json"]) == 1
    assert "repack" in capsys.readouterr().out
    mended = k.repack(received(out, case, layout)[0], other)
    np.testing.assert_array_equal(bits(k.index_logits(case.queries, case["weights"], mended, table)), bits(right))
