"""The implementations of the score, by name, and where each can run."""

import dataclasses
import importlib
from types import ModuleType

from jax.extend import backend


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute ``index_logits`` and ``candidate_logits``.

    Attributes:
      module: where the two functions are.
      platforms: platforms it lowers for; None for all.
      interprets: whether ``interpret=True`` runs it on any host.
    """

    module: str
    platforms: tuple[str, ...] | None = None
    interprets: bool = False

    def load(self) -> ModuleType:
        return importlib.import_module(self.module)

    def why_not(self, platform: str) -> str | None:
        """Why it cannot run on ``platform``; None if it can."""
        if self.platforms is None or platform in self.platforms:
            return None
        hint = "; interpret=True runs it on any host" if self.interprets else ""
        return f"compiles for {' and '.join(self.platforms)} only{hint}"


def device_platform() -> str:
    """Platform of the default device, by the name that code is lowered for: "cpu", "cuda", "rocm", "tpu"."""
    client = backend.get_backend()
    if client.platform != "gpu":
        return client.platform
    return "rocm" if "rocm" in client.platform_version.lower() else "cuda"


IMPLEMENTATIONS = {
    "xla": Implementation("k2i_jax.kernels.xla"),
    "pallas": Implementation("k2i_jax.kernels.pallas_score", platforms=("cuda", "rocm"), interprets=True),
}
