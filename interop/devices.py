"""Which device a DLPack producer's memory is on, in JAX's words, and what can go wrong when two libraries share one."""

import functools
import os
import sys
import warnings
from pathlib import Path

import jax

PLATFORMS = {1: "cpu", 2: "cuda", 10: "rocm"}  # DLPack device types; 3 and 11 are pinned host memory


def torch():
    """The torch module.

    Raises:
      ImportError: it is not installed.
    """
    try:
        import torch
    except ModuleNotFoundError:
        raise ImportError("this needs torch: pip install 'k2i_jax[torch]', or the build for your GPU") from None
    return torch


def jax_device(device: tuple[int, int]) -> jax.Device | None:
    """The JAX device of a DLPack (type, id) pair; None if this process's JAX has none."""
    platform = PLATFORMS.get(int(device[0]))
    if platform is None:
        return None
    try:
        devices = jax.local_devices(backend=platform)
    except RuntimeError:
        return None
    if platform == "cpu":
        return devices[0]
    return next((d for d in devices if d.local_hardware_id == device[1]), None)


def hip_runtimes(maps: str | None = None) -> list[str]:
    """Files of the HIP runtimes that this process has loaded, from the text of ``/proc/self/maps``."""
    if maps is None:
        path = Path("/proc/self/maps")
        maps = path.read_text() if path.exists() else ""
    files = (line.split(maxsplit=5)[5] for line in maps.splitlines() if "libamdhip64" in line)
    return sorted({os.path.realpath(file.removesuffix(" (deleted)")) for file in files})


def check_hip_runtimes() -> None:
    """Raises if torch and JAX brought a HIP runtime each: a pointer of one means nothing to the other.

    Raises:
      RuntimeError: with the files.
    """
    found = hip_runtimes()
    if len(found) > 1:
        raise RuntimeError(
            f"two HIP runtimes are loaded ({' and '.join(found)}), so torch's device pointers and streams mean nothing "
            "to JAX; install torch and the jax ROCm plugin for the same ROCm, or put one ROCm first on LD_LIBRARY_PATH"
        )


def would_preallocate() -> bool:
    """Whether JAX takes most of a GPU's memory at its first use of it (its default)."""
    off = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "true").lower() in ("false", "0")
    platform = os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() in ("platform", "cuda_async")
    return not (off or platform or "XLA_PYTHON_CLIENT_MEM_FRACTION" in os.environ)


@functools.cache  # once a process
def warn_if_preallocating() -> None:
    """Warns, once, that JAX preallocates the GPU that torch uses."""
    if would_preallocate():
        warnings.warn(
            "JAX takes 75 % of the GPU's memory at its first use of it, which torch then lacks: set "
            "XLA_PYTHON_CLIENT_PREALLOCATE=false (or XLA_PYTHON_CLIENT_MEM_FRACTION) before JAX touches the GPU",
            stacklevel=3,
        )


def warn_on_import() -> None:
    """The same warning while it may still help: torch already holds a GPU and JAX may want one."""
    loaded = sys.modules.get("torch")
    wants_gpu = (getattr(jax.config, "jax_platforms", None) or "gpu") != "cpu"
    if loaded is not None and wants_gpu and loaded.cuda.is_available() and loaded.cuda.is_initialized():
        warn_if_preallocating()
