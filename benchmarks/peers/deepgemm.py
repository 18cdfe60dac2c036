"""DeepGEMM's FP8 paged logits kernel (132 B a key), from an unpacked wheel of sgl-deep-gemm 0.1.4 and apache-tvm-ffi.

It compiles its kernel with nvcc when first called (CUDA_HOME). Queries and keys are float8_e4m3fn with one float32
scale a key; the pool is ``[pages, 64, 1, 132]`` bytes, 64 keys of 128 bytes and then their 64 scales.
"""

import importlib
import os
import sys

import torch


def load(wheel: str):
    """The ``deep_gemm`` package; ``wheel`` is the folder both wheels were unpacked to."""
    os.environ.setdefault("CUDA_HOME", "/usr/local/cuda")
    if wheel not in sys.path:
        sys.path.insert(0, wheel)
    return importlib.import_module("deep_gemm")


class Scorer:
    """Random pool and queries of ``sequences`` x ``keys``, ``next_n`` (1 or 2) rows each; a call runs the kernel."""

    bytes_per_key = 132

    def __init__(self, wheel: str, sequences: int, keys: int, heads: int, next_n: int = 1):
        self.deep_gemm = load(wheel)
        device, pages = "cuda", sequences * keys // 64 + 1
        pool = torch.empty(pages, 64 * 132, dtype=torch.uint8, device=device)
        for first in range(0, pages, 8192):  # in parts: the float32 draft is four times the pool
            part = pool[first : first + 8192]
            values = torch.randn(len(part), 64 * 128, device=device).to(torch.float8_e4m3fn)
            part[:, : 64 * 128] = values.view(torch.uint8)
            part[:, 64 * 128 :] = torch.rand(len(part), 64, device=device).view(torch.uint8)
        self.pool = pool.view(pages, 64, 1, 132)
        order = 1 + torch.randperm(pages - 1, device=device).reshape(sequences, keys // 64)
        self.table = order.int()
        self.queries = torch.randn(sequences, next_n, heads, 128, device=device).to(torch.float8_e4m3fn)
        self.weights = torch.randn(sequences * next_n, heads, device=device)
        self.lengths = torch.full((sequences, next_n), keys, dtype=torch.int32, device=device)
        self.keys = keys
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        self.schedule = self.deep_gemm.get_paged_mqa_logits_metadata(self.lengths, 64, processors)

    def __call__(self):
        return self.deep_gemm.fp8_paged_mqa_logits(
            self.queries, self.pool, self.weights, self.lengths, self.table, self.schedule, self.keys
        )  # fmt: skip
