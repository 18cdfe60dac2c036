"""SGLang plugin that records what its ROCm index lookup computed, for ``k2i-jax crosscheck`` elsewhere.

Idle unless ``K2I_JAX_CAPTURE`` names a folder. This package stands apart from ``k2i_jax`` so that SGLang's processes
import no JAX.
"""

import os


def plugin() -> None:
    """Entry point in the group ``sglang.srt.plugins``: registers the hooks if ``K2I_JAX_CAPTURE`` is set."""
    folder = os.environ.get("K2I_JAX_CAPTURE")
    if folder:
        from k2i_jax_capture.hooks import install

        install(folder)
