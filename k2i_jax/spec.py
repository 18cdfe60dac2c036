"""What a model's index lookup looks like: which layers own keys, select, publish or reuse, and every number of it."""

import dataclasses
from collections.abc import Mapping, Sequence
from numbers import Real
from types import MappingProxyType
from typing import Literal

import numpy as np

from k2i_jax._check import check_heads
from k2i_jax.layout import HEAD_DIM, SUB_PAGE_SIZE
from k2i_jax.rope import rope_frequencies

RATIOS = (1, 2, 4)  # tokens a key: a 256-token page must make whole 64-key pages
_LOGITS_BYTES = 20  # temporaries a logit, of scoring and selection together

Role = Literal["full", "source", "reindex"]


@dataclasses.dataclass(frozen=True)
class IndexLayer:
    """One index layer of the schedule.

    Attributes:
      layer: its number in the model.
      role: "full" scores everything; "source" does, and publishes candidate blocks; "reindex" scores these alone.
      ratio: tokens a key.
      keys: the layer whose keys it scores: itself where it owns keys.
    """

    layer: int
    role: Role
    ratio: int
    keys: int

    @property
    def owns_keys(self) -> bool:
        return self.keys == self.layer


@dataclasses.dataclass(frozen=True)
class K2iSpec:
    """The numbers of a model's index lookup; :meth:`v41_flash` holds DeepSeek-V4.1-Flash's.

    Attributes:
      num_layers: layers of the model.
      full_layers: ``(layer, ratio)`` of the layers that own keys and score everything, ascending.
      source_layer: the one of them that also publishes candidate blocks; None where nothing reindexes.
      reindex_layers: layers that score the source's keys within its blocks, ascending, after the source.
      heads: index heads, a multiple of 16 up to 128.
      topk: positions a row selects.
      topk_blocks: candidate blocks (of 8 positions) a row publishes.
      norm_eps: of the keys' RMSNorm.
      weight_scale: multiplies ``weights_proj``'s output; None for ``128^-0.5 * heads^-0.5``.
      rope_dims: dims at a vector's end that turn.
      rope_theta, rope_factor, rope_beta_fast, rope_beta_slow, rope_original_length: as ``rope_frequencies`` takes
        them.
      memory_budget: bytes that the logits of the rows at hand and their selection may take; more rows wait their
        turn. One row is always taken.
    """

    num_layers: int
    full_layers: tuple[tuple[int, int], ...]
    source_layer: int | None = None
    reindex_layers: tuple[int, ...] = ()
    heads: int = 32
    topk: int = 512
    topk_blocks: int = 2048
    norm_eps: float = 1e-20
    weight_scale: float | None = None
    rope_dims: int = 64
    rope_theta: float = 160000.0
    rope_factor: float = 16.0
    rope_beta_fast: float = 32.0
    rope_beta_slow: float = 1.0
    rope_original_length: int = 65536
    memory_budget: int = 1 << 30

    @classmethod
    def v41_flash(cls, **overrides) -> "K2iSpec":
        """DeepSeek-V4.1-Flash: 40 layers, eight of them index layers; ``overrides`` replace single numbers.

        Raises:
          TypeError, ValueError: as the class does.
        """
        numbers: dict = {
            "num_layers": 40,
            "full_layers": ((2, 2), (8, 2), (14, 2), (20, 1)),
            "source_layer": 20,
            "reindex_layers": (24, 28, 32, 36),
        }
        return cls(**{**numbers, **overrides})

    def __post_init__(self):
        try:
            full = tuple((int(layer), int(ratio)) for layer, ratio in self.full_layers)
        except (TypeError, ValueError):
            raise TypeError(f"full_layers: expected pairs (layer, ratio), got {self.full_layers!r}") from None
        if not isinstance(self.reindex_layers, Sequence):
            raise TypeError(f"reindex_layers: expected layer numbers, got {self.reindex_layers!r}")
        object.__setattr__(self, "full_layers", full)
        object.__setattr__(self, "reindex_layers", tuple(self.reindex_layers))
        for name in ("num_layers", "heads", "topk", "topk_blocks", "memory_budget", "rope_dims"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}: expected an integer of at least 1, got {value!r}")
        for name in ("norm_eps", "weight_scale", "rope_theta", "rope_factor", "rope_beta_fast", "rope_beta_slow",
                     "rope_original_length"):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, Real) and (name, value) != ("weight_scale", None):
                raise TypeError(f"{name}: expected a number, got {value!r}")
        self._check_layers()
        check_heads("heads", self.heads)
        if not 2 <= self.rope_dims <= HEAD_DIM:
            raise ValueError(f"rope_dims: expected 2..{HEAD_DIM}, got {self.rope_dims}")
        if not 0 <= self.norm_eps < float("inf"):
            raise ValueError(f"norm_eps: expected a finite number of at least 0, got {self.norm_eps}")
        if self.weight_scale is not None and not np.isfinite(self.weight_scale):
            raise ValueError(f"weight_scale: expected None or a finite number, got {self.weight_scale}")
        try:
            _ = self.frequencies
        except ValueError as error:
            raise ValueError(f"rope: {error}") from None

    def _check_layers(self):
        numbers = [layer for layer, _ in self.full_layers]
        for name, layers in (("full_layers", numbers), ("reindex_layers", list(self.reindex_layers))):
            if any(not isinstance(n, int) or not 0 <= n < self.num_layers for n in layers) or sorted(
                set(layers)
            ) != list(layers):
                raise ValueError(f"{name}: expected ascending layers in 0..{self.num_layers - 1}, got {layers}")
        if not numbers:
            raise ValueError("full_layers: expected at least one layer that owns keys, got none")
        for layer, ratio in self.full_layers:
            if ratio not in RATIOS:
                raise ValueError(f"full_layers: layer {layer} has ratio {ratio}, expected one of {list(RATIOS)}")
        if self.source_layer is None:
            if self.reindex_layers:
                raise ValueError(f"reindex_layers: {list(self.reindex_layers)} need a source_layer, got None")
            return
        if self.source_layer not in numbers:
            raise ValueError(f"source_layer: expected one of full_layers {numbers}, got {self.source_layer}")
        shared = set(numbers) & set(self.reindex_layers)
        if shared or any(layer <= self.source_layer for layer in self.reindex_layers):
            raise ValueError(
                f"reindex_layers: expected layers after source_layer {self.source_layer} that are not in full_layers, "
                f"got {list(self.reindex_layers)}"
            )

    @property
    def schedule(self) -> tuple[IndexLayer, ...]:
        """The index layers in the model's order."""
        ratio_of = dict(self.full_layers)
        found = [
            IndexLayer(layer, "source" if layer == self.source_layer else "full", ratio, layer)
            for layer, ratio in self.full_layers
        ]
        if self.source_layer is not None:
            source, ratio = self.source_layer, ratio_of[self.source_layer]
            found += [IndexLayer(layer, "reindex", ratio, source) for layer in self.reindex_layers]
        return tuple(sorted(found, key=lambda x: x.layer))

    def index_layer(self, layer: int) -> IndexLayer:
        """The entry of an index layer.

        Raises:
          ValueError: ``layer`` is not one.
        """
        for found in self.schedule:
            if found.layer == layer:
                return found
        raise ValueError(f"layer: expected one of the index layers {[x.layer for x in self.schedule]}, got {layer}")

    @property
    def reuse(self) -> Mapping[int, int]:
        """Index layer whose selection each layer attends to: from the first index layer on, the last one so far."""
        layers = [x.layer for x in self.schedule]
        return MappingProxyType(
            {n: max(x for x in layers if x <= n) for n in range(layers[0], self.num_layers)},
        )

    @property
    def ratios(self) -> tuple[int, ...]:
        """The ratios of the schedule, ascending: a step takes a page table of each."""
        return tuple(sorted({ratio for _, ratio in self.full_layers}))

    @property
    def frequencies(self) -> np.ndarray:
        """Radians a position of each pair of turning dims, f32[rope_dims / 2]."""
        return rope_frequencies(
            theta=self.rope_theta,
            dims=self.rope_dims,
            factor=self.rope_factor,
            beta_fast=self.rope_beta_fast,
            beta_slow=self.rope_beta_slow,
            original_length=self.rope_original_length,
        )

    def binds(self, width: int) -> bool:
        """Whether the candidate blocks can leave anything out of a table of ``width`` positions (V4.1: over 16384)."""
        return width > self.topk_blocks * SUB_PAGE_SIZE

    def rows_per_step(self, width: int) -> int:
        """Rows whose logits over ``width`` positions fit the memory budget, at least one."""
        return max(1, self.memory_budget // (_LOGITS_BYTES * max(width, 1)))
