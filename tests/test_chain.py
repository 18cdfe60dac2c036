"""The write path against SGLang's own chain: every intermediate, eagerly and jitted; rotations; slots of keys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import GOLDEN, bits, packed_scales
from hypothesis import given
from hypothesis import strategies as st

import k2i_jax as k
from k2i_jax import chain, reference

with np.load(GOLDEN / "chain.npz") as arrays:
    CHAIN = dict(arrays)
EPS = float(CHAIN["eps"])
BOTH = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])


def same(ours, theirs):
    assert np.array_equal(bits(np.asarray(ours)), bits(theirs))


@BOTH
def test_golden_intermediates(wrap):
    """Norm, rotation and fake quantisation, bit for bit; under jit also where all stages make one computation."""

    def stages(x, weight, rotations):
        norm = chain.rms_norm(x, weight, EPS)
        rope = chain.rope_tail(norm, rotations)
        return norm, rope, k.fake_quant_fp4(rope)

    found = wrap(stages)(*(jnp.asarray(CHAIN[name]) for name in ("k_in", "norm_weight", "freqs")))
    for ours, name in zip(found, ("k_norm", "k_rope", "k_fake"), strict=True):
        same(ours, CHAIN[name])
    rope = wrap(chain.rope_tail)(jnp.asarray(CHAIN["q_in"]), jnp.asarray(CHAIN["freqs"])[:, None])
    same(rope, CHAIN["q_rope"])
    same(wrap(k.fake_quant_fp4)(rope), CHAIN["q_fake"])


@BOTH
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_golden_keys_and_queries(wrap, dtype):
    keys = wrap(lambda x, w, f: k.index_keys(x, w, f, eps=EPS))(
        jnp.asarray(CHAIN["k_in"], dtype), CHAIN["norm_weight"], CHAIN["freqs"]
    )
    same(keys.payload, CHAIN["k_bytes"])
    same(keys.scale, packed_scales(CHAIN["k_scale_i32"]))
    queries = wrap(k.index_queries)(jnp.asarray(CHAIN["q_in"], dtype), CHAIN["freqs"])
    same(queries.payload, CHAIN["q_bytes"])
    same(k.query_scale_to_aiter(queries.scale), CHAIN["q_scale"])


@pytest.mark.parametrize("layout", ["page64", "page8"])
def test_golden_keys_through_a_plane(layout):
    """Written in a shuffled order and read back: what SGLang's writer would have stored."""
    slots = np.random.default_rng(0).permutation(np.arange(64, 256))[:40]
    keys = k.index_keys(CHAIN["k_in"], CHAIN["norm_weight"], CHAIN["freqs"])  # eps is V4.1's by default
    read = k.read_keys(k.write_keys(k.IndexKPlane.zeros(4, layout), slots, keys), slots)
    same(read.payload, CHAIN["k_bytes"])
    same(read.scale, packed_scales(CHAIN["k_scale_i32"]))


@given(seed=st.integers(0, 99), rows=st.sampled_from([1, 6, 40]))
def test_jit_and_batch_change_no_bit(seed, rows):
    """Random values: alone or among others, eager or inside a larger jitted function, the same bytes."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((rows, 128)) * 2.0 ** rng.integers(-20, 20, (rows, 1)), jnp.bfloat16)
    weight = jnp.asarray(rng.standard_normal(128), jnp.bfloat16)
    positions = rng.integers(0, 1 << 20, rows).astype(np.int32)
    frequencies = k.rope_frequencies()

    def everything(x, positions):
        rotations = k.rope_rotations(positions, frequencies)
        queries = jnp.stack([x, -2 * x] * 8, axis=1)
        return k.index_keys(x, weight, rotations), k.index_queries(queries, rotations), k.head_weights(x)

    eager = everything(x, positions)
    for jitted in (jax.jit(everything)(x, positions), everything(jnp.tile(x, (3, 1)), np.tile(positions, 3))):
        for ours, theirs in zip(jax.tree.leaves(jitted), jax.tree.leaves(eager), strict=True):
            same(ours[:rows], np.asarray(theirs))


def test_rotations_of_the_golden_chain():
    """Its angles were rounded to float32 after a float64 product: half a unit in the last place of 5000 apart."""
    rotations = np.asarray(k.rope_rotations(CHAIN["positions"], k.rope_frequencies(original_length=0)))
    assert np.abs(rotations - CHAIN["freqs"]).max() < 5e-4
    exact = CHAIN["positions"][:, None] * k.rope_frequencies(original_length=0)  # int64 x f32: float64
    angles = exact.astype(np.float32).astype(np.float64)
    expected = np.stack([np.cos(angles), np.sin(angles)], axis=-1)
    assert np.abs(rotations - expected).max() < 1e-7


@BOTH
def test_rotations_far_out(wrap):
    """Float32 angles up to a million radians: the cosine of the rounded angle, to the last place or two."""
    positions = np.append(np.random.default_rng(0).integers(0, 1 << 20, 2000), [0, (1 << 20) - 1]).astype(np.int32)
    frequencies = k.rope_frequencies()
    angles = (positions.astype(np.float32)[:, None] * frequencies).astype(np.float64)
    expected = np.stack([np.cos(angles), np.sin(angles)], axis=-1)
    found = wrap(lambda p: k.rope_rotations(p, frequencies))(positions)
    assert np.abs(np.asarray(found) - expected).max() < 1.5e-7


def test_yarn_frequencies():
    plain, yarn = k.rope_frequencies(original_length=0), k.rope_frequencies()
    assert plain.dtype == yarn.dtype == np.float32
    assert np.allclose(plain, 160000.0 ** -(np.arange(32) / 32), rtol=1e-6, atol=0)
    assert np.array_equal(yarn[:16], plain[:16])  # 65536 / (32 * 2 pi) turns bound pair 15.5, 65536 / (2 pi) pair 24.7
    assert np.array_equal(yarn[25:], plain[25:] / np.float32(16))
    ramp = (np.arange(16, 25) - 15) / 10
    assert np.allclose(yarn[16:25], plain[16:25] * (1 - ramp * 15 / 16), rtol=1e-6, atol=0)


@pytest.mark.parametrize("original_length", [0, 65536, 4096])
def test_yarn_frequencies_have_torchs_bits(original_length):
    torch = pytest.importorskip("torch")
    ours = k.rope_frequencies(original_length=original_length)
    plain = 1.0 / (160000.0 ** (torch.arange(0, 64, 2, dtype=torch.float32) / 64))
    if original_length:
        low, high = {65536: (15, 25), 4096: (8, 18)}[original_length]
        smooth = 1 - ((torch.arange(32, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        plain = plain / 16.0 * (1 - smooth) + plain * smooth
    assert np.array_equal(ours, plain.numpy())


def test_norm_against_float64():
    rng = np.random.default_rng(1)
    x = np.asarray(jnp.asarray(rng.standard_normal((64, 128)) * 100, jnp.bfloat16), np.float64)
    weight = rng.standard_normal(128).astype(np.float32)
    expected = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-20) * weight
    found = np.asarray(chain.rms_norm(jnp.asarray(x, jnp.float32), weight, 1e-20))
    assert np.abs(found - expected).max() <= np.abs(expected).max() * 2.0**-8
    assert not np.asarray(chain.rms_norm(jnp.zeros((1, 128)), weight, 1e-20)).any()


def test_head_weights():
    """bf16(raw * f32(128^-0.5 * H^-0.5)), to nearest even; a given scale replaces the factor."""
    raw = np.asarray(jnp.asarray(np.random.default_rng(2).standard_normal((5, 32)), jnp.bfloat16))
    product = (raw.astype(np.float32) * np.float32((128 * 32) ** -0.5)).view(np.uint32)
    expected = (product + 0x7FFF + (product >> 16 & 1)) & 0xFFFF0000
    same(k.head_weights(raw), expected.astype(np.uint32).view(np.float32))
    same(k.head_weights(raw, scale=1.0), raw.astype(np.float32))


def test_key_slots_skip_incomplete_groups_and_padding():
    """Ratio 2: only odd positions complete a group; rows past the sequences and rows without a key of theirs skip."""
    pages = np.array([[3, 1], [2, 7]], np.int32)
    positions = np.array([130, 131, 132, 5, 6, 7, 9, 11], np.int32)
    ends = (positions + 1) // 2
    ends[6] = 0  # a padded row inside a sequence
    table = k.PageTable.from_arrays(pages, ends, [0, 3, 7])
    assert k.key_slots(table, positions, ratio=2).tolist() == [-1, 64 + 1, -1, 2 * 64 + 2, -1, 2 * 64 + 3, -1, -1]
    ends = positions + 1
    table = k.PageTable.from_arrays(pages, ends, [0, 3, 7])
    assert k.key_slots(table, positions).tolist() == [-1, -1, -1, 133, 134, 135, 137, -1]  # 130: past the table
    assert k.key_slots(table, np.full(8, -1)).tolist() == [-1] * 8


def test_ratio_2_keys_of_a_sequence():
    """Twelve tokens in two calls of 5 and 7: six keys, each at its group's first position, in order."""
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.standard_normal((12, 128)), jnp.bfloat16)
    weight, frequencies = jnp.ones(128, jnp.bfloat16), k.rope_frequencies()
    plane = k.IndexKPlane.zeros(2, "page64")
    for start, stop in ((0, 5), (5, 12)):
        positions = np.arange(start, stop)
        table = k.PageTable.from_verify([[1]], (positions + 1) // 2, stop - start)
        keys = k.index_keys(x[start:stop], weight, k.rope_rotations(positions // 2 * 2, frequencies))
        plane = k.write_keys(plane, k.key_slots(table, positions, ratio=2), keys)
    expected = k.index_keys(x[1::2], weight, k.rope_rotations(np.arange(0, 12, 2), frequencies))
    read = k.read_keys(plane, np.arange(64, 70))
    same(read.payload, np.asarray(expected.payload))
    same(read.scale, np.asarray(expected.scale))
    assert not np.asarray(k.read_keys(plane, np.arange(70, 128)).payload).any()
    values = reference.dequantize(np.asarray(read.payload), np.asarray(read.scale))
    assert np.array_equal(values.astype(np.float32), np.asarray(expected.dequantize()))


def test_static_errors():
    x, weight = jnp.zeros((3, 128)), jnp.zeros(128)
    rotations = jnp.zeros((3, 32, 2))
    for call, message in (
        (lambda: k.index_keys(x[:, :64], weight, rotations), r"x: expected shape \[keys, 128\], got \[3, 64\]"),
        (lambda: k.index_keys(x, weight[:5], rotations), r"norm_weight: expected shape \[128\], got \[5\]"),
        (
            lambda: k.index_keys(x, weight, rotations[:2]),
            r"rotations: expected shape \[3, pairs, 2\]",
        ),
        (lambda: k.index_queries(x, rotations), r"x: expected shape \[rows, heads, 128\], got \[3, 128\]"),
        (lambda: k.index_keys(x, weight, jnp.zeros((3, 65, 2))), "rotations: expected at most 64 pairs, got 65"),
        (lambda: k.rope_frequencies(dims=7), "dims: expected an even number of at least 2, got 7"),
        (lambda: k.rope_frequencies(factor=0.5), "theta, factor.*got 160000.0, 0.5"),
        (lambda: k.key_slots(k.PageTable.from_rows([[1]], [1]), [0], ratio=0), "ratio: expected .* got 0"),
        (lambda: k.key_slots(k.PageTable.from_rows([[1]], [1]), [0, 1]), r"positions: expected shape \[1\], got \[2\]"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    for call, message in (
        (lambda: k.index_keys(x.astype(jnp.float16), weight, rotations), "x: expected float32 or bfloat16"),
        (lambda: k.head_weights(np.zeros((2, 2))), "x: expected float32 or bfloat16"),
        (lambda: k.rope_rotations(np.zeros(2, np.float32), k.rope_frequencies()), "positions: expected an integer"),
    ):
        with pytest.raises(TypeError, match=message):
            call()
