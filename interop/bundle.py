"""Reads what the capture plugin wrote; ``k2i_jax.interop.replay`` computes it again."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = "k2i_jax capture 1"
# What a replay reads of the facts; the plugin notes more.
_FACTS = ("ranks", "sglang", "step", "mode", "requests", "requests kept", "keys", "layers")
_LAYER_FACTS = (
    "layer",
    "ratio",
    "page8",
    "source",
    "reindex",
    "rows",
    "index_topk",
    "topk_blocks",
    "candidates",
    "skips",
)
_CALL_FACTS = ("rows", "sampled", "sequences", "keys", "candidates", "weight_scale")


@dataclasses.dataclass(frozen=True)
class Bundle:
    """One recorded step of one rank.

    Attributes:
      path: the file.
      facts: what the plugin noted: ranks, pid, step, SGLang's version, mode, layers and their calls, key sources.
      arrays: the tensors, by the names that the plugin gave them.
    """

    path: Path
    facts: dict[str, Any]
    arrays: dict[str, np.ndarray]


def read(path: str | Path) -> Bundle:
    """Reads a bundle whole.

    Raises:
      ValueError: no such file, a torn one, or one that the plugin did not write; one line says which.
      ImportError: safetensors is not installed.
    """
    try:
        import safetensors
    except ModuleNotFoundError:
        raise ImportError("bundles are safetensors files: pip install 'k2i_jax[capture]'") from None
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    try:
        with safetensors.safe_open(path, framework="flax") as file:
            metadata = file.metadata() or {}
            if not metadata.get("format", "").startswith("k2i_jax capture"):
                raise ValueError(f"{path}: a safetensors file, but no bundle of k2i_jax's capture plugin")
            if metadata["format"] != FORMAT:
                raise ValueError(f"{path}: written as {metadata['format']!r}, this version reads {FORMAT!r}")
            facts = _read_facts(path, metadata.get("facts", ""))
            arrays = {name: np.asarray(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path}: torn, or no safetensors file ({error})") from None
    bundle = Bundle(path, facts, arrays)
    missing = [name for name in _names(facts) if name not in arrays]
    if missing:
        raise ValueError(f"{path}: incomplete, it lacks {', '.join(missing)}")
    return bundle


def _read_facts(path: Path, text: str) -> dict[str, Any]:
    try:
        facts = json.loads(text)
        calls = [call for layer in facts["layers"] for call in layer["calls"]]
        entries = [(facts, _FACTS), *((x, _LAYER_FACTS) for x in facts["layers"]), *((x, _CALL_FACTS) for x in calls)]
        missing = [name for entry, names in entries for name in names if name not in entry]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path}: its facts are not those of k2i_jax's capture plugin: {text[:80]!r}") from None
    if missing:
        raise ValueError(f"{path}: its facts lack {', '.join(dict.fromkeys(missing))}")
    return facts


def _names(facts) -> Iterator[str]:
    for index in range(len(facts["keys"])):
        yield from (f"keys{index}.{part}" for part in ("pages", "payload", "scale"))
    for layer in facts["layers"]:
        name = f"layer{layer['layer']}"
        yield f"{name}.slots"
        for index, call in enumerate(layer["calls"]):
            yield from (f"{name}.{part}" for part in ("q_fp4", "q_scale", "weights"))
            yield from (f"{name}.call{index}.{part}" for part in ("tables", "row_ends", "logits"))
            if call["candidates"]:
                yield f"{name}.call{index}.ids"
        yield from (f"{name}.candidates{index}" for index in range(len(layer["candidates"])))
