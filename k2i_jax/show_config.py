"""``k2i-jax show-config``: versions, devices, and which implementations can run here, or why not."""

import os
import platform
from importlib import metadata
from typing import Any

import jax

from k2i_jax.implementations import IMPLEMENTATIONS, NoBackend, device_platform
from k2i_jax.interop.devices import hip_runtimes

#: Packages worth a line, with the extra that installs them (None: a runtime dependency).
PACKAGES = {
    "k2i_jax": None, "jax": None, "jaxlib": None, "numpy": None, "jaxtyping": None,
    "jax-rocm7-plugin": "rocm7", "jax-rocm7-pjrt": "rocm7", "jax-rocm10-plugin": "rocm10",
    "jax-rocm10-pjrt": "rocm10", "jax-cuda13-plugin": "cuda", "triton": "jax_triton", "jax-triton": "jax_triton",
    "torch": "torch", "flax": "flax", "rich": "cli", "matplotlib": "plot", "hypothesis": "test",
}  # fmt: skip
VARIABLES = ("JAX_PLATFORMS", "JAX_ENABLE_X64", "XLA_FLAGS", "XLA_PYTHON_CLIENT_PREALLOCATE", "HIP_VISIBLE_DEVICES",
             "CUDA_VISIBLE_DEVICES")  # fmt: skip


def collect() -> dict[str, Any]:
    """Everything the command prints, as plain data; a backend that does not start is one of the facts."""
    try:
        platform_name, no_backend = device_platform(), None
    except NoBackend as error:
        platform_name, no_backend = None, str(error)
    return {
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "packages": {name: _version(name) for name in PACKAGES},
        "variables": {name: os.environ.get(name) for name in VARIABLES},
        "hip_runtimes": hip_runtimes(),
        "platform": platform_name,
        "no_backend": no_backend,
        "devices": [
            {"platform": d.platform, "kind": d.device_kind, "id": d.id}
            for d in ([] if platform_name is None else jax.devices())
        ],
        "implementations": {
            name: no_backend or implementation.why_not(platform_name or "") or "runs here"
            for name, implementation in IMPLEMENTATIONS.items()
        },
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def show(facts: dict[str, Any], console) -> None:
    """Prints :func:`collect`'s facts as tables."""
    from rich.table import Table

    console.print(f"Python {facts['python']} on {facts['machine']}")
    table = Table("package", "version", "installed by")
    for name, version in facts["packages"].items():
        extra = PACKAGES[name]
        table.add_row(name, version or "-", rf"k2i_jax\[{extra}]" if extra else "k2i_jax")
    console.print(table)
    table = Table("device", "platform", "kind")
    for device in facts["devices"]:
        table.add_row(str(device["id"]), device["platform"], device["kind"])
    console.print(table)
    table = Table("implementation", f"on {facts['platform'] or 'no backend'}")
    for row in facts["implementations"].items():
        table.add_row(*row)
    console.print(table)
    for file in facts["hip_runtimes"]:
        console.print(f"HIP runtime loaded: {file}")
    for name, value in facts["variables"].items():
        if value is not None:
            console.print(f"{name}={value}")
