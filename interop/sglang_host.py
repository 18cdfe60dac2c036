"""Makes SGLang's own HIP indexer importable on a host without a GPU: its Triton kernels interpreted, aiter absent."""

import importlib
import importlib.util
import os
import sys
import types
import warnings
from pathlib import Path
from typing import Any, NamedTuple

TESTED_VERSION = "0.5.23"

_MODULES = {  # what the fields of SGLang's NamedTuple below are imported from
    "decode": "sglang.srt.layers.attention.dsv4.low_ratio_backend_hip",
    "indexer": "sglang.kernels.ops.attention.dsv4.fp4_indexer_hip",
    "candidates": "sglang.kernels.ops.attention.dsv4.candidate_blocks_hip",
    "writer": "sglang.kernels.ops.kvcache.dsv4_fp4_index_k_cache_hip",
    "pool": "sglang.srt.mem_cache.deepseek_v4_memory_pool",
}


class SGLang(NamedTuple):
    """SGLang's modules of the ROCm indexer."""

    version: str
    decode: types.ModuleType
    indexer: types.ModuleType
    candidates: types.ModuleType
    writer: types.ModuleType
    pool: types.ModuleType


def find_sglang() -> Path | None:
    """The folder of the installed SGLang's source, found without importing it; None if there is none."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:  # a folder that happens to be called sglang is no SGLang
        return None
    return Path(spec.origin).parent


def import_sglang() -> SGLang:
    """Imports the modules of SGLang's ROCm indexer, without a GPU where there is none.

    There ``TRITON_INTERPRET=1`` is set, which Triton reads when it is first imported, and ``torchvision`` (a CUDA
    build that nothing here calls) is stood in for by an empty module if it is missing.

    Raises:
      ImportError: SGLang, or a package that its modules import, is missing; or Triton is already imported, compiled.
    """
    if find_sglang() is None:
        raise ImportError(
            f"this needs SGLang {TESTED_VERSION}'s source: `make test-sglang` sets up an environment with it, "
            "`python tools/setup_sglang.py` puts it into the virtual environment that runs it"
        )
    import torch

    if not torch.cuda.is_available():
        if os.environ.setdefault("TRITON_INTERPRET", "1") != "1" or _compiled_triton():
            raise ImportError("without a GPU, set TRITON_INTERPRET=1 before Triton is imported")
        _stand_in_for_torchvision()
    with warnings.catch_warnings():  # SGLang's and its packages' own
        warnings.simplefilter("ignore")
        try:
            modules = {name: importlib.import_module(path) for name, path in _MODULES.items()}
        except ModuleNotFoundError as error:
            raise ImportError(f"SGLang's indexer does not import here: {error} (see tools/setup_sglang.py)") from error
    from importlib.metadata import version

    return SGLang(version("sglang"), **modules)


def _compiled_triton() -> bool:
    knobs = getattr(sys.modules.get("triton"), "knobs", None)
    return knobs is not None and not knobs.runtime.interpret


class _Placeholder(types.ModuleType):
    """A module whose every attribute is an empty class."""

    __path__: Any = ()

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _stand_in_for_torchvision() -> None:
    if "torchvision" in sys.modules or importlib.util.find_spec("torchvision") is not None:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers.utils import is_torchvision_available
    is_torchvision_available()  # it remembers that there is none
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional"):
        sys.modules[name] = _Placeholder(name)
