"""The NNX modules: a stack of index layers is the step of its projections; weights by the checkpoint's names."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from steps import FEW, built, check_against_numpy, random_problem, same

import k2i_jax as k

nnx = pytest.importorskip("flax.nnx")
nn = pytest.importorskip("k2i_jax.nn")

SIZES = {"hidden": 48, "q_rank": 40, "latent": 24}
TOKENS, ROWS = [130, 66], [6, 6]


def bf16_matmul(x, weight):
    """In float64 from bfloat16 values, rounded once: float32 sums may differ in the last place before the rounding."""
    return np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T


def hidden_states(rng, rows=12):
    draw = lambda width: jnp.asarray(rng.standard_normal((rows, width)), jnp.bfloat16)
    layers = [entry.layer for entry in FEW.schedule]
    q_low, hidden = ({n: draw(SIZES[name]) for n in layers} for name in ("q_rank", "hidden"))
    return q_low, hidden, {entry.layer: draw(SIZES["latent"]) for entry in FEW.schedule if entry.owns_keys}


def test_a_stack_is_the_step_of_its_projections():
    stack = nn.IndexStack(FEW, **SIZES, rngs=nnx.Rngs(0))
    states = hidden_states(np.random.default_rng(0))
    k2i = built(FEW)
    problem = random_problem(1, FEW, TOKENS, ROWS, layouts={1: "page8", 2: "page64"}, columns=3)
    inputs = stack.inputs(*states)
    for indexer in stack.indexers:
        n, found = indexer.entry.layer, inputs[indexer.entry.layer]
        for ours, states_of, weight in (
            (found.queries.reshape(12, -1), states[0], indexer.wq_b),
            (found.weights, states[1], indexer.weights_proj),
        ):
            assert ours.dtype == jnp.bfloat16
            exact = bf16_matmul(states_of[n], weight[...])
            assert np.abs(np.asarray(ours, np.float64) - exact).max() <= 2.0**-8 * np.abs(exact).max()
        assert (found.keys is not None) == indexer.entry.owns_keys
    result = nnx.jit(lambda stack, *args: stack(k2i, *args))(
        stack, problem.planes, *states, problem.positions, problem.tables
    )
    expected = k2i.step(problem.planes, inputs, problem.positions, problem.tables)
    assert same((result.planes, result.selections), (expected.planes, expected.selections))
    # Whole numbers for weights make the sums exact: then NumPy must agree to the last position.
    rounded = {n: dataclasses.replace(x, weights=jnp.round(3 * x.weights)) for n, x in inputs.items()}
    problem = problem._replace(layers=rounded)
    check_against_numpy(FEW, problem, k2i.step(*problem.args))


def test_layers_in_turn_are_the_step():
    """What a model does that computes each layer's inputs from the layers before: FULL, SOURCE, then REINDEX."""
    stack = nn.IndexStack(FEW, **SIZES, rngs=nnx.Rngs(1))
    problem = random_problem(2, FEW, TOKENS, ROWS, layouts={1: "page8", 2: "page64"}, columns=3)
    inputs, k2i = stack.inputs(*hidden_states(np.random.default_rng(2))), built(FEW)
    expected = k2i.step(problem.planes, inputs, problem.positions, problem.tables)
    planes, candidates = dict(problem.planes), None
    for indexer in stack.indexers:
        entry = indexer.entry
        planes[entry.keys], selection, candidates = indexer(
            k2i, inputs[entry.layer], problem.positions, planes[entry.keys], problem.tables[entry.ratio], candidates
        )
        assert same(selection, expected.selections[entry.layer])
    assert same((planes, candidates), (expected.planes, expected.candidates))
    with pytest.raises(ValueError, match="candidates: layer 4 reindexes; expected what layer 3 returned, got None"):
        stack.indexers[-1](k2i, inputs[4], problem.positions, planes[3], problem.tables[1])
    with pytest.raises(ValueError, match="k2i: built from another spec than this layer"):
        stack.indexers[0](k.build_k2i(dataclasses.replace(FEW, topk=9)), *[None] * 4)


def test_gradients_reach_weights_proj():
    """d(sum of logits) / d(weights_proj) is what the logits' own gradient says: linear in the head weights."""
    indexer = nn.Indexer(FEW, 3, **SIZES, rngs=nnx.Rngs(3))
    rng = np.random.default_rng(3)
    q_low, hidden = (jnp.asarray(rng.standard_normal((4, SIZES[n])), jnp.bfloat16) for n in ("q_rank", "hidden"))
    keys = k.quantize_fp4(jnp.asarray(rng.standard_normal((64, 128)), jnp.float32))
    plane = k.write_keys(k.IndexKPlane.zeros(2, "page8"), np.arange(64, 128), keys)
    table = k.PageTable.from_verify([[1]], [64] * 4, 4)
    queries = k.quantize_fp4(indexer.inputs(q_low, hidden).queries)

    def loss(indexer):
        weights = indexer.inputs(q_low, hidden).weights.astype(jnp.float32)
        return k.index_logits(queries, weights, plane, table).sum()

    gradient = nnx.grad(loss)(indexer)["weights_proj"][...]
    dots = np.maximum(np.asarray(queries.dequantize(), np.float64) @ np.asarray(keys.dequantize(), np.float64).T, 0)
    expected = dots.sum(axis=2).T @ np.asarray(hidden, np.float64)
    assert np.abs(np.asarray(gradient, np.float64) - expected).max() <= 0.02 * np.abs(expected).max()  # bf16 on the way


# --- checkpoints ------------------------------------------------------------------------------------------------------


def tensors_of(rng, prefix="layers.3.attn.indexer."):
    draw = lambda *shape: rng.standard_normal(shape).astype(ml_dtypes.bfloat16)
    return {
        f"{prefix}wq_b.weight": draw(16 * 128, 40),
        f"{prefix}weights_proj.weight": draw(16, 48),
        f"{prefix}wk.weight": draw(128, 24),
        f"{prefix}k_norm.weight": draw(128).astype(np.float32),
    }


def write_safetensors(path, tensors):
    """The format, written by hand: it holds float8 too."""
    names = {"float32": "F32", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0"}
    header, blob = {"__metadata__": {"format": "pt"}}, b""
    for name, value in tensors.items():
        offsets = [len(blob), len(blob) + value.nbytes]
        header[name] = {"dtype": names[str(value.dtype)], "shape": list(value.shape), "data_offsets": offsets}
        blob += value.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + blob)


def check_loaded(indexer, tensors, prefix="layers.3.attn.indexer."):
    for name in ("wq_b", "weights_proj", "wk"):
        value = getattr(indexer, name)[...]
        assert value.dtype == jnp.bfloat16
        assert same(value, tensors[f"{prefix}{name}.weight"])
    assert same(indexer.k_norm[...], tensors[f"{prefix}k_norm.weight"])


@pytest.mark.parametrize("prefix", ["layers.3.attn.indexer.", "model.layers.3.self_attn.indexer."])
def test_load_from_a_file_a_folder_and_an_index(tmp_path, prefix):
    tensors = tensors_of(np.random.default_rng(4), prefix)
    write_safetensors(tmp_path / "a.safetensors", dict(list(tensors.items())[:2]))
    write_safetensors(tmp_path / "b.safetensors", dict(list(tensors.items())[2:]))
    write_safetensors(tmp_path / "all.safetensors", tensors)
    check_loaded(nn.load_indexer(FEW, 3, tmp_path / "all.safetensors"), tensors, prefix)
    (tmp_path / "all.safetensors").unlink()
    check_loaded(nn.load_indexer(FEW, 3, tmp_path), tensors, prefix)
    index = {name: ("a" if i < 2 else "b") + ".safetensors" for i, name in enumerate(tensors)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    check_loaded(nn.load_indexer(FEW, 3, str(tmp_path)), tensors, prefix)
    check_loaded(nn.load_indexer(FEW, 3, tensors), tensors, prefix)


def test_load_what_the_safetensors_package_wrote(tmp_path):
    flax_io = pytest.importorskip("safetensors.flax")
    tensors = tensors_of(np.random.default_rng(5))
    flax_io.save_file({name: jnp.asarray(x) for name, x in tensors.items()}, tmp_path / "x.safetensors")
    check_loaded(nn.load_indexer(FEW, 3, tmp_path / "x.safetensors"), tensors)


def test_load_float8_blocks(tmp_path):
    """128 x 128 blocks, the last column of blocks narrower, scales as e8m0: 2^(byte - 127)."""
    rng, prefix = np.random.default_rng(6), "layers.4.attn.indexer."
    codes = rng.standard_normal((2048, 200)).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.integers(118, 130, (16, 2)).astype(np.uint8)
    tensors = {
        f"{prefix}wq_b.weight": codes,
        f"{prefix}wq_b.scale": scale.view(ml_dtypes.float8_e8m0fnu),
        f"{prefix}weights_proj.weight": rng.standard_normal((16, 48)).astype(ml_dtypes.bfloat16),
    }
    write_safetensors(tmp_path / "x.safetensors", tensors)
    indexer = nn.load_indexer(FEW, 4, tmp_path / "x.safetensors")
    factors = 2.0 ** (scale.astype(np.float64) - 127)
    expected = codes.astype(np.float64) * factors[np.arange(2048)[:, None] // 128, np.arange(200) // 128]
    assert np.array_equal(np.asarray(indexer.wq_b[...], np.float64), expected)
    assert not hasattr(indexer, "wk")  # it scores layer 3's keys


def test_float8_blocks_that_fit_no_power_of_two_are_refused():
    prefix = "layers.4.attn.indexer."
    tensors = {
        f"{prefix}wq_b.weight": np.ones((2048, 160), ml_dtypes.float8_e4m3fn),
        f"{prefix}weights_proj.weight": np.ones((16, 48), ml_dtypes.bfloat16),
    }
    load = lambda blocks: nn.load_indexer(FEW, 4, {**tensors, f"{prefix}wq_b.scale": np.ones(blocks, np.float32)})
    assert load((16, 2)).wq_b[...].shape == (2048, 160)  # 128 and 32 columns
    for blocks in ((16, 4), (3, 2), (16, 0)):
        with pytest.raises(ValueError, match=rf"wq_b.scale has \[{blocks[0]}, {blocks[1]}\] scales for \[2048, 160\]"):
            load(blocks)


def test_damaged_checkpoints(tmp_path):
    """A partial download, a broken index, a cut file, a foreign header: one ValueError that names the file."""
    tensors, file, index = (
        tensors_of(np.random.default_rng(8)),
        tmp_path / "x.safetensors",
        tmp_path / "model.safetensors.index.json",
    )
    write_safetensors(file, tensors)
    for text in ('{"weight', "{}", "[]", '{"weight_map": 3}'):
        index.write_text(text)
        with pytest.raises(ValueError, match=r"index\.json is no index: expected JSON with a weight_map"):
            nn.load_indexer(FEW, 3, tmp_path)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "y.safetensors")}))
    with pytest.raises(ValueError, match=r"names files that are not there: .*y\.safetensors"):
        nn.load_indexer(FEW, 3, tmp_path)
    index.unlink()
    whole = file.read_bytes()
    file.write_bytes(whole[:-7])
    with pytest.raises(ValueError, match=r"x\.safetensors is cut off before the end of .*k_norm\.weight"):
        nn.load_indexer(FEW, 3, tmp_path)
    file.write_bytes((2).to_bytes(8, "little") + b"[]")
    with pytest.raises(ValueError, match=r"x\.safetensors is no safetensors file"):
        nn.load_indexer(FEW, 3, tmp_path)


def test_loading_errors(tmp_path):
    tensors = tensors_of(np.random.default_rng(7))
    prefix = "layers.3.attn.indexer."
    with pytest.raises(ValueError, match=r"checkpoint: has none of \['layers\.1\.attn\.indexer\.wq_b\.weight', 'model"):
        nn.load_indexer(FEW, 1, tensors)
    with pytest.raises(ValueError, match=r"checkpoint: has no layers\.3\.attn\.indexer\.wk\.weight"):
        nn.load_indexer(FEW, 3, {n: x for n, x in tensors.items() if ".wk." not in n})
    with pytest.raises(ValueError, match=r"wk\.weight: expected shape \[128, latent\], got \[24, 128\]"):
        nn.load_indexer(FEW, 3, {**tensors, f"{prefix}wk.weight": tensors[f"{prefix}wk.weight"].T})
    with pytest.raises(ValueError, match="expected one of the index layers"):
        nn.load_indexer(FEW, 2, tensors)
    with pytest.raises(ValueError, match=r"is neither a \.safetensors file nor a folder that holds one"):
        nn.load_indexer(FEW, 3, tmp_path)
    (tmp_path / "x.safetensors").write_bytes(b"no tensors at all")
    with pytest.raises(ValueError, match="is no safetensors file"):
        nn.load_indexer(FEW, 3, tmp_path)


def test_a_loaded_layer_runs():
    """Loaded weights, jitted as a pytree: the layer's lookup from hidden states to slots."""
    spec = dataclasses.replace(FEW, full_layers=((3, 1),))
    indexer = nn.load_indexer(spec, 3, tensors_of(np.random.default_rng(8)))
    rng, k2i = np.random.default_rng(9), k.build_k2i(spec)
    states = [jnp.asarray(rng.standard_normal((6, n)), jnp.bfloat16) for n in (40, 48, 24)]
    table = k.PageTable.from_verify([[1]], np.arange(1, 7), 6)

    @nnx.jit
    def run(indexer, plane, *states):
        return indexer(k2i, indexer.inputs(*states), jnp.arange(6), plane, table)

    plane, selection, candidates = run(indexer, k.IndexKPlane.zeros(2, "page8"), *states)
    assert selection.count.tolist() == [1, 2, 3, 4, 5, 6]
    assert np.asarray(k.read_keys(plane, np.arange(64, 70)).payload).any(axis=1).all()
    assert isinstance(candidates, k.CandidateTable)
    leaves = jax.tree.leaves(nnx.state(indexer))
    assert sum(x.size for x in leaves) == 16 * 128 * 40 + 16 * 48 + 128 * 24 + 128
