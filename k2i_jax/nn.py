"""Flax NNX modules of the index lookup, for research code and tests: an index layer, and a stack of them.

Needs flax (``pip install 'k2i_jax[flax]'``).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from k2i_jax._check import check_array
from k2i_jax.checkpoint import Checkpoint
from k2i_jax.layout import HEAD_DIM
from k2i_jax.lookup import Candidates
from k2i_jax.page_table import PageTable
from k2i_jax.plane import IndexKPlane
from k2i_jax.select import Selection
from k2i_jax.spec import K2iSpec
from k2i_jax.step import K2i, LayerInputs, StepResult

try:
    from flax import nnx
except ImportError as error:
    raise ImportError(f"k2i_jax.nn needs flax: pip install 'k2i_jax[flax]' ({error})") from error


def _project(x, weight):
    """``x @ weight.T`` of bfloat16 values, added in float32, as bfloat16: a projection without bias."""
    x, weight = x.astype(jnp.bfloat16), weight.astype(jnp.bfloat16)
    return lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32).astype(
        jnp.bfloat16
    )


class Indexer(nnx.Module):
    """One index layer of a spec: FULL, SOURCE or REINDEX, as the schedule says of its number.

    Weights have the checkpoint's names and shapes: ``wq_b`` bf16[H * 128, q_rank], ``weights_proj`` bf16[H, hidden],
    and where the layer owns keys ``wk`` bf16[128, latent] and ``k_norm`` f32[128]. Gradients reach ``weights_proj``
    alone (through ``k2i_jax.index_logits``): codes and selections have none.
    """

    def __init__(self, spec: K2iSpec, layer: int, *, hidden: int, q_rank: int, latent: int, rngs: nnx.Rngs):
        """Random weights of the right shapes.

        Args:
          spec: the model's numbers.
          layer: an index layer of it.
          hidden: width of the hidden states that ``weights_proj`` reads.
          q_rank: width of the low-rank query that ``wq_b`` reads (the model's ``q_lora_rank``).
          latent: width of the compressed key-value latent that ``wk`` reads (512 in V4.1).
          rngs: where the random numbers come from.

        Raises:
          ValueError: ``layer`` is no index layer.
        """
        self.entry, self.spec = spec.index_layer(layer), spec

        def random(rows, columns):
            return nnx.Param(jax.random.normal(rngs.params(), (rows, columns), jnp.bfloat16) * columns**-0.5)

        self.wq_b = random(spec.heads * HEAD_DIM, q_rank)
        self.weights_proj = random(spec.heads, hidden)
        if self.entry.owns_keys:
            self.wk = random(HEAD_DIM, latent)
            self.k_norm = nnx.Param(jnp.ones(HEAD_DIM, jnp.float32))

    def inputs(
        self,
        q_low: Float[Array, "rows q_rank"],
        hidden: Float[Array, "rows hidden"],
        latent: Float[Array, "tokens latent"] | None = None,
    ) -> LayerInputs:
        """The projections, as a step takes them.

        Args:
          q_low: the normalised low-rank queries that the attention's own ``wq_b`` reads too.
          hidden: hidden states.
          latent: the compressor's normalised latent before RoPE, a row a token (at ratio 2 that of the group in the
            row of its last token); None, and for REINDEX layers always: no keys are written.
        """
        queries = _project(q_low, self.wq_b[...]).reshape(-1, self.spec.heads, HEAD_DIM)
        weights = _project(hidden, self.weights_proj[...])
        if latent is None or not self.entry.owns_keys:
            return LayerInputs(queries, weights)
        return LayerInputs(queries, weights, _project(latent, self.wk[...]), self.k_norm[...])

    def __call__(
        self,
        k2i: K2i,
        inputs: LayerInputs,
        positions: Int[Array, "rows"],
        plane: IndexKPlane,
        table: PageTable,
        candidates: Candidates | None = None,
    ) -> tuple[IndexKPlane, Selection, Candidates | None]:
        """Writes the keys, looks up, and hands on the candidates: its own (SOURCE), else those that came.

        Args:
          k2i: built from the same spec.
          inputs: of :meth:`inputs`.
          positions: token positions of the rows.
          plane: the keys that this layer scores: the source's for REINDEX.
          table: page table of the layer's ratio.
          candidates: what the SOURCE layer returned; needed for REINDEX.

        Raises:
          ValueError: a k2i of another spec, REINDEX without candidates.
        """
        if k2i.spec != self.spec:
            raise ValueError("k2i: built from another spec than this layer")
        return k2i.layer(self.entry.layer, plane, inputs, positions, table, candidates)


class IndexStack(nnx.Module):
    """The index layers of a spec one after the other, without the model around them."""

    def __init__(self, spec: K2iSpec, *, hidden: int, q_rank: int, latent: int, rngs: nnx.Rngs):
        """An :class:`Indexer` for each index layer; the arguments are its own."""
        sizes = {"hidden": hidden, "q_rank": q_rank, "latent": latent}
        self.spec = spec
        self.indexers = nnx.List([Indexer(spec, entry.layer, **sizes, rngs=rngs) for entry in spec.schedule])

    def inputs(
        self,
        q_low: Mapping[int, Float[Array, "rows q_rank"]],
        hidden: Mapping[int, Float[Array, "rows hidden"]],
        latents: Mapping[int, Float[Array, "tokens latent"]],
    ) -> dict[int, LayerInputs]:
        """Every layer's projections, by layer; ``latents`` of the layers that own keys and have new ones."""
        numbers = [x.entry.layer for x in self.indexers]
        return {
            n: indexer.inputs(q_low[n], hidden[n], latents.get(n))
            for n, indexer in zip(numbers, self.indexers, strict=True)
        }

    def __call__(self, k2i: K2i, planes, q_low, hidden, latents, positions, tables) -> StepResult:
        """A whole step; ``planes``, ``positions``, ``tables`` as ``k2i.step`` takes them, the rest as :meth:`inputs`.

        Raises:
          ValueError: a k2i of another spec.
        """
        if k2i.spec != self.spec:
            raise ValueError("k2i: built from another spec than this stack")
        return k2i.step(planes, self.inputs(q_low, hidden, latents), positions, tables)


def load_indexer(spec: K2iSpec, layer: int, checkpoint: str | Path | Mapping[str, Any]) -> Indexer:
    """An :class:`Indexer` with a checkpoint's weights.

    The names are those that SGLang 0.5.23 loads: ``layers.N.attn.indexer.`` (or ``model.layers.N.self_attn.indexer.``)
    before ``wq_b.weight``, ``weights_proj.weight`` and, where the layer owns keys, ``wk.weight``, ``k_norm.weight``.
    A ``wq_b.weight`` in float8 has its block scales in ``wq_b.scale`` (or ``wq_b.weight_scale_inv``), one for each
    block of a power of two of rows and of columns (the last ones may be less), and becomes bfloat16 here.

    Args:
      spec: the model's numbers.
      layer: an index layer of it.
      checkpoint: a ``.safetensors`` file, a folder of such files, or arrays by name.

    Raises:
      ValueError: no index layer, a missing tensor (the message lists the names tried), a wrong shape.
    """
    entry = spec.index_layer(layer)
    tensors = checkpoint if isinstance(checkpoint, Mapping) else Checkpoint(checkpoint)
    prefixes = [f"layers.{layer}.attn.indexer.", f"model.layers.{layer}.self_attn.indexer."]
    found = [prefix for prefix in prefixes if f"{prefix}wq_b.weight" in tensors]
    if not found:
        raise ValueError(f"checkpoint: has none of {[f'{prefix}wq_b.weight' for prefix in prefixes]}")

    def get(name, *shape):
        if found[0] + name not in tensors:
            raise ValueError(f"checkpoint: has no {found[0] + name}")
        value = jnp.asarray(tensors[found[0] + name])
        check_array(found[0] + name, value, (value.dtype,), shape)
        return value

    wq_b = get("wq_b.weight", spec.heads * HEAD_DIM, "q_rank")
    if wq_b.dtype.itemsize == 1:
        suffix = "scale" if f"{found[0]}wq_b.scale" in tensors else "weight_scale_inv"
        wq_b = _dequantize(f"{found[0]}wq_b.{suffix}", wq_b, get(f"wq_b.{suffix}", "blocks", "blocks"))
    weights_proj = get("weights_proj.weight", spec.heads, "hidden")
    owned = {}
    if entry.owns_keys:
        owned = {"wk": get("wk.weight", HEAD_DIM, "latent"), "k_norm": get("k_norm.weight", HEAD_DIM)}
    sizes = {"hidden": weights_proj.shape[1], "q_rank": wq_b.shape[1]}
    sizes["latent"] = owned["wk"].shape[1] if owned else 1
    indexer = nnx.eval_shape(lambda: Indexer(spec, layer, **sizes, rngs=nnx.Rngs(0)))
    for name, value in {"wq_b": wq_b, "weights_proj": weights_proj, **owned}.items():
        dtype = jnp.float32 if name == "k_norm" else jnp.bfloat16
        setattr(indexer, name, nnx.Param(value.astype(dtype)))
    return indexer


def _dequantize(name, codes, scale):
    """``f8[out, in]`` times its blocks' scales, as bfloat16; blocks are a power of two wide, the last maybe less."""
    blocks = [1 << (-(-n // m) - 1).bit_length() if m else 1 for n, m in zip(codes.shape, scale.shape, strict=True)]
    if any(-(-n // block) != m for n, block, m in zip(codes.shape, blocks, scale.shape, strict=True)):
        raise ValueError(
            f"checkpoint: {name} has {list(scale.shape)} scales for {list(codes.shape)} codes; expected one a block, "
            "blocks of a power of two of rows and of columns (128 x 128 for instance)"
        )
    scale = scale.astype(jnp.float32).repeat(blocks[0], axis=0).repeat(blocks[1], axis=1)
    return (codes.astype(jnp.float32) * scale[: codes.shape[0], : codes.shape[1]]).astype(jnp.bfloat16)
