"""Code objects of the kernels, compiled by the triton wheel on this host. Nothing here runs on a GPU."""

import functools
import re

import pytest

triton = pytest.importorskip("triton", reason="needs the triton wheel (extra jax_triton)")

from k2i_jax.kernels.compile import KERNELS, compile_kernel  # noqa: E402

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::UserWarning")]
PINNED = pytest.mark.skipif(
    not triton.__version__.startswith("3.9."), reason=f"asserted on triton 3.9; here is {triton.__version__}"
)
BUDGET = {1: 140, 3: 300, 6: 570}  # instructions of a wave's 64-key step
compiled = functools.cache(compile_kernel)


@PINNED
@pytest.mark.parametrize(("layout", "table", "rows"), KERNELS)
def test_gfx950_steady_loop(layout, table, rows):
    found = compiled("gfx950", layout, table, rows)
    assert found.matrix == {"v_mfma_scale_f32_32x32x64_f8f6f4": 4 * rows}
    assert found.loads[16] == 4
    assert "lds" not in found.instructions
    assert "barrier" not in found.instructions
    assert found.instructions.get("scratch", 0) == 0
    assert found.spills == 0
    assert found.bytes_per_key == (72 if table == "candidates" else 68)
    assert found.total <= BUDGET[rows], found.instructions
    assert found.vgprs <= 256  # two waves a SIMD


@pytest.mark.parametrize("layout", ["page64", "page8"])
@pytest.mark.parametrize("target", ["gfx942", "sm_90"])
def test_other_targets(target, layout):
    for table in ("full", "candidates"):
        found = compiled(target, layout, table, 1)
        assert found.matrix
        assert found.spills == 0
        assert found.lds_bytes <= 64 * 1024


@PINNED
def test_sm_90_keeps_its_registers():
    """The register limit reaches the compiler, keys stay words, and no logit goes through shared memory."""
    found = compiled("sm_90", "page8", "full", 1)
    assert found.vgprs <= found.config.registers == 96  # five programs a multiprocessor
    assert list(found.matrix) == ["HGMMA.64x32x16.F32"]
    assert found.total <= 295, found.instructions
    assert found.asm.count("CCTL.E.PF2") == 2  # the row's end and first page id are asked for at once
    for table, rows in (("full", 1), ("full", 6), ("candidates", 1)):
        assert "barrier" not in compiled("sm_90", "page8", table, rows).instructions  # an exchange would take two


@pytest.mark.parametrize("table", ["full", "candidates"])
@pytest.mark.parametrize("layout", ["page64", "page8"])
def test_words_unpacked_together_lie_side_by_side_in_a_thread(layout, table):
    """The inline assembly takes words 2p and 2p + 1 at a time from what the compiler gives a thread."""
    ir = compiled("sm_90", layout, table, 1).ir
    layouts = dict(re.findall(r"^(#blocked\d*) = #ttg.blocked<(.*)>$", ir, re.MULTILINE))
    taken = re.findall(r"packed_element = 2 : i32.*? : tensor<\w+, (#\w+)> ->", ir)
    assert len(taken) >= 4  # low and high nibbles of queries and of keys
    for name in taken:
        each = [int(n) for n in re.search(r"sizePerThread = \[(.*?)\]", layouts[name])[1].split(", ")]
        order = [int(n) for n in re.search(r"order = \[(.*?)\]", layouts[name])[1].split(", ")]
        assert (each[-1], order[0]) == (4, len(each) - 1), layouts[name]


def test_unknown_target():
    with pytest.raises(ValueError, match="gfx9000"):
        compile_kernel("gfx9000", "page8", "full", 1)
