"""Key loads in the order of the matrix operand, for each layout, as address digits.

A tile of keys is loaded as a tensor whose dims are *digits*: bit fields of the key's number in its page (axis "t"),
of its scale group ("c"), of the byte in the group ("r") and of the 64-key group of the step ("g"). Both layouts are
linear in these bits, so an address is a sum of digits times strides. The dims' order decides which lane of the GPU
holds what: written in the matrix operand's own order, the transpose and reshape into that operand move no data.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from k2i_jax.kernels._jax_private import load_bytes
from k2i_jax.kernels.dot_scaled import iota


class Digit(NamedTuple):
    """Bits ``[bit, bit + log2(size))`` of a coordinate."""

    axis: str
    bit: int
    size: int


# Byte offset in a page of each bit of t and of c; r counts bytes.
PAYLOAD_STRIDES = {
    "page64": {"t": (16, 32, 64, 128, 256, 512), "c": (1024, 2048), "r": (1,)},
    "page8": {"t": (128, 256, 16, 512, 1024, 2048), "c": (32, 64), "r": (1,)},
}
SCALE_STRIDES = {
    "page64": {"t": (4, 8, 16, 32, 1, 2), "c": (64, 128)},
    "page8": {"t": (1, 2, 4, 32, 64, 128), "c": (8, 16)},
}
COLUMN_STRIDES = {"t": (1, 2, 4, 8, 16, 32)}
BYTES = Digit("r", 0, 16)


def _t(bit, size=2):
    return Digit("t", bit, size)


def linear(digits, strides):
    """i32 tensor over ``digits``' shape: the sum of digit times stride, without the axes ``strides`` lacks."""
    shape = tuple(digit.size for digit in digits)
    terms = [iota(shape, i) * strides[d.axis][d.bit] for i, d in enumerate(digits) if d.axis in strides]
    return sum(terms[1:], terms[0])


@dataclasses.dataclass(frozen=True)
class KeyOrder:
    """Dims of a tile's payload load: the outermost first, the 16 bytes of a (key, group) last."""

    layout: str
    payload: tuple[Digit, ...]
    scale: tuple[Digit, ...]
    unit: int  # keys a table entry: 64, or 8 for candidates

    @property
    def keys(self) -> tuple[Digit, ...]:
        """The digits that number a key, in payload order: the row order of the matrix operand."""
        return tuple(digit for digit in self.payload if digit.axis in "tg")

    def places(self, digits, count, step, *, group_keys):
        """Table entry of every element of ``digits``' shape: where ``count`` entries are live, the last at most."""
        per_group = 64 // self.unit
        entry = {"g": (per_group,)}
        if self.unit == 8:
            entry["t"] = (0, 0, 0, 1, 2, 4)
        return jnp.minimum(step * (group_keys // self.unit) + linear(digits, entry), count - 1)

    def entry_digits(self, digits) -> tuple[Digit, ...]:
        """``digits`` with those that do not choose a table entry shrunk to size 1."""
        chooses = lambda d: d.axis == "g" or (d.axis == "t" and self.unit == 8 and d.bit >= 3)
        return tuple(d if chooses(d) else d._replace(size=1) for d in digits)

    def load(self, payload_ref, scale_ref, entries):
        """Payload u8 and scale u8 tensors in load order, for table entries over ``entry_digits`` (clamped ids)."""
        return (
            self._load(payload_ref, PAYLOAD_STRIDES[self.layout], self.payload, entries(self.payload)),
            self._load(scale_ref, SCALE_STRIDES[self.layout], self.scale, entries(self.scale)),
        )

    def _load(self, ref, strides, digits, entry):
        if self.unit == 64:
            return load_bytes(ref, entry, linear(digits, strides))
        sub, strides = entry & 7, {**strides, "t": strides["t"][:3] + (0, 0, 0)}
        first, second = SCALE_STRIDES[self.layout]["t"][3:5] if "r" not in strides else PAYLOAD_STRIDES[self.layout]["t"][3:5]
        base = sub * first if second == 2 * first else (sub & 1) * first + (sub >> 1) * second
        return load_bytes(ref, entry >> 3, base + linear(digits, strides))
