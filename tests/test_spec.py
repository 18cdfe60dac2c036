"""K2iSpec: V4.1-Flash's schedule and reuse map as the model's description has them, overrides, and errors."""

import re

import numpy as np
import pytest

from k2i_jax import K2iSpec, rope_frequencies

FLASH = K2iSpec.v41_flash()


def test_the_schedule_of_v41_flash():
    found = [(x.layer, x.role, x.ratio, x.keys) for x in FLASH.schedule]
    assert found == [
        (2, "full", 2, 2),
        (8, "full", 2, 8),
        (14, "full", 2, 14),
        (20, "source", 1, 20),
        (24, "reindex", 1, 20),
        (28, "reindex", 1, 20),
        (32, "reindex", 1, 20),
        (36, "reindex", 1, 20),
    ]
    assert [x.layer for x in FLASH.schedule if x.owns_keys] == [2, 8, 14, 20]
    assert (FLASH.num_layers, FLASH.heads, FLASH.topk, FLASH.topk_blocks, FLASH.ratios) == (40, 32, 512, 2048, (1, 2))
    assert FLASH.index_layer(28).role == "reindex"


def test_the_other_layers_reuse_the_previous_index_layer():
    expected = [2] * 6 + [8] * 6 + [14] * 6 + [20] * 4 + [24] * 4 + [28] * 4 + [32] * 4 + [36] * 4
    assert dict(FLASH.reuse) == dict(zip(range(2, 40), expected, strict=True))
    assert 0 not in FLASH.reuse  # layers 0 and 1 have no compressed keys to choose from
    assert 1 not in FLASH.reuse


def test_candidates_bind_above_16384_positions():
    assert not FLASH.binds(16384)
    assert FLASH.binds(16384 + 64)
    assert K2iSpec.v41_flash(topk_blocks=4).binds(64)


def test_every_number_is_overridable():
    spec = K2iSpec.v41_flash(
        num_layers=12, full_layers=[[1, 4], (3, 1)], source_layer=3, reindex_layers=[5, 11], heads=64, topk=7,
        topk_blocks=3, norm_eps=1e-6, weight_scale=1.0, rope_dims=32, rope_theta=1e4, rope_factor=4.0,
        rope_beta_fast=16.0, rope_beta_slow=2.0, rope_original_length=4096, memory_budget=5000,
    )  # fmt: skip
    assert [(x.layer, x.keys, x.ratio) for x in spec.schedule] == [(1, 1, 4), (3, 3, 1), (5, 3, 1), (11, 3, 1)]
    wanted = rope_frequencies(theta=1e4, dims=32, factor=4, beta_fast=16, beta_slow=2, original_length=4096)
    assert np.array_equal(spec.frequencies, wanted)
    assert hash(spec) == hash(K2iSpec(**{name: getattr(spec, name) for name in spec.__dataclass_fields__}))
    assert (spec.rows_per_step(1000), spec.rows_per_step(50), spec.rows_per_step(0)) == (1, 5, 250)


def test_no_source():
    spec = K2iSpec(num_layers=3, full_layers=((0, 1), (2, 1)))
    assert [x.role for x in spec.schedule] == ["full", "full"]
    assert dict(spec.reuse) == {0: 0, 1: 0, 2: 2}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"heads": 40}, "heads: expected a multiple of 16 heads up to 128, got 40"),
        ({"heads": 144}, "heads: expected a multiple of 16 heads up to 128, got 144"),
        ({"topk": 0}, "topk: expected an integer of at least 1, got 0"),
        ({"topk_blocks": 2.5}, "topk_blocks: expected an integer of at least 1, got 2.5"),
        ({"memory_budget": True}, "memory_budget: expected an integer of at least 1, got True"),
        ({"num_layers": 20}, r"full_layers: expected ascending layers in 0..19, got [2, 8, 14, 20]"),
        ({"full_layers": ((8, 2), (2, 2), (20, 1))}, "full_layers: expected ascending layers in 0..39, got [8, 2, 20]"),
        ({"full_layers": ()}, "full_layers: expected at least one layer that owns keys, got none"),
        ({"full_layers": ((2, 3), (20, 1))}, "full_layers: layer 2 has ratio 3, expected one of [1, 2, 4]"),
        ({"source_layer": 21}, "source_layer: expected one of full_layers [2, 8, 14, 20], got 21"),
        ({"source_layer": None}, "reindex_layers: [24, 28, 32, 36] need a source_layer, got None"),
        ({"reindex_layers": (14, 24)}, "reindex_layers: expected layers after source_layer 20 that are not in"),
        ({"reindex_layers": (24, 24)}, "reindex_layers: expected ascending layers in 0..39, got [24, 24]"),
        ({"rope_dims": 130}, "rope_dims: expected 2..128, got 130"),
        ({"rope_dims": 63}, "rope: dims: expected an even number of at least 2, got 63"),
        ({"rope_theta": 1.0}, "rope: theta, factor"),
        ({"norm_eps": -1.0}, "norm_eps: expected a finite number of at least 0, got -1.0"),
        ({"weight_scale": float("nan")}, "weight_scale: expected None or a finite number, got nan"),
    ],
)
def test_errors(overrides, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        K2iSpec.v41_flash(**overrides)


def test_other_errors():
    with pytest.raises(TypeError, match=r"full_layers: expected pairs \(layer, ratio\), got \(2, 8\)"):
        K2iSpec.v41_flash(full_layers=(2, 8))
    with pytest.raises(ValueError, match=re.escape("expected one of the index layers [2, 8, 14, 20, 24, 28, 32, 36]")):
        FLASH.index_layer(3)
    with pytest.raises(TypeError, match="hedas"):
        K2iSpec.v41_flash(hedas=3)
