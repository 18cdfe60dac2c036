"""Tensors of a safetensors checkpoint by name, float8 included, each read when it is asked for."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

_DTYPES = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "U8": np.uint8,
    "I8": np.int8,
}
_INDEX = "model.safetensors.index.json"


class Checkpoint(Mapping[str, np.ndarray]):
    """A ``.safetensors`` file, or a folder of them with or without ``model.safetensors.index.json``.

    The format: eight bytes with the header's length, the header (JSON: dtype, shape and byte range by name), the bytes.

    Raises:
      ValueError: no such file or folder, one that is no safetensors file or cut off, an index that names other files.
    """

    def __init__(self, path: str | Path):
        path = Path(path)
        if (path / _INDEX).is_file():
            self._files = _read_index(path)
            return
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files or not files[0].is_file():
            raise ValueError(f"checkpoint: {path} is neither a .safetensors file nor a folder that holds one")
        self._files = {name: file for file in files for name in _header(file)[0]}

    def __getitem__(self, name: str) -> np.ndarray:
        file = self._files[name]
        header, start = _header(file)
        if name not in header:
            raise ValueError(f"checkpoint: {file} lacks {name}, which the index says it holds")
        entry = header[name]
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"checkpoint: {name} has dtype {entry['dtype']}, expected one of {sorted(_DTYPES)}")
        first, last = entry["data_offsets"]
        if start + last > file.stat().st_size:
            raise ValueError(f"checkpoint: {file} is cut off before the end of {name}")
        bytes_ = np.memmap(file, np.uint8, mode="r", offset=start + first, shape=(last - first,))
        return np.array(bytes_).view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _read_index(folder: Path) -> dict[str, Path]:
    try:
        files = {name: folder / file for name, file in json.loads((folder / _INDEX).read_text())["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"checkpoint: {folder / _INDEX} is no index: expected JSON with a weight_map") from None
    missing = sorted({str(file) for file in files.values() if not file.is_file()})
    if missing:
        raise ValueError(f"checkpoint: {folder / _INDEX} names files that are not there: {', '.join(missing)}")
    return files


def _header(file: Path) -> tuple[dict, int]:
    """Entries by name, and where the bytes start."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 0 < length <= size - 8:
            raise ValueError(f"checkpoint: {file} is no safetensors file (its header would have {length} bytes)")
        try:
            header = json.loads(stream.read(length))
        except ValueError as error:
            raise ValueError(f"checkpoint: {file} is no safetensors file ({error})") from None
    if not isinstance(header, dict):
        raise ValueError(f"checkpoint: {file} is no safetensors file (its header is no JSON object)")
    header.pop("__metadata__", None)
    return header, 8 + length
