"""Key loads in the order of the matrix operand, for each layout, as address digits.

A tile of keys is loaded as a tensor whose dims are *digits*: bit fields of the key's number in its page (axis "t"),
of its scale group ("c"), of the byte in the group ("r") and of the 64-key group of the step ("g"). Both layouts are
linear in these bits, so an address is a sum of digits times strides. The dims' order decides which lane of the GPU
holds what: written in the matrix operand's own order, the transpose and reshape into that operand move no data.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from k2i_jax.kernels._jax_private import load_bytes, load_words
from k2i_jax.kernels.ops import iota


class Digit(NamedTuple):
    """Bits ``[bit, bit + log2(size))`` of a coordinate."""

    axis: str
    bit: int
    size: int


# Byte offset in a page of each bit of t, of c and of r.
PAYLOAD_STRIDES = {
    "page64": {"t": (16, 32, 64, 128, 256, 512), "c": (1024, 2048), "r": (1, 2, 4)},
    "page8": {"t": (128, 256, 16, 512, 1024, 2048), "c": (32, 64), "r": (1, 2, 4)},
}
SCALE_STRIDES = {
    "page64": {"t": (4, 8, 16, 32, 1, 2), "c": (64, 128)},
    "page8": {"t": (1, 2, 4, 32, 64, 128), "c": (8, 16)},
}
COLUMN_STRIDES = (1, 2, 4, 8, 16, 32)  # of the bits of t


def t(bit: int, size: int = 2) -> Digit:
    """A digit of the key's number."""
    return Digit("t", bit, size)


def linear(digits, strides):
    """i32 tensor over ``digits``' shape: the sum of digit times stride; axes missing from ``strides`` count 0."""
    shape = tuple(digit.size for digit in digits)
    return sum((iota(shape, i) * strides[d.axis][d.bit] for i, d in enumerate(digits) if d.axis in strides), 0)


@dataclasses.dataclass(frozen=True)
class KeyOrder:
    """The order in which one layout's keys are loaded for one matrix operand, and their logits stored.

    Attributes:
      layout: "page64" or "page8".
      unit: keys a table entry: 64, or 8 for candidates (an entry is then a virtual page, ``8 page + sub``).
      payload: dims of the payload load, outermost first.
      scale: dims of the scale load.
      store: dims of the logits' store; one dim of 64 for a plain row.
      own: digits whose values one thread holds all.
      opaque_scale: keep the compiler from seeing which scales lie side by side: it would load them in another order.
    """

    layout: str
    unit: int
    payload: tuple[Digit, ...]
    scale: tuple[Digit, ...]
    store: tuple[Digit, ...]
    own: tuple[Digit, ...]
    opaque_scale: bool = False

    @property
    def flat(self) -> bool:
        """Whether the store is a plain row."""
        return len(self.store) == 1

    @property
    def entry(self) -> tuple[Digit, ...]:
        """The digits that choose a table entry."""
        return tuple(d for d in self.payload if d.axis == "g" or (self.unit == 8 and d.axis == "t" and d.bit >= 3))

    @property
    def groups(self) -> int:
        """64-key groups a step."""
        return next((d.size for d in self.payload if d.axis == "g"), 1)

    def entry_index(self, step, live):
        """Table index of each of a step's entries, of which the first ``live`` count; past them the last repeats."""
        strides = {"g": (1,)} if self.unit == 64 else {"g": (8,), "t": (0, 0, 0, 1, 2, 4)}
        per_step = self.groups * 64 // self.unit
        return jnp.minimum(step * per_step + linear(self.entry, strides), live - 1)

    def spread(self, x, digits):
        """A tensor over ``entry`` with dims of size 1 for the other ``digits``, so that it broadcasts to them."""
        if not self.entry:
            return x
        x = x.transpose([self.entry.index(d) for d in digits if d in self.entry])
        return jnp.expand_dims(x, [i for i, d in enumerate(digits) if d not in self.entry])

    def columns(self, index, digits, opaque_zero):
        """Column of every element over ``digits``, for ``entry_index``'s tensor.

        Bit 0 is combined with a zero that the compiler does not know: a store that looked contiguous along it would
        be given another data layout, and go through shared memory.
        """
        strides = COLUMN_STRIDES if self.unit == 64 else (*COLUMN_STRIDES[:3], 0, 0, 0)
        shape = tuple(digit.size for digit in digits)
        inside = 0
        for i, digit in enumerate(digits):
            if digit.axis == "t":
                value = iota(shape, i)
                inside += (value ^ opaque_zero if digit == t(0) else value) * strides[digit.bit]
        return self.spread(index * self.unit, digits) + inside

    def flat_columns(self, step, live):
        """For a flat store of one group: table index (of each column for unit 8, else a scalar), column, fixed.

        The columns are ``column + fixed``; ``fixed`` is the part of ``own`` digits.
        """
        inside = iota((64,), 0)
        bits = sum((digit.size - 1) << digit.bit for digit in self.own)
        offset, fixed = inside & ~bits, inside & bits
        if self.unit == 64:
            index = jnp.minimum(step, live - 1)
            return index, index * 64 + offset, fixed
        index = jnp.minimum((step * 64 + inside) >> 3, live - 1)
        return index, index * 8 + (offset & 7), fixed & 7

    def load_payload(self, ref, entry, byte=None):
        """Loads a step's payload over ``payload``: u8, or i32 if its last digit counts words.

        Args:
          ref: u8[pages, 4096].
          entry: i32 over ``entry``: page ids (virtual ones for unit 8) inside the plane.
          byte: r, an i32 scalar: u8 of that byte of each (key, group), without the last dim; None for all.
        """
        strides = PAYLOAD_STRIDES[self.layout]
        if byte is not None:
            return self._load(ref, strides, self.payload[:-1], entry, plus=byte)
        if self.payload[-1].bit == 0:
            return self._load(ref, strides, self.payload, entry)
        strides = {axis: tuple(stride // 4 for stride in bits) for axis, bits in strides.items()}
        return self._load(ref, strides, self.payload, entry, load=load_words)

    def load_scale(self, ref, entry, opaque_zero):
        """Loads a step's scales: u8 over ``scale`` from u8[pages, 256]."""
        zero = opaque_zero if self.opaque_scale else None
        return self._load(ref, SCALE_STRIDES[self.layout], self.scale, entry, opaque_zero=zero)

    def _load(self, ref, strides, digits, entry, opaque_zero=None, plus=None, load=load_bytes):
        entry = self.spread(entry, digits)
        b3, b4, b5 = strides["t"][3:]
        if self.unit == 8:  # the entry says which 8 keys of the page
            strides = {**strides, "t": (*strides["t"][:3], 0, 0, 0)}
        offset = linear([d if d not in self.own else d._replace(axis="") for d in digits], strides)
        fixed = linear([d if d in self.own else d._replace(axis="") for d in digits], strides)
        if opaque_zero is not None:
            offset = offset ^ opaque_zero
        if plus is not None:
            offset = offset + plus
        if self.unit == 64:
            return load(ref, entry, offset, fixed)
        sub = entry & 7
        base = sub * b3 if b5 == 4 * b3 else (sub & 1) * b3 + (sub >> 1) * b4
        return load(ref, entry >> 3, base + offset, fixed)
