"""Builds stand-ins for the ROCm libraries that XLA's ROCm plugin links, so that it loads on a host without ROCm.

    python tools/rocm_stubs.py PLUGIN.so FOLDER

Compiling for a GPU needs none of those libraries, loading the plugin does. Every symbol of a stand-in returns an error
code. For tests that compile without a device: put FOLDER on ``LD_LIBRARY_PATH`` of that process alone, never ship it.
Needs gcc and binutils.
"""

import collections
import re
import subprocess
import sys
from pathlib import Path

SYSTEM = ("libc.", "libm.", "librt.", "libdl.", "libpthread.", "libstdc++.", "libgcc_s.", "ld-linux")
ERROR = 100  # hipErrorNoDevice, and no library's success


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def needed_symbols(plugin: str) -> dict[str, dict[str, set[str]]]:
    """``{library: {symbol version or "": names}}`` of the plugin's ROCm libraries.

    Symbols without a version name no library; the loader searches all of them, so the first one gets these.
    """
    libraries = re.findall(r"\(NEEDED\).*\[(.*?)\]", output("readelf", "-dW", plugin))
    rocm = [name for name in libraries if not name.startswith(SYSTEM)]
    library_of, current = {}, ""
    for line in output("readelf", "-VW", plugin).splitlines():
        if found := re.search(r"File: (\S+)", line):
            current = found[1]
        elif found := re.search(r"Name: (\S+)\s+Flags", line):
            library_of[found[1]] = current
    symbols: dict[str, dict[str, set[str]]] = {name: collections.defaultdict(set) for name in rocm}
    for line in output("nm", "-D", "--undefined-only", plugin).splitlines():
        kind, symbol = line.split()[-2:]
        name, _, version = symbol.partition("@")
        version = version.lstrip("@")
        library = library_of.get(version, rocm[0] if not version else "")
        if kind == "U" and library in symbols:
            symbols[library][version].add(name)
    return symbols


def build(library: str, versions: dict[str, set[str]], folder: Path) -> None:
    """Compiles one stand-in."""
    source, script = folder / f"{library}.c", folder / f"{library}.map"
    names = sorted(set().union(*versions.values()))
    source.write_text("".join(f"int {name}(void) {{ return {ERROR}; }}\n" for name in names) or "int nothing;\n")
    script.write_text("".join(f"{v} {{ global: {'; '.join(sorted(n))}; }};\n" for v, n in versions.items() if v))
    command = ["gcc", "-shared", "-fPIC", "-w", "-o", str(folder / library), str(source), f"-Wl,-soname,{library}"]
    if script.stat().st_size:
        command.append(f"-Wl,--version-script={script}")
    subprocess.run(command, check=True)


def main() -> None:
    plugin, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for library, versions in needed_symbols(plugin).items():
        build(library, versions, folder)
        print(f"{library}: {sum(map(len, versions.values()))} symbols")


if __name__ == "__main__":
    main()
