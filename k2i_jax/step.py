"""The whole step: every index layer of a model, from the projections' outputs to the slots that each layer reads."""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
from jaxtyping import Float, Int

from k2i_jax._check import FLOATS, AnyArray, Jitted, as_int32, check_array
from k2i_jax.chain import head_weights, index_keys, index_queries
from k2i_jax.chain import key_slots as own_slots
from k2i_jax.fp4 import FP4Array, check_fp4
from k2i_jax.implementations import check_name
from k2i_jax.layout import HEAD_DIM
from k2i_jax.lookup import Candidates, Lookup, check_layout
from k2i_jax.page_table import PageTable, check_table
from k2i_jax.plane import IndexKPlane, check_plane
from k2i_jax.plane_ops import write_keys
from k2i_jax.rope import rope_rotations
from k2i_jax.select import Selection
from k2i_jax.spec import K2iSpec


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["queries", "weights", "keys", "norm_weight"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class LayerInputs:
    """What one index layer brings into a step.

    Attributes:
      queries: f32 or bf16 [rows, H, 128], ``wq_b``'s output, which is rotated and quantised; or an ``FP4Array`` that
        was already.
      weights: f32 or bf16 [rows, H], ``weights_proj``'s output, before ``spec.weight_scale``.
      keys: of a layer that owns keys: f32 or bf16 [tokens, 128], ``wk``'s output, a row a token (at ratio 2 the row
        of the token that completes a group holds ``wk`` of the group's pooled latent, other rows are not read); or
        an ``FP4Array`` of finished keys; or None: nothing is written. REINDEX layers have none.
      norm_weight: f32 or bf16 [128], ``k_norm.weight``; not needed for finished keys.
    """

    queries: Float[AnyArray, "rows heads 128"] | FP4Array
    weights: Float[AnyArray, "rows heads"]
    keys: Float[AnyArray, "tokens 128"] | FP4Array | None = None
    norm_weight: Float[AnyArray, "128"] | None = None


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["planes", "selections", "candidates"], meta_fields=["reuse"]
)
@dataclasses.dataclass(frozen=True)
class StepResult:
    """What a step made.

    Attributes:
      planes: by owner layer, with this step's keys.
      selections: by index layer.
      candidates: what the SOURCE layer published; None where the spec has none.
      reuse: ``(layer, index layer)`` pairs, static.
    """

    planes: dict[int, IndexKPlane]
    selections: dict[int, Selection]
    candidates: Candidates | None
    reuse: tuple[tuple[int, int], ...]

    def selection(self, layer: int) -> Selection:
        """What any layer attends to: its own selection, or that of the index layer before it.

        Raises:
          ValueError: a layer before the first index layer or past the last layer.
        """
        reuse = dict(self.reuse)
        if layer not in reuse:
            raise ValueError(f"layer: expected {min(reuse)}..{max(reuse)}, the layers with a selection, got {layer}")
        return self.selections[reuse[layer]]


@dataclasses.dataclass(frozen=True)
class K2i:
    """A model's index lookup, jitted; made by :func:`build_k2i`.

    Attributes:
      spec: the model's numbers.
      page8: what was fixed about the ratio-1 plane.
      full, source, reindex: one lookup; see :class:`k2i_jax.lookup.Lookup`'s methods of these names.
      layer, step: one index layer, and all of them; see :func:`build_k2i`.
    """

    spec: K2iSpec
    page8: bool | None
    full: Callable[..., Selection]
    source: Callable[..., tuple[Selection, Candidates]]
    reindex: Callable[..., Selection]
    layer: Callable[..., tuple[IndexKPlane, Selection, Candidates | None]]
    step: Callable[..., StepResult]


def build_k2i(
    spec: K2iSpec,
    page8: bool | None = None,
    *,
    implementation: str | None = None,
    interpret: bool = False,
    selection: str | None = None,
    donate: bool = False,
) -> K2i:
    """Builds the lookups of a model; everything that the spec says is static in them.

    ``step(planes, layers, positions, tables, *, key_positions=None, key_slots=None) -> StepResult`` runs the
    schedule once, for any rows: one a sequence (decode), drafts + 1 (verify), or many (prefill, which goes in parts
    that fit ``spec.memory_budget``). In it

    - ``planes`` are the pools by owner layer, ``layers`` a ``LayerInputs`` by index layer;
    - ``positions`` i32[rows] are the rows' token positions;
    - ``tables`` are page tables by ratio, all of the same rows; their row ends are inputs (``verify_row_ends`` and
      its kin count them: at ratio r the query at position p sees ``(p + 1) // r`` keys);
    - an owner layer writes its keys before it is scored. Without ``key_slots`` a row's key goes where its table says
      (``key_slots()``: incomplete groups and padding write nothing). Keys of other tokens than the rows (context
      parallel prefill) come with their own ``key_positions`` i32[tokens] and, by ratio, ``key_slots`` i32[tokens].

    ``layer(number, plane, inputs, positions, table, candidates=None, *, key_positions=None, key_slots=None) ->
    (plane, selection, candidates)`` is one index layer of it, for models that compute the next layer's inputs from
    this one's selection; ``step`` is its repetition. A REINDEX layer takes the candidates that the SOURCE returned.

    Args:
      spec: the model's numbers, ``K2iSpec.v41_flash()`` for instance.
      page8: None takes each plane in its own layout. True or False fixes the ratio-1 plane alone (PAGE8 or PAGE64):
        another layout is refused, and so is any but PAGE64 in planes of other ratios.
      implementation, interpret: as for ``index_logits``.
      selection: ``implementation`` of ``select_topk`` and ``select_candidate_blocks``.
      donate: let ``step`` and ``layer`` reuse the memory of ``planes`` and ``plane`` (gone after the call). Inside
        your own ``jit`` or ``scan`` donate there instead.

    Raises:
      TypeError, ValueError: wrong arguments here; wrong types, shapes or layouts when a lookup is traced.
    """
    if not isinstance(spec, K2iSpec):
        raise TypeError(f"spec: expected a k2i_jax.K2iSpec, got {type(spec).__name__}")
    if page8 is not None and not isinstance(page8, bool):
        raise TypeError(f"page8: expected None, True or False, got {page8!r}")
    check_name(implementation, interpret)
    check_name(selection, argument="selection")
    lookup = Lookup(spec, page8, implementation, interpret, selection)
    return K2i(
        spec,
        page8,
        jax.jit(lookup.full, static_argnames="ratio"),
        jax.jit(lookup.source, static_argnames="ratio"),
        jax.jit(lookup.reindex, static_argnames="ratio"),
        Jitted(functools.partial(_layer, lookup), static_argnums=0, donate_argnums=(1,) if donate else ()),
        Jitted(functools.partial(_step, lookup), donate_argnums=(0,) if donate else ()),
    )


def _layer(
    lookup: Lookup,
    number: int,
    plane: IndexKPlane,
    inputs: LayerInputs,
    positions: Int[AnyArray, "rows"],
    table: PageTable,
    candidates: Candidates | None = None,
    *,
    key_positions: Int[AnyArray, "tokens"] | None = None,
    key_slots: Int[AnyArray, "tokens"] | None = None,
) -> tuple[IndexKPlane, Selection, Candidates | None]:
    entry, spec = lookup.spec.index_layer(number), lookup.spec
    name = f"layers[{number}]"
    positions = as_int32("positions", positions, ("rows",))
    check_table(table, f"tables[{entry.ratio}]", *positions.shape)
    _check_inputs(name, inputs, positions.shape[0], spec.heads)
    check_plane(plane, f"planes[{entry.keys}]")
    check_layout(plane, entry.ratio, lookup.page8, f"planes[{entry.keys}]")
    if inputs.keys is not None:
        if not entry.owns_keys:
            raise ValueError(f"{name}.keys: layer {number} scores layer {entry.keys}'s keys; expected None")
        if (key_positions is None) != (key_slots is None):
            raise ValueError("key_positions, key_slots: expected both or neither, got one of them")
        if key_slots is None:
            key_positions, key_slots = positions, own_slots(table, positions, ratio=entry.ratio)
        plane = _write(spec, entry.ratio, plane, inputs, key_positions, key_slots, name)

    queries = inputs.queries
    if not isinstance(queries, FP4Array):
        queries = index_queries(queries, rope_rotations(positions, spec.frequencies))
    operands = queries, head_weights(inputs.weights, scale=spec.weight_scale), plane
    if entry.role == "source":
        return plane, *lookup.source(*operands, table, ratio=entry.ratio)
    if entry.role == "full":
        return plane, lookup.full(*operands, table, ratio=entry.ratio), candidates
    if candidates is None:
        raise ValueError(f"candidates: layer {number} reindexes; expected what layer {entry.keys} returned, got None")
    return plane, lookup.reindex(*operands, candidates, ratio=entry.ratio), candidates


def _check_inputs(name, inputs, rows, heads):
    if not isinstance(inputs, LayerInputs):
        raise TypeError(f"{name}: expected a k2i_jax.LayerInputs, got {type(inputs).__name__}")
    _check_floats_or_fp4(f"{name}.queries", inputs.queries, (rows, heads))
    check_array(f"{name}.weights", inputs.weights, FLOATS, (rows, heads))


def _check_floats_or_fp4(name, x, shape):
    if isinstance(x, FP4Array):
        check_fp4(name, x, shape)
    else:
        check_array(name, x, FLOATS, (*shape, HEAD_DIM))


def _write(spec, ratio, plane, inputs, positions, slots, name):
    positions = as_int32("key_positions", positions, ("tokens",))
    slots = as_int32(f"key_slots[{ratio}]", slots, positions.shape)
    keys = inputs.keys
    _check_floats_or_fp4(f"{name}.keys", keys, positions.shape)
    if not isinstance(keys, FP4Array):
        if inputs.norm_weight is None:
            raise ValueError(f"{name}.norm_weight: expected k_norm.weight [{HEAD_DIM}] with float keys, got None")
        check_array(f"{name}.norm_weight", inputs.norm_weight, FLOATS, (HEAD_DIM,))
        rotations = rope_rotations(positions // ratio * ratio, spec.frequencies)
        keys = index_keys(keys, inputs.norm_weight, rotations, eps=spec.norm_eps)
    return write_keys(plane, slots, keys, skip_slot_zero=True)


def _step(
    lookup: Lookup,
    planes: Mapping[int, IndexKPlane],
    layers: Mapping[int, LayerInputs],
    positions: Int[AnyArray, "rows"],
    tables: Mapping[int, PageTable],
    *,
    key_positions: Int[AnyArray, "tokens"] | None = None,
    key_slots: Mapping[int, Int[AnyArray, "tokens"]] | None = None,
) -> StepResult:
    spec = lookup.spec
    wanted = {
        "planes": (planes, [x.layer for x in spec.schedule if x.owns_keys]),
        "layers": (layers, [x.layer for x in spec.schedule]),
        "tables": (tables, list(spec.ratios)),
    }
    if key_slots is not None:
        wanted["key_slots"] = (key_slots, list(spec.ratios))
    for name, (given, keys) in wanted.items():
        if not isinstance(given, Mapping):
            raise TypeError(f"{name}: expected a dict with keys {keys}, got {type(given).__name__}")
        if sorted(given) != keys:
            raise ValueError(f"{name}: expected keys {keys}, got {sorted(given)}")

    planes, selections, candidates = dict(planes), {}, None
    for entry in spec.schedule:
        planes[entry.keys], selections[entry.layer], candidates = _layer(
            lookup,
            entry.layer,
            planes[entry.keys],
            layers[entry.layer],
            positions,
            tables[entry.ratio],
            candidates,
            key_positions=key_positions,
            key_slots=None if key_slots is None else key_slots[entry.ratio],
        )
    return StepResult(planes, selections, candidates, tuple(spec.reuse.items()))
