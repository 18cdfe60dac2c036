"""The capture plugin without SGLang: what it imports, when it stays idle, and what it says when something is wrong."""

import json
import subprocess
import sys
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace

import pytest

LOAD = """
import sys
from importlib.metadata import entry_points
[plugin] = [e for e in entry_points(group="sglang.srt.plugins") if e.name == "k2i_jax_capture"]
plugin.load()()
print([name for name in ("jax", "numpy", "torch", "k2i_jax", "k2i_jax_capture.hooks") if name in sys.modules])
"""


def fresh(code, **environment):
    import os

    env = {k: v for k, v in os.environ.items() if not k.startswith("K2I_JAX")} | environment
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)


def test_the_plugin_is_registered_and_idle_and_imports_nothing():
    run = fresh(LOAD)
    assert (run.stdout, run.returncode) == ("[]\n", 0), run.stderr


def test_the_whole_plugin_imports_no_jax():
    pytest.importorskip("torch")
    code = "import sys, k2i_jax_capture.hooks; print('jax' in sys.modules, 'k2i_jax' in sys.modules)"
    run = fresh(code)
    assert run.stdout == "False False\n", run.stderr


def fake_registry(monkeypatch):
    """An SGLang whose plugin package exists and nothing else."""
    registered = []
    registry = ModuleType("sglang.srt.plugins.hook_registry")
    registry.HookRegistry = SimpleNamespace(register=lambda *a: registered.append(a))
    registry.HookType = SimpleNamespace(AFTER="after", AROUND="around")
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        module = ModuleType(name)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    return registered


def test_a_missing_target_is_named_and_nothing_is_hooked(monkeypatch, tmp_path, capsys):
    pytest.importorskip("torch")
    import k2i_jax_capture.hooks as plugin

    registered = fake_registry(monkeypatch)
    monkeypatch.setattr(plugin, "HOOKS", {"layer": "json.dumps", "rowgroup": "json.renamed.function"})
    recorder = plugin.install(str(tmp_path))
    assert not registered
    [path] = tmp_path.glob("status-*.json")
    status = json.loads(path.read_text())
    assert status["state"].startswith("disarmed: json.renamed.function: not found: ")
    assert "not found" in status["state"]
    assert capsys.readouterr().err.count("\n") == 1
    (tmp_path / "arm").write_text("1")
    layer = SimpleNamespace(layer_id=20)
    assert not recorder.begin_layer(object(), layer, None, object())


class Batch(SimpleNamespace):
    pass


def fake_step(lengths=(200, 70), columns=4, page8=False):
    """A backend, a layer and a batch of decode requests, with random bytes in the pool."""
    torch = pytest.importorskip("torch")
    rows = len(lengths)
    core = SimpleNamespace(slots=torch.full((rows, 16), -1, dtype=torch.int32),
                           positions=torch.full((rows, 16), -1, dtype=torch.int32))  # fmt: skip
    core.sparse_page_indices = lambda ratio: core.slots
    core.sparse_raw_indices = lambda ratio: core.positions
    table = torch.arange(1, rows * columns + 1, dtype=torch.int32).reshape(rows, columns)
    metadata = SimpleNamespace(page_table=table)
    backend = SimpleNamespace(
        index_topk=16, candidate_masks=None, token_to_kv_pool=SimpleNamespace(low_ratio_index_k_page8=lambda i: page8),
        forward_metadata=SimpleNamespace(core_metadata=core, low_ratio_indexer_metadata=lambda ratio: metadata),
    )  # fmt: skip
    indexer = SimpleNamespace(is_candidate_source=False, uses_candidates=False)
    mode = SimpleNamespace(is_decode=lambda: True, is_target_verify=lambda: False, name="DECODE")
    batch = Batch(forward_mode=mode, seq_lens_cpu=torch.tensor(lengths), batch_size=rows)
    layer = SimpleNamespace(layer_id=8, compress_ratio=1, indexer=indexer)
    call = {
        "q_fp4": torch.randint(0, 256, (rows, 16, 64), dtype=torch.uint8).view(torch.int8),
        "q_scale": torch.full((rows, 1, 4, 16, 4), 127, dtype=torch.uint8), "weights": torch.ones(rows, 16).bfloat16(),
        "k_payload": torch.randint(0, 256, (rows * columns + 1, 1, 4, 64, 16), dtype=torch.uint8),
        "k_scale": torch.full((rows * columns + 1, 1, 4, 64), 127, dtype=torch.uint8),
        "block_tables": table, "query_start_loc": torch.arange(rows + 1, dtype=torch.int32),
        "row_ends": torch.tensor(lengths, dtype=torch.int32), "max_query_len": 1, "max_seq_len": columns * 64,
        "weight_scale": 1.0, "page8": page8, "pages_per_block": 8 if page8 else 1, "is_decode": True,
    }  # fmt: skip
    return backend, layer, batch, call


def record(recorder, backend, layer, batch, call, logits=None):
    """One layer through the hooks, as SGLang's own functions would run."""
    import torch

    from k2i_jax_capture.hooks import hooks

    hook = hooks(recorder)

    def body(*arguments):
        hook["inputs"]((call["q_fp4"], call["q_scale"], call["weights"]), layer, None, None, None)
        hook["rowgroup"](lambda **k: torch.zeros(2, 256) if logits is None else logits, **call)

    hook["layer"](body, backend, layer, None, None, None, torch.zeros(2), batch)


@pytest.fixture
def recorder(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    from k2i_jax_capture.recorder import Recorder

    return Recorder(str(tmp_path))


def state(recorder):
    recorder.write_status()
    [path] = recorder.folder.glob("status-*.json")
    return json.loads(path.read_text())["state"]


def bundles(recorder):
    if recorder.step is not None:
        recorder._close_step()
    recorder.writer.join()
    return sorted(path.name for path in recorder.folder.glob("step*"))


def test_nothing_is_recorded_until_armed_and_only_so_many_steps(recorder):
    backend, layer, batch, call = fake_step()
    record(recorder, backend, layer, batch, call)
    assert bundles(recorder) == []
    (recorder.folder / "arm").write_text("2")
    for _ in range(4):
        record(recorder, backend, layer, Batch(**vars(batch)), call)
    names = bundles(recorder)
    assert [name[:10] for name in names] == ["step000002", "step000003"]
    assert all(f"-tp0-pid{__import__('os').getpid()}." in name for name in names)
    assert state(recorder) == "waiting for the arm file"
    assert not list(recorder.folder.glob(".*"))  # no temporary file is left


def test_a_budget_for_some_requests_keeps_them_whole(recorder):
    from k2i_jax.interop import bundle

    backend, layer, batch, call = fake_step()
    (recorder.folder / "arm").touch()
    recorder.budget = 60_000
    record(recorder, backend, layer, batch, call)
    [name] = bundles(recorder)
    found = bundle.read(recorder.folder / name)
    assert found.facts["requests kept"] == [0]
    assert found.facts["requests"] == 2
    assert found.arrays["keys0.pages"].tolist() == [1, 2, 3, 4]
    assert found.arrays["layer8.call0.logits"].shape == (200,)


@pytest.mark.parametrize("budget", [1_000, 20_000])
def test_a_budget_too_small_is_one_line_and_no_bundle(recorder, budget):
    backend, layer, batch, call = fake_step(lengths=(200, 200))
    (recorder.folder / "arm").touch()
    recorder.budget = budget
    record(recorder, backend, layer, batch, call)
    assert bundles(recorder) == []
    assert "MiB is too small for any whole request" in state(recorder)
    assert "\n" not in state(recorder)


def test_a_step_that_outgrows_its_estimate_is_dropped_whole(recorder):
    backend, layer, batch, call = fake_step()
    (recorder.folder / "arm").touch()
    record(recorder, backend, layer, batch, call)
    recorder.step.budget = recorder.step.bytes + 10
    other = SimpleNamespace(**{**vars(layer), "layer_id": 14})  # nobody said that there is another layer
    record(recorder, backend, other, batch, call)
    assert bundles(recorder) == []
    assert "the step was dropped whole" in state(recorder)


def test_an_error_of_ours_disarms_and_reaches_nobody(recorder, monkeypatch):
    backend, layer, batch, call = fake_step()
    (recorder.folder / "arm").write_text("2")
    broken = {**call, "block_tables": None}
    record(recorder, backend, layer, batch, broken)
    assert "TypeError" in state(recorder)
    record(recorder, backend, layer, Batch(**vars(batch)), call)
    assert bundles(recorder) == []
    (recorder.folder / "arm").unlink()
    (recorder.folder / "arm").write_text("1")  # renewed
    record(recorder, backend, layer, Batch(**vars(batch)), call)
    assert len(bundles(recorder)) == 1


def test_an_error_of_sglangs_passes_and_drops_the_step(recorder):
    from k2i_jax_capture.hooks import hooks

    backend, layer, batch, _ = fake_step()
    (recorder.folder / "arm").touch()

    def body(*arguments):
        raise RuntimeError("theirs")

    import torch

    with pytest.raises(RuntimeError, match="theirs"):
        hooks(recorder)["layer"](body, backend, layer, None, None, None, torch.zeros(2), batch)
    assert bundles(recorder) == []
    assert "SGLang's own code raised" in recorder.notes[-1]


def test_a_graph_being_captured_passes_through(recorder, monkeypatch):
    backend, layer, batch, call = fake_step()
    (recorder.folder / "arm").touch()
    mode = ModuleType("capture_mode")
    mode.get_is_capture_mode = lambda: True
    monkeypatch.setitem(sys.modules, "sglang.srt.model_executor.runner_utils.capture_mode", mode)
    record(recorder, backend, layer, batch, call)
    assert bundles(recorder) == []
    assert recorder.error is None


def test_skips_are_recorded_as_such(recorder):
    from k2i_jax.interop import bundle
    from k2i_jax_capture.hooks import hooks

    backend, layer, batch, call = fake_step()
    (recorder.folder / "arm").touch()
    layer.indexer = SimpleNamespace(
        is_candidate_source=True, uses_candidates=False, candidate_topk_blocks=2048, candidate_block_size=8
    )
    hooks(recorder)["layer"](lambda *a: None, backend, layer, None, None, None, call["weights"], batch)
    record(recorder, backend, SimpleNamespace(**{**vars(layer), "layer_id": 20}), batch, call)
    [name] = bundles(recorder)
    found = bundle.read(recorder.folder / name)
    assert [layer["skips"] for layer in found.facts["layers"]] == [["identity below 16"], ["two-level off below 16384"]]


def test_entry_point_is_named_once():
    assert len([e for e in entry_points(group="sglang.srt.plugins") if e.name == "k2i_jax_capture"]) == 1


def model_of(*layers):
    return SimpleNamespace(model=SimpleNamespace(modules=lambda: [SimpleNamespace(), *layers]))


def test_the_last_layer_closes_the_step_and_a_source_counts_its_pages_once(recorder):
    backend, layer, batch, call = fake_step()
    layer.compressor = object()
    last = SimpleNamespace(**{**vars(layer), "layer_id": 24, "compressor": None})
    backend.model_runner = model_of(layer, last)
    (recorder.folder / "arm").touch()
    record(recorder, backend, layer, batch, call)
    assert recorder.step is not None
    record(recorder, backend, last, batch, call)
    assert recorder.step is None
    recorder.writer.join()
    assert len(list(recorder.folder.glob("step*.safetensors"))) == 1


def test_a_quiet_step_is_closed(recorder, monkeypatch):
    monkeypatch.setattr("k2i_jax_capture.recorder.IDLE_SECONDS", 0.0)
    backend, layer, batch, call = fake_step()
    (recorder.folder / "arm").touch()
    record(recorder, backend, layer, batch, call)
    recorder.close_if_idle()
    recorder.writer.join()
    assert len(list(recorder.folder.glob("step*.safetensors"))) == 1


def test_requests_that_fit_need_not_be_neighbours(recorder):
    from k2i_jax.interop import bundle

    backend, layer, batch, call = fake_step(lengths=(70, 6400, 64), columns=100)
    (recorder.folder / "arm").touch()
    recorder.budget = 100_000
    record(recorder, backend, layer, batch, call, call["weights"].new_zeros(3, 6400).float())
    [name] = bundles(recorder)
    found = bundle.read(recorder.folder / name)
    assert found.facts["requests kept"] == [0, 2]
    assert found.arrays["keys0.pages"].tolist() == [1, 2, 201]
    assert found.facts["layers"][0]["calls"][0]["rows"] == [0, 2]
