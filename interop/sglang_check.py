"""``k2i-jax sglang check``: is every name of SGLang's that is used here where it was? Reads source, imports nothing."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from k2i_jax.interop.sglang_host import find_sglang
from k2i_jax_capture import targets


def run(source: str | None = None) -> bool:
    """Prints what moved, a line each, and a summary; True if nothing did.

    Args:
      source: SGLang's package folder; None for the installed one.

    Raises:
      ValueError: there is no SGLang there.
    """
    folder = Path(source) if source else find_sglang()
    if folder is None or not (folder / "srt").is_dir():
        where = "installed here" if folder is None else f"at {folder} (expected the package's folder, with srt/ in it)"
        raise ValueError(f"no SGLang {where}; give its package folder with --source")
    moved = list(check(folder))
    for line in moved:
        print(line)
    version = find_version(folder)
    tested = "" if version == targets.TESTED_VERSION else f" (tested: {targets.TESTED_VERSION})"
    count = sum(1 for _ in _callables()) + len(targets.FIELDS) + len(targets.ENVIRONMENT)
    print(f"SGLang {version}{tested}: {f'{len(moved)} moved' if moved else f'all {count} names are there'}")
    return not moved


def _callables() -> Iterator[tuple[str, list[str]]]:
    for group in (targets.PARAMETERS, targets.POOL_METHODS, targets.FUNCTIONS):
        yield from group.items()


def check(folder: Path) -> Iterator[str]:
    """One line for each name that is not where it was expected."""
    for path, parameters in _callables():
        node, line = _find(folder, path)
        if node is None:
            yield line
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{path}: is no function any more"
        else:
            arguments = node.args
            names = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
            gone = [name for name in parameters if name not in names]
            if gone:
                yield f"{path}: has no parameter {', '.join(gone)} (it has {', '.join(sorted(names))})"
    for path, fields in targets.FIELDS.items():
        node, line = _find(folder, path)
        if node is None:
            yield line
            continue
        body = getattr(node, "body", [])
        names = {n.target.id for n in body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
        gone = [name for name in fields if name not in names]
        if gone:
            yield f"{path}: has no field {', '.join(gone)} (it has {', '.join(sorted(names))})"
    environment = folder / "srt" / "environ.py"
    text = environment.read_text() if environment.exists() else ""
    for name in targets.ENVIRONMENT:
        if not re.search(rf"^\s+{name}\s*=", text, re.MULTILINE):
            yield f"{name}: is no environment variable of sglang.srt.environ any more"


def _find(folder: Path, path: str) -> tuple[ast.AST | None, str]:
    """The definition of a dotted name, or None and what to say about it."""
    parts = path.split(".")[1:]  # less "sglang"
    for count in range(len(parts) - 1, 0, -1):
        base = folder.joinpath(*parts[:count])
        file = base.with_suffix(".py") if base.with_suffix(".py").exists() else base / "__init__.py"
        if file.exists():
            break
    else:
        return None, f"{path}: its module is gone"
    module = ".".join(["sglang", *parts[:count]])
    node: ast.AST = ast.parse(file.read_text())
    for depth, name in enumerate(parts[count:]):
        found = [n for n in getattr(node, "body", []) if getattr(n, "name", None) == name]
        if not found:
            inside = module if depth == 0 else ".".join([module, *parts[count : count + depth]])
            return None, f"{path}: {inside} has no {name}{_elsewhere(folder, name)}"
        node = found[-1]
    return node, ""


def _elsewhere(folder: Path, name: str) -> str:
    """Where a definition of that name is now, if there is one."""
    pattern = re.compile(rf"^\s*(?:def|class) {re.escape(name)}\b", re.MULTILINE)
    for file in sorted(folder.rglob("*.py")):
        if pattern.search(file.read_text(errors="ignore")):
            return f" (one is in {file.relative_to(folder)} now)"
    return ""


def find_version(folder: Path) -> str:
    """SGLang's version, from the metadata beside its folder."""
    for metadata in sorted(folder.parent.glob("sglang-*.dist-info/METADATA")):
        found = re.search(r"^Version: (.*)$", metadata.read_text(), re.MULTILINE)
        if found:
            return found.group(1)
    try:
        from importlib.metadata import version

        return version("sglang")
    except Exception:
        return "of an unknown version"
