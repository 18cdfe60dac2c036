"""A recorded case: one pool in both layouts, queries, tables, and what SGLang's own code made of them.

The file is an ``.npz``; ``k2i_jax/data/verify.npz`` ships with the package. Its arrays are SGLang's: planes
``[pages, 1, 4, 64, 16]`` and ``[pages, 1, 4, 64]``, query scales in aiter's order, one row of ``lengths`` a query.
"""

import dataclasses
import zipfile
import zlib
from importlib import resources
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from k2i_jax._check import check_array
from k2i_jax.fp4 import FP4Array
from k2i_jax.layout import PageLayout, query_scale_from_aiter
from k2i_jax.page_table import PageTable
from k2i_jax.plane import IndexKPlane

_SHAPES: dict[str, tuple[tuple, tuple]] = {
    "q_fp4": ((np.uint8,), ("rows", "heads", 64)),
    "q_scale": ((np.uint8,), ("rows", 1, 4, 16, 4)),
    "weights": ((np.float32,), ("rows", "heads")),
    "page_table": ((np.int32,), ("sequences", "pages")),
    "row_to_seq": ((np.int32, np.int64), ("rows",)),
    "lengths": ((np.int32,), ("rows",)),
    "k_input": ((np.float32,), ("keys", 128)),
    "slots": ((np.int32, np.int64), ("keys",)),
    "logits_fp64": ((np.float64,), ("rows", "width")),
    "sglang_torch_logits": ((np.float32,), ("rows", "width")),
    "candidate_ids": ((np.int32,), ("rows", "blocks")),
    "page8_lens": ((np.int32,), ("rows",)),
    "topk_positions": ((np.int32,), ("rows", "k")),
    "topk_slots": ((np.int32,), ("rows", "k")),
    "topk_blocks": ((np.int64, np.int32), ()),
}
_PLANES = ("page64_payload", "page64_scale", "page8_payload", "page8_scale")


@dataclasses.dataclass(frozen=True)
class Case:
    """A case, ready to be scored; ``arrays`` holds the file's own."""

    name: str
    queries: FP4Array
    weights: Any
    planes: dict[PageLayout, IndexKPlane]
    table: PageTable
    arrays: dict[str, np.ndarray]

    @property
    def topk_blocks(self) -> int:
        return int(self.arrays["topk_blocks"])

    @property
    def k(self) -> int:
        return self.arrays["topk_positions"].shape[1]


def load_case(path: str | Path | None = None) -> Case:
    """Reads a case file; None reads the one that ships with the package.

    Raises:
      ValueError: the file is missing, no ``.npz``, truncated, or lacks an array or a shape; one line says which.
    """
    source = resources.files("k2i_jax.data") / "verify.npz" if path is None else Path(path)
    try:
        with source.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise ValueError(f"{source}: no such file") from None
    except (
        zipfile.BadZipFile,
        OSError,
        EOFError,
        ValueError,
        AttributeError,
        TypeError,
        zlib.error,
    ) as error:
        raise ValueError(f"{source}: not a readable .npz file ({error})") from None
    missing = [name for name in (*_SHAPES, *_PLANES) if name not in arrays]
    if missing:
        raise ValueError(f"{source}: not a case file, it lacks {', '.join(missing)}")
    try:
        return _case(Path(str(source)).stem, arrays)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{source}: {error}") from None


def _case(name: str, arrays: dict[str, np.ndarray]) -> Case:
    for key, (dtypes, shape) in _SHAPES.items():
        check_array(key, arrays[key], dtypes, shape)
    rows, heads, _ = arrays["q_fp4"].shape
    width = arrays["page_table"].shape[1] * 64
    expected = {
        "q_scale": (rows, 1, 4, 16, 4), "weights": (rows, heads), "row_to_seq": (rows,), "lengths": (rows,),
        "logits_fp64": (rows, width), "sglang_torch_logits": (rows, width), "page8_lens": (rows,),
        "topk_slots": arrays["topk_positions"].shape, "slots": arrays["k_input"].shape[:1],
    }  # fmt: skip
    for key, shape in expected.items():
        check_array(key, arrays[key], _SHAPES[key][0], shape)
    planes = {
        layout: IndexKPlane.from_arrays(arrays[f"{layout}_payload"], arrays[f"{layout}_scale"], layout)
        for layout in (PageLayout.PAGE64, PageLayout.PAGE8)
    }
    queries = FP4Array(jnp.asarray(arrays["q_fp4"]), query_scale_from_aiter(jnp.asarray(arrays["q_scale"]), heads))
    sequence = arrays["row_to_seq"]
    sequences = len(arrays["page_table"])
    if (np.diff(sequence) < 0).any() or ((sequence < 0) | (sequence >= sequences)).any():
        raise ValueError(f"row_to_seq: expected ascending sequences in 0..{sequences - 1}, got {sequence.tolist()}")
    starts = np.searchsorted(sequence, np.arange(sequences + 1))
    table = PageTable.from_arrays(arrays["page_table"], arrays["lengths"], starts)
    for plane in planes.values():
        table.check(plane)
    return Case(name, queries, jnp.asarray(arrays["weights"]), planes, table, arrays)
