"""The capture plugin in SGLang's own HookRegistry, loaded by SGLang's own plugin loader, and its bundles replayed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from k2i_jax.interop import bundle, sglang_check
from k2i_jax.interop.replay import replay
from k2i_jax.interop.sglang_host import find_sglang

SCRIPT = Path(__file__).parent / "captured_steps.py"


def run(arguments, folder=None):
    env = {name: value for name, value in os.environ.items() if not name.startswith("K2I_JAX")}
    env |= {"JAX_PLATFORMS": "cpu"} | ({} if folder is None else {"K2I_JAX_CAPTURE": str(folder)})
    done = subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module", params=["before", "after"])
def folder(request, sglang, tmp_path_factory):
    """Bundles of a process that loads the plugin before (after) it imports the modules that are hooked."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "arm").write_text("9")
    modes = ["DECODE"] if request.param == "after" else ["DECODE", "VERIFY", "EXTEND"]
    assert f"steps run as recorded: {2 * len(modes)}" in run(["-W", "ignore", SCRIPT, request.param, *modes], folder)
    return folder


def test_hooks_are_applied_and_each_step_has_a_bundle(folder):
    [path] = folder.glob("status-*.json")
    status = json.loads(path.read_text())
    assert set(status["hooks"].values()) == {"applied"}
    assert len(status["hooks"]) == 6
    assert status["sglang"] == "0.5.23"
    assert sorted(status["bundles"]) == sorted(path.name for path in folder.glob("step*"))
    assert not status["notes"]


def test_bundles_replay_to_the_same_bits(folder):
    for path in sorted(folder.glob("step*")):
        found = bundle.read(path)
        assert found.facts["pid"] in {int(path.name.split("pid")[1].split(".")[0])}
        assert [layer["layer"] for layer in found.facts["layers"]] == [20, 24]
        assert len(found.facts["keys"]) == 1  # REINDEX reads the SOURCE's pages: they are there once
        assert "layer20.candidates0" in found.arrays
        page8 = found.facts["keys"][0]["page8"]
        assert page8 == found.facts["layers"][0]["page8"]
        findings = replay(found)
        assert all(finding.ok and finding.report.same_bits for finding in findings)
        assert any(call["candidates"] for call in found.facts["layers"][1]["calls"]) == page8
        assert all(finding.report.selection["rows unequal"] == 0 for finding in findings)


def test_a_fresh_process_without_sglang_gives_the_same_verdict(folder):
    path = sorted(folder.glob("step*"))[0]
    code = "import sys; sys.modules['sglang'] = None; from k2i_jax.cli import main; sys.exit(main(sys.argv[1:]))"
    out = run(["-c", code, "crosscheck", path])
    assert out.count("same bits") == 2


def test_altered_candidates_are_seen(folder):
    found = bundle.read(sorted(folder.glob("step*"))[0])
    ids = found.arrays["layer20.candidates0"].copy()
    ids[0, 0] = next(block for block in range(200) if block not in ids[0])
    changed = bundle.Bundle(found.path, found.facts, {**found.arrays, "layer20.candidates0": ids})
    assert any("candidate blocks of row" in line for finding in replay(changed) for line in finding.problems)


def test_without_the_variable_the_plugin_hooks_nothing(sglang):
    code = (
        "from k2i_jax.interop.sglang_host import import_sglang; import_sglang()\n"
        "from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "from sglang.srt.plugins.hook_registry import HookRegistry; print(dict(HookRegistry._hooks))"
    )
    assert run(["-W", "ignore", "-c", code]).strip().endswith("{}")


def test_a_renamed_target_is_named_and_nothing_is_hooked(sglang, monkeypatch, tmp_path, capsys):
    from sglang.srt.plugins.hook_registry import HookRegistry

    import k2i_jax_capture.hooks as plugin

    monkeypatch.setattr(plugin, "HOOKS", {**plugin.HOOKS, "blocks": plugin.HOOKS["blocks"] + "_renamed"})
    plugin.install(str(tmp_path))
    assert not HookRegistry._hooks
    [path] = tmp_path.glob("status-*.json")
    assert "select_candidate_blocks_hip_renamed: not found: AttributeError" in json.loads(path.read_text())["state"]
    assert capsys.readouterr().err.count("\n") == 1


def test_sglang_check_finds_everything(sglang, capsys):
    assert sglang_check.run()
    assert capsys.readouterr().out == "SGLang 0.5.23: all 26 names are there\n"


@pytest.mark.parametrize(
    ("file", "old", "new", "line"),
    [
        ("kernels/ops/attention/dsv4/candidate_blocks_hip.py", "def candidate_page8_table(", "def page8_table(",
         "candidate_blocks_hip has no candidate_page8_table"),
        ("kernels/ops/attention/dsv4/fp4_indexer_hip.py", "    row_ends: torch.Tensor,\n    max_query_len",
         "    ends: torch.Tensor,\n    max_query_len", "has no parameter row_ends"),
        ("srt/mem_cache/deepseek_v4_memory_pool.py", "def low_ratio_index_k_page8(", "def index_k_page8(",
         "DeepSeekV4TokenToKVPool has no low_ratio_index_k_page8"),
        ("srt/environ.py", "    SGLANG_HIP_DSV41_INDEX_K_PAGE8 =", "    SGLANG_INDEX_K_PAGE8 =",
         "SGLANG_HIP_DSV41_INDEX_K_PAGE8: is no environment variable"),
        ("kernels/ops/attention/dsv4/candidate_blocks_hip.py", "    compact_lens: torch.Tensor\n    # int32 [rows + 1]",
         "    lens: torch.Tensor\n    # int32 [rows + 1]", "has no field compact_lens"),
    ],
)  # fmt: skip
def test_sglang_check_names_what_moved(sglang, tmp_path, capsys, file, old, new, line):
    source = find_sglang()
    for folder in ("kernels", "srt/layers/attention", "srt/mem_cache", "srt/model_executor", "srt/plugins"):
        shutil.copytree(source / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("environ.py", "runtime_context.py"):
        shutil.copy(source / "srt" / name, tmp_path / "srt" / name)
    text = (tmp_path / file).read_text()
    assert old in text
    (tmp_path / file).write_text(text.replace(old, new))
    assert not sglang_check.run(str(tmp_path))
    out = capsys.readouterr().out
    assert line in out
    assert out.count("\n") == 2
