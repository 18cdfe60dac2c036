"""SGLang 0.5.23's Triton scorer over a FUSED pool, from an unpacked wheel.

Only the kernel's own files are loaded (``sglang/kernels/ops/attention/dsv4/fp4_indexer.py`` and what it imports from
``ops/quantization``). Two helpers that allocate its output are replaced by a plain aligned allocation, so that the rest
of SGLang, and what it needs, can stay away.
"""

import importlib
import sys
import types
from pathlib import Path

import torch

_MODULE = "sglang.kernels.ops.attention.dsv4.fp4_indexer"
_ALIGNMENT = 128  # bytes a row of the output starts at


def _aligned_new_empty(shape, dtype, device, alignment_bytes):
    rows, width = shape
    step = alignment_bytes // dtype.itemsize
    return torch.empty((rows, -(-width // step) * step), dtype=dtype, device=device)[:, :width]


def load(wheel: str):
    """The module of the scorer; ``wheel`` is the folder the wheel was unpacked to (it holds ``sglang/``)."""
    root = Path(wheel)
    if not (root / "sglang").is_dir():
        raise ValueError(f"wheel: {wheel} holds no sglang folder; unpack sglang-0.5.23 there")
    packages = [_MODULE.rsplit(".", n)[0] for n in range(1, 6)] + ["sglang.kernels.ops.quantization", "sglang.srt"]
    for name in packages:  # bare packages: their own __init__ files import the whole of SGLang
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        sys.modules[name] = package
    jit_utils = types.ModuleType("sglang.kernels.jit.utils")
    jit_utils.aligned_new_empty = _aligned_new_empty
    deep_select = types.ModuleType("sglang.kernels.ops.attention.deep_select")
    deep_select.get_input_stride_alignment_bytes = lambda: _ALIGNMENT
    runtime = types.ModuleType("sglang.srt.runtime_context")  # asked which platform to quantise for; not used here
    runtime.get_platform = lambda: types.SimpleNamespace(is_blackwell=False)
    for module in (jit_utils, deep_select, runtime):
        sys.modules[module.__name__] = module
    return importlib.import_module(_MODULE)


class Scorer:
    """Random FUSED pool and queries of ``sequences`` x ``keys``; calling it runs the kernel once."""

    bytes_per_key = 68

    def __init__(self, wheel: str, sequences: int, keys: int, heads: int):
        self.score = load(wheel).fp4_index_logits_paged
        device, pages = "cuda", sequences * keys // 64 + 1
        self.pool = torch.randint(0, 256, (pages, 64 * 68), dtype=torch.uint8, device=device)
        self.pool[:, 64 * 64 :] = torch.randint(120, 131, (pages, 256), dtype=torch.uint8, device=device)
        order = 1 + torch.randperm(pages - 1, device=device).reshape(sequences, keys // 64)
        slots = order[:, :, None] * 64 + torch.arange(64, device=device)
        self.table = slots.reshape(sequences, keys).int()
        self.queries = torch.randn(sequences, heads, 128, device=device, dtype=torch.bfloat16)
        self.weights = torch.randn(sequences, heads, device=device, dtype=torch.bfloat16)
        self.rows = torch.arange(sequences, device=device)
        self.lengths = torch.full((sequences,), keys, dtype=torch.int64, device=device)
        self.keys = keys

    def __call__(self):
        return self.score(
            self.queries, self.weights, self.rows, self.table, self.lengths, self.pool, 64, self.keys, 1
        )  # fmt: skip
