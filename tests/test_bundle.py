"""Bundles of the capture plugin: written here by its recorder, read, replayed, and refused where they are not whole."""

import json

import numpy as np
import pytest
from cases import LAYOUTS, random_batch
from test_capture import bundles, fake_step, record, recorder  # noqa: F401

import k2i_jax as k
from k2i_jax import cli
from k2i_jax.interop import bundle
from k2i_jax.interop.replay import replay
from k2i_jax.layout import query_scale_to_aiter

LENGTHS = (200, 70, 1, 640)


def torch_of(x):
    import torch

    return torch.tensor(np.ascontiguousarray(x))


def recorded(recorder, layout, *, change=None, selection=None):  # noqa: F811
    """A bundle of one FULL layer, whose logits and selection are our own, changed by ``change(logits)``."""
    import torch

    batch = random_batch(3, LENGTHS, layout=layout)
    logits = np.array(k.index_logits(*batch.args))
    chosen = k.select_topk(logits, batch.table, k=16)
    if change:
        logits = change(logits, batch)
    backend, layer, step, call = fake_step(LENGTHS, page8=layout == "page8")
    shape = (batch.plane.num_pages, 1, 4, 64)
    metadata = backend.forward_metadata.low_ratio_indexer_metadata(1)
    metadata.page_table = torch_of(batch.table.pages)
    call |= {
        "q_fp4": torch_of(batch.queries.payload).view(torch.int8),
        "q_scale": torch_of(query_scale_to_aiter(np.asarray(batch.queries.scale))),
        "weights": torch_of(batch.weights), "k_payload": torch_of(batch.plane.payload).view(*shape, 16),
        "k_scale": torch_of(batch.plane.scale).view(shape), "block_tables": metadata.page_table,
    }  # fmt: skip
    core = backend.forward_metadata.core_metadata
    core.slots[:], core.positions[:] = torch_of(chosen.slots), torch_of(chosen.positions)
    if selection:
        selection(core)
    (recorder.folder / "arm").touch()
    record(recorder, backend, layer, step, call, torch_of(logits))
    assert recorder.error is None
    [name] = bundles(recorder)
    return recorder.folder / name


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_bundle_replays_to_the_same_bits(recorder, layout, capsys):  # noqa: F811
    path = recorded(recorder, layout)
    found = bundle.read(path)
    live = sum(-(-n // 64) for n in LENGTHS)
    assert len(found.arrays["keys0.pages"]) == live  # live pages alone, each once
    assert len(found.arrays["layer8.call0.logits"]) == sum(LENGTHS)  # up to their ends
    [finding] = replay(found)
    assert finding.ok
    assert finding.report.same_bits
    assert finding.report.selection["rows equal"] == len(LENGTHS)
    out = path.with_name("report.json")
    assert cli.main(["crosscheck", str(path), "--json", str(out)]) == 0
    assert "layer 8 FULL" in capsys.readouterr().out
    assert json.loads(out.read_text())[0]["ok"]


def swapped(logits, batch):
    """What a reader that takes PAGE8 bytes for PAGE64 would score."""
    other = k.IndexKPlane(batch.plane.payload, batch.plane.scale, k.PageLayout.PAGE64)
    return np.array(k.index_logits(batch.queries, batch.weights, other, batch.table))


def shifted(logits, batch):
    return np.array(k.index_logits(batch.queries, batch.weights * 1.01, batch.plane, batch.table))


def test_a_seeded_fault_is_named(recorder, capsys):  # noqa: F811
    path = recorded(recorder, k.PageLayout.PAGE8, change=swapped)
    assert cli.main(["crosscheck", str(path)]) == 1
    out = capsys.readouterr().out
    assert "explained by: layouts swapped: key pages read as page64" in out


def test_a_small_difference_is_seen(recorder):  # noqa: F811
    [finding] = replay(bundle.read(recorded(recorder, k.PageLayout.PAGE64, change=shifted)))
    assert not finding.ok
    assert finding.report.error["largest row error"] > 1e-3


def test_a_wrong_selection_and_wrong_slots_are_seen(recorder):  # noqa: F811
    def selection(core):
        core.slots[0, 0] += 1
        core.positions[3, 2] = 0 if int(core.positions[3, 0]) else 639

    [finding] = replay(bundle.read(recorded(recorder, k.PageLayout.PAGE64, selection=selection)))
    assert not finding.ok
    assert "selections differ in 1 rows" in finding.report.verdict
    assert any("slots of row 0" in problem for problem in finding.problems)


def test_without_recorded_positions_the_slots_are_compared(recorder):  # noqa: F811
    path = recorded(recorder, k.PageLayout.PAGE8)
    found = bundle.read(path)
    arrays = {name: x for name, x in found.arrays.items() if name != "layer8.positions"}
    [finding] = replay(bundle.Bundle(path, found.facts, arrays))
    assert finding.ok
    assert finding.report.selection["rows equal"] == len(LENGTHS)
    slots = arrays["layer8.slots"].copy()
    slots[0, 0] = slots[3, 0]  # another request's
    [finding] = replay(bundle.Bundle(path, found.facts, {**arrays, "layer8.slots": slots}))
    assert any("lie in none of the pages" in problem for problem in finding.problems)


def one_line(capsys) -> str:
    err = capsys.readouterr().err
    assert err.startswith("k2i-jax: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.999])
def test_a_torn_bundle_is_one_line(recorder, capsys, part):  # noqa: F811
    path = recorded(recorder, k.PageLayout.PAGE64)
    torn = path.with_name("torn.safetensors")
    torn.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    assert cli.main(["crosscheck", str(torn)]) == 2
    assert "torn.safetensors: torn, or no safetensors file" in one_line(capsys)


def test_foreign_and_missing_files_are_one_line(tmp_path, capsys):
    pytest.importorskip("safetensors")
    from safetensors.numpy import save_file

    foreign = tmp_path / "model.safetensors"
    save_file({"weight": np.zeros(3, np.float32)}, foreign)
    assert cli.main(["crosscheck", str(foreign)]) == 2
    assert "no bundle of k2i_jax's capture plugin" in one_line(capsys)
    newer = tmp_path / "newer.safetensors"
    save_file({"x": np.zeros(3, np.float32)}, newer, {"format": "k2i_jax capture 9"})
    assert cli.main(["crosscheck", str(newer)]) == 2
    assert "this version reads 'k2i_jax capture 1'" in one_line(capsys)
    assert cli.main(["crosscheck", str(tmp_path / "none")]) == 2
    assert "no such file" in one_line(capsys)


def test_a_bundle_that_lacks_an_array_is_one_line(recorder, capsys):  # noqa: F811
    from safetensors import safe_open
    from safetensors.numpy import save_file

    path = recorded(recorder, k.PageLayout.PAGE64)
    with safe_open(path, framework="numpy") as file:
        arrays, metadata = {n: file.get_tensor(n) for n in file.keys()}, file.metadata()  # noqa: SIM118
    del arrays["keys0.scale"]
    save_file(arrays, path, metadata)
    assert cli.main(["crosscheck", str(path)]) == 2
    assert "incomplete, it lacks keys0.scale" in one_line(capsys)


@pytest.mark.parametrize(
    ("facts", "complaint"),
    [
        (None, "its facts are not those of k2i_jax's capture plugin: ''"),
        ("{}", "its facts are not those of k2i_jax's capture plugin: '{}'"),
        ('{"layers": [', "its facts are not those of k2i_jax's capture plugin"),
        ('{"layers": [{"calls": [{}], "layer": 8}], "keys": [], "step": 3}', "its facts lack ranks, sglang, mode"),
        ('{"layers": [{"calls": [3]}]}', "its facts are not those of k2i_jax's capture plugin"),
    ],
)
def test_foreign_facts_are_one_line(tmp_path, capsys, facts, complaint):
    save_file = pytest.importorskip("safetensors.numpy").save_file
    path = tmp_path / "step1.safetensors"
    metadata = {"format": bundle.FORMAT} | ({} if facts is None else {"facts": facts})
    save_file({"x": np.zeros(3, np.float32)}, path, metadata)
    assert cli.main(["crosscheck", str(path)]) == 2
    assert f"step1.safetensors: {complaint}" in one_line(capsys)


def test_watch_survives_foreign_status_files(tmp_path, capsys):
    for number, text in enumerate(("{}", '{"sta', "[1]", '{"state": "armed"}')):
        (tmp_path / f"status-pid{number}.json").write_text(text)
    assert cli.main(["watch", str(tmp_path), "--timeout", "0"]) == 0
    out = capsys.readouterr().out
    assert out.count("no status of the capture plugin") == 3
    assert "status-pid3.json: armed" in out


def test_watch_replays_what_arrives(recorder, capsys):  # noqa: F811
    path = recorded(recorder, k.PageLayout.PAGE64)
    assert cli.main(["watch", str(recorder.folder), "--count", "1"]) == 0
    out = capsys.readouterr().out
    assert path.name in out
    assert "waiting for the arm file" in out
    path.with_name("step9-torn.safetensors").write_bytes(b"torn")
    assert cli.main(["watch", str(recorder.folder), "--timeout", "0"]) == 1
    assert "torn, or no safetensors file" in capsys.readouterr().out


def test_the_recorders_format_is_the_readers():
    from k2i_jax_capture import targets

    assert targets.FORMAT == bundle.FORMAT
