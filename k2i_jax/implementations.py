"""The implementations, by name, and where each can run."""

import dataclasses
import importlib
import os
from types import ModuleType

from jax.extend import backend
from jax.extend.core import Primitive
from jax.interpreters import mlir


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


class NoBackend(RuntimeError):
    """JAX could not start the backend that it was told to use."""


def device_platform() -> str:
    """Platform of the default device, by the name that code is lowered for: "cpu", "cuda", "rocm", "tpu".

    Raises:
      NoBackend: JAX has none, with its reason.
    """
    try:
        client = backend.get_backend()
    except (RuntimeError, AssertionError) as error:  # an assertion: CUDA was asked for, and its plugin is not installed
        chosen = os.environ.get("JAX_PLATFORMS", "")
        reason = str(error).partition("\n")[0] or "its plugin is not installed"
        raise NoBackend(f"JAX has no backend (JAX_PLATFORMS={chosen!r}): {reason}") from None
    if client.platform != "gpu":
        return client.platform
    return "rocm" if "rocm" in client.platform_version.lower() else "cuda"


IMPLEMENTATIONS = {
    "xla": Implementation("k2i_jax.kernels.xla"),
    "pallas": Implementation("k2i_jax.kernels.pallas_score", platforms=("cuda", "rocm"), interprets=True),
}


def check_name(implementation: str | None, interpret: bool = False, *, argument: str = "implementation") -> str | None:
    """The implementation asked for, None where the platform decides; raises ValueError if there is no such thing."""
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(f"{argument}: expected None or one of {sorted(IMPLEMENTATIONS)}, got {implementation!r}")
    if interpret and implementation not in (None, "pallas"):
        raise ValueError(f"interpret: runs the Pallas kernels; {argument}={implementation!r} has no interpret mode")
    return "pallas" if interpret else implementation


_refuse_p = Primitive("k2i_refuse_platform")
_refuse_p.def_abstract_eval(lambda like, **_: like)


def refuse_platform(like):
    """The branch of platforms that the Pallas kernels do not lower for: tracing passes it, lowering raises."""
    return _refuse_p.bind(like)


def _refuse_lowering(ctx, *_):
    platforms = ctx.module_context.platforms
    raise NotImplementedError(
        f"implementation='pallas' was lowered for {' and '.join(platforms)}: it {IMPLEMENTATIONS['pallas'].why_not('')}"
    )


mlir.register_lowering(_refuse_p, _refuse_lowering)
