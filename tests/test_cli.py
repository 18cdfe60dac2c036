"""The commands, as a shell would run them: exit codes, one-line errors, files written."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import k2i_jax
from k2i_jax import cli

GOLDEN = Path(__file__).parent / "golden"
LONG_CASES = ["decode", "heads64", "two_level", "wide_scales"]
CASES = ["verify", *(pytest.param(case, marks=pytest.mark.long) for case in LONG_CASES)]


@pytest.mark.parametrize("case", CASES)
def test_demo_holds_on_every_golden_case(case, capsys):
    assert cli.main(["demo", "--case", str(GOLDEN / f"{case}.npz")]) == 0
    out = capsys.readouterr().out
    assert "all checks hold" in out
    assert "✗" not in out


def altered(tmp_path, **changes):
    arrays = dict(np.load(GOLDEN / "verify.npz")) | changes
    path = tmp_path / "altered.npz"
    np.savez(path, **{name: value for name, value in arrays.items() if value is not None})
    return str(path)


def test_demo_fails_where_the_layouts_hold_other_keys(tmp_path, capsys):
    with np.load(GOLDEN / "verify.npz") as arrays:
        scale = arrays["page8_scale"].copy()
    scale[scale > 0] += 1
    assert cli.main(["demo", "--case", altered(tmp_path, page8_scale=scale)]) == 1
    assert "some checks do not hold" in capsys.readouterr().out


def test_demo_fails_where_sglang_chose_otherwise(tmp_path):
    with np.load(GOLDEN / "verify.npz") as arrays:
        slots = arrays["topk_slots"].copy()
    slots[0, 0] += 1
    assert cli.main(["demo", "--case", altered(tmp_path, topk_slots=slots)]) == 1


def one_error_line(capsys) -> str:
    err = capsys.readouterr().err
    assert err.startswith("k2i-jax: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(None, "no such file"), (b"", "not a readable .npz"), (b"not a zip", "not a readable .npz")],
)
def test_demo_names_an_unreadable_file(tmp_path, capsys, content, complaint):
    path = tmp_path / "case.npz"
    if content is not None:
        path.write_bytes(content)
    assert cli.main(["demo", "--case", str(path)]) == 2
    assert complaint in one_error_line(capsys)


@pytest.mark.parametrize("part", [0.02, 0.5, 0.99])
def test_demo_names_a_truncated_file(tmp_path, capsys, part):
    whole = (GOLDEN / "verify.npz").read_bytes()
    path = tmp_path / "torn.npz"
    path.write_bytes(whole[: int(len(whole) * part)])
    assert cli.main(["demo", "--case", str(path)]) == 2
    assert "torn.npz: not a readable .npz" in one_error_line(capsys)


def test_demo_names_damaged_bytes(tmp_path, capsys):
    whole = bytearray((GOLDEN / "verify.npz").read_bytes())
    whole[2000:2400] = bytes(400)
    path = tmp_path / "damaged.npz"
    path.write_bytes(whole)
    assert cli.main(["demo", "--case", str(path)]) == 2
    assert "damaged.npz: " in one_error_line(capsys)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"weights": None}, "lacks weights"),
        ({"weights": np.zeros((12, 16), np.float32)}, "weights: expected shape [12, 32], got [12, 16]"),
        ({"lengths": np.zeros(12, np.float32)}, "lengths: expected int32"),
        ({"lengths": np.full(12, 999, np.int32)}, "row_ends: row 0 ends at 999"),
        ({"row_to_seq": np.arange(12)[::-1] % 2}, "row_to_seq: expected ascending sequences in 0..1"),
        ({"row_to_seq": np.repeat([1, 2], 6)}, "row_to_seq: expected ascending sequences in 0..1"),
        ({"page_table": np.full((2, 7), 99, np.int32)}, "pages: row 0 sees page 99"),
        ({"topk_blocks": np.array([2, 3])}, "topk_blocks"),
    ],
)
def test_demo_names_a_wrong_array(tmp_path, capsys, changes, complaint):
    assert cli.main(["demo", "--case", altered(tmp_path, **changes)]) == 2
    assert complaint in one_error_line(capsys)


def test_show_config_reports_versions_devices_and_implementations(capsys):
    assert cli.main(["show-config", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["packages"]["k2i_jax"] == k2i_jax.__version__
    assert facts["devices"]
    assert facts["implementations"]["xla"] == "runs here"
    assert cli.main(["show-config"]) == 0
    assert "k2i_jax[rocm7]" in capsys.readouterr().out


def without_backend(platform, *arguments):
    environment = {**os.environ, "JAX_PLATFORMS": platform}
    command = [sys.executable, "-m", "k2i_jax", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("platform", ["rocm", "cuda"])
def test_a_backend_that_does_not_start_is_a_line(platform):
    """On a machine without that plugin: show-config reports it, the others name it and stop."""
    shown = without_backend(platform, "show-config", "--json")
    if not json.loads(shown.stdout)["no_backend"]:
        pytest.skip(f"{platform} is here")
    facts = json.loads(shown.stdout)
    assert facts["devices"] == []
    assert f"JAX_PLATFORMS='{platform}'" in facts["implementations"]["xla"]
    for command in (["demo"], ["selftest"]):
        run = without_backend(platform, *command)
        assert run.returncode == 2
        assert run.stderr.splitlines()[-1].startswith(f"k2i-jax: JAX has no backend (JAX_PLATFORMS='{platform}'): ")
        assert "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["selftest", "--report", "{0}/none/report.json"], "expected a file name in a folder that is there"),
        (["selftest", "--report", "{0}"], "expected a file name in a folder that is there"),
        (["crosscheck", "none", "--json", "{0}/none/report.json"], "expected a file name in a folder that is there"),
        (["watch", "{0}/none"], "none: no such folder"),
        (["compile", "--target", "sm_90", "--heads", "0"], "heads: expected a multiple of 16 heads up to 128, got 0"),
        (["compile", "--target", "sm_90", "--heads", "17"], "heads: expected a multiple of 16 heads up to 128, got 17"),
        (["compile", "--target", "sm_90", "--heads", "256"], "heads: expected a multiple of 16 heads up to 128"),
    ],
)
def test_bad_arguments_are_a_line_before_any_work(tmp_path, capsys, arguments, complaint):
    assert cli.main([argument.format(tmp_path) for argument in arguments]) == 2
    assert complaint in one_error_line(capsys)
    assert list(tmp_path.iterdir()) == []


def test_selftest_writes_what_was_measured(tmp_path, capsys):
    path = tmp_path / "report.json"
    assert cli.main(["selftest", "--implementation", "xla", "--report", str(path)]) == 0
    report = json.loads(path.read_text())
    result = report["results"]["xla"]
    assert result["status"] == "measured"
    assert all(check["holds"] for check in result["checks"])
    assert {check["layout"] for check in result["checks"]} == {"page64", "page8", "both"}
    assert len(result["milliseconds"]) == 2
    assert list(tmp_path.iterdir()) == [path]  # no half-written file is left


def test_selftest_fails_where_a_check_raises(monkeypatch, tmp_path):
    def broken(*args, **kwargs):
        raise RuntimeError("no kernel image for this device")

    monkeypatch.setattr("k2i_jax.selftest.index_logits", broken)
    path = tmp_path / "report.json"
    assert cli.main(["selftest", "--implementation", "xla", "--report", str(path)]) == 1
    last = json.loads(path.read_text())["results"]["xla"]["checks"][-1]
    assert "no kernel image" in last["value"]


def test_module_and_missing_rich(tmp_path):
    """``python -m k2i_jax`` works, and without rich the error names the extra."""
    code = "import sys; sys.modules['rich'] = None; sys.modules['rich.console'] = None\n"
    code += "from k2i_jax.cli import main; main(['demo'])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 1
    assert "pip install 'k2i_jax[cli]'" in run.stderr
    run = subprocess.run([sys.executable, "-m", "k2i_jax", "--version"], capture_output=True, text=True)
    assert run.stdout == f"k2i_jax {k2i_jax.__version__}\n"


def tag_file(tmp_path, capsys, name, *arguments):
    assert cli.main(["tag", *arguments]) == 0
    path = tmp_path / name
    path.write_text(capsys.readouterr().out)
    return str(path)


def test_tags_are_written_and_compared(tmp_path, capsys):
    page8 = tag_file(tmp_path, capsys, "a.json", "--layout", "page8", "--recipe", "sglang", "--ratio", "1")
    page64 = tag_file(tmp_path, capsys, "b.json", "--layout", "page64", "--recipe", "sglang_v4_c4")
    assert cli.main(["tag", "--compare", page8, page8]) == 0
    assert "equal" in capsys.readouterr().out
    assert cli.main(["tag", "--compare", page8, page64]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["layout", "scale_order", "recipe", "ratio"]
    assert "page8 here, page64 there" in lines[0]
    assert "k2i_jax.repack" in lines[0]
    assert "not compared" in lines[3]


def test_an_unknown_fact_alone_is_no_mismatch(tmp_path, capsys):
    known = tag_file(tmp_path, capsys, "a.json", "--layout", "page8", "--ratio", "1")
    unknown = tag_file(tmp_path, capsys, "b.json", "--layout", "page8")
    assert cli.main(["tag", "--compare", known, unknown]) == 0
    assert "ratio: not compared, 1 here, unknown there" in capsys.readouterr().out


def test_bad_tags_are_one_line(tmp_path, capsys):
    path = tmp_path / "c.json"
    path.write_text("[1]")
    assert cli.main(["tag", "--compare", str(path), str(path)]) == 2
    assert f"{path}: text: expected a JSON object" in capsys.readouterr().err
    path.write_text('{"layout":')
    assert cli.main(["tag", "--compare", str(path), str(path)]) == 2
    assert f"{path}: text: not JSON" in capsys.readouterr().err
    assert cli.main(["tag"]) == 2
