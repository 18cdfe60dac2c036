"""Every kernel shape lowers for rocm and cuda on a host without a GPU. Interpret mode is too kind to show that."""

import dataclasses
import functools

import jax
import pytest

from k2i_jax.kernels._jax_private import lower_for, triton_calls
from k2i_jax.kernels.compile import arguments
from k2i_jax.kernels.config import Config, default_config

GPUS = {"rocm": "gfx950", "cuda": "NVIDIA H200"}


def kernel(platform, *, layout="page64", table="full", rows=1, heads=32, body=None, kind=None, config=None, **facts):
    """The Triton call of one score, lowered for ``platform``."""
    score, operands = arguments(layout, table, rows, heads, **facts)
    if body is not None:
        device = "gfx950" if body == "dot_scaled" else "cuda"
        sequences = operands[5].shape[0] // rows
        config = default_config(
            device,
            rows=sequences * rows,
            sequences=sequences,
            heads=heads,
            width=1024,
            layout=layout,
            max_query_len=rows,
        )
    call = functools.partial(score, config=config)
    found, *_ = triton_calls(lower_for(call, *operands, platform=platform, kind=kind or GPUS[platform]))
    return found


@pytest.mark.parametrize("platform", GPUS)
@pytest.mark.parametrize("body", ["dot_scaled", "decode"])
@pytest.mark.parametrize("layout", ["page64", "page8"])
@pytest.mark.parametrize("table", ["full", "candidates"])
@pytest.mark.parametrize("heads", [16, 32, 48, 64, 128])
def test_heads(platform, body, layout, table, heads):
    found = kernel(platform, layout=layout, table=table, heads=heads, body=body, sequences=3, pages=5)
    assert "tt.dot" in found["ir"]


@pytest.mark.parametrize("platform", GPUS)
@pytest.mark.parametrize("body", ["dot_scaled", "decode"])
@pytest.mark.parametrize("rows", [2, 3, 5, 6, 8])
def test_rows(platform, body, rows):
    assert kernel(platform, rows=rows, body=body, sequences=3, pages=13)["num_warps"] == 4


def test_the_device_chooses_the_body():
    assert "tt.dot_scaled" in kernel("rocm")["ir"]
    assert "tt.dot_scaled" not in kernel("rocm", kind="gfx942")["ir"]
    assert "tt.dot_scaled" not in kernel("cuda")["ir"]
    assert "tt.dot_scaled" not in kernel("rocm", kind="gfx942", body="dot_scaled")["ir"]  # decoded to bf16 instead


def test_a_configuration_is_checked_against_the_device():
    """Too large for gfx950's LDS, not for an H200's; where either may be meant, one suffices."""
    config = Config("decode", 64, 6, 4, 1, 1, 1)
    score, operands = arguments("page8", "full", 6, 128, sequences=3, pages=5)
    assert kernel("cuda", rows=6, heads=128, config=config)["num_warps"] == 4
    jax.eval_shape(functools.partial(score, config=config), *operands)
    with pytest.raises(ValueError, match=r"rows: .* bytes of LDS exceed gfx950's"):
        kernel("rocm", rows=6, heads=128, config=config)
    with pytest.raises(ValueError, match=r"^rows: expected 1 to 8"):
        jax.eval_shape(functools.partial(score, config=dataclasses.replace(config, rows=9)), *operands)


@pytest.mark.parametrize("platform", GPUS)
def test_offsets_into_the_pool_are_64_bit(platform):
    """Whatever its size: jax alone would take 32 signed bits up to 4 GiB."""
    lines = kernel(platform)["ir"].splitlines()
    assert any("extsi" in line and "i64" in line for line in lines)


@pytest.mark.parametrize("platform", GPUS)
@pytest.mark.parametrize(("rows", "groups"), [(1, 5), (6, 30 // 6 + 5)])
def test_the_grid_follows_from_shapes(platform, rows, groups):
    """Whatever query_start_loc holds: a program a group of rows, for as many groups as there can be."""
    found = kernel(platform, rows=rows, sequences=5)
    assert found["grid_x"] == groups
    assert found["grid_z"] == 1


@pytest.mark.parametrize("platform", GPUS)
def test_x64(platform):
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        assert kernel(platform, rows=2)["num_warps"] == 4
