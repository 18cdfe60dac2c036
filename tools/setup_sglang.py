"""Puts SGLang 0.5.23's own source into this (virtual) environment, with just what its HIP indexer imports on a CPU.

SGLang's declared dependencies are CUDA builds of many GB that the indexer's modules never use, so the wheel is
unpacked, not installed: its folder joins ``sys.path`` through a ``.pth`` file, where ``import sglang`` and
``importlib.metadata`` find it. Its Triton kernels then run under Triton's interpreter (``TRITON_INTERPRET=1``).

usage: python tools/setup_sglang.py
"""

import re
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

VERSION = "0.5.23"
# Imported on the way to the indexer's modules; the version is SGLang's own requirement where it names one.
WITH_DEPENDENCIES = [
    "triton==3.9.0", "numpy", "orjson", "psutil", "pybase64", "requests", "packaging", "pillow", "starlette",
    "pydantic", "pyzmq", "tqdm", "ipython", "aiohttp", "apache-tvm-ffi", "msgspec", "transformers", "openai",
    "safetensors",
]  # fmt: skip
# Imported, but what they depend on is not (compressed-tensors alone would bring a CUDA build of torch).
ALONE = ["einops", "partial_json_parser", "dill", "sentencepiece", "compressed-tensors", "loguru", "gguf"]


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", *arguments], check=True)


def unpack(folder: Path) -> None:
    """Downloads the wheel and unpacks it; its compiled parts are for Python 3.12, its source is not."""
    with tempfile.TemporaryDirectory() as download:
        platform = ["--python-version", "3.12", "--only-binary=:all:", "--no-deps"]
        pip("download", *platform, "-d", download, f"sglang=={VERSION}")
        [wheel] = Path(download).glob("sglang-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)


def requirements(folder: Path) -> dict[str, str]:
    """SGLang's own requirements by normalised name, those of extras and other platforms left out."""
    text = (folder / f"sglang-{VERSION}.dist-info" / "METADATA").read_text()
    lines = [line for line in re.findall(r"^Requires-Dist: (.*)$", text, re.MULTILINE) if ";" not in line]
    return {_normal(re.match(r"[\w.-]+", line).group()): line for line in lines}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    if sys.prefix == sys.base_prefix:
        raise SystemExit("setup_sglang: run it with the python of a virtual environment")
    folder = Path(sys.prefix) / f"sglang-{VERSION}"
    if not folder.exists():
        unpack(folder)
    wanted = requirements(folder)
    pip("install", *(wanted.get(_normal(name), name) for name in WITH_DEPENDENCIES))
    pip("install", "--no-deps", *(wanted.get(_normal(name), name) for name in ALONE))
    (Path(sysconfig.get_path("purelib")) / "sglang_source.pth").write_text(f"{folder}\n")
    print(f"sglang {VERSION}: its source is at {folder}")


if __name__ == "__main__":
    main()
