"""The command line: ``k2i-jax``, or ``python -m k2i_jax``."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from k2i_jax import __version__
from k2i_jax.implementations import IMPLEMENTATIONS, NoBackend, device_platform
from k2i_jax.layout import PageLayout

if TYPE_CHECKING:
    from k2i_jax.tag import LayoutTag


def _console():
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        raise SystemExit("k2i-jax: this command prints tables with rich: pip install 'k2i_jax[cli]'") from None
    # A file or a pipe gets full-width lines, whatever terminal there is.
    return Console(width=None if sys.stdout.isatty() else 150, highlight=False)


def _target(path: str | None) -> Path | None:
    """A file to write when the work is done; raises ValueError now if it could not be written then."""
    if path is None:
        return None
    target = Path(path)
    if target.is_dir() or not target.parent.is_dir():
        raise ValueError(f"{path}: expected a file name in a folder that is there")
    return target


def _demo(args) -> int:
    console = _console()
    device_platform()  # first: raises in one line where JAX has no backend
    from k2i_jax import demo

    options = {"implementation": args.implementation, "interpret": args.interpret}
    run = demo.run_sglang if args.sglang else demo.run
    return 0 if run(args.case, options, console) else 1


def _show_config(args) -> int:
    from k2i_jax import show_config

    facts = show_config.collect()
    if args.json:
        print(json.dumps(facts, indent=1))
    else:
        show_config.show(facts, _console())
    return 0


def _selftest(args) -> int:
    console = _console()
    from rich.table import Table

    from k2i_jax import selftest

    def on_check(name, check):
        mark = "[green]✓[/]" if check.holds else "[bold red]✗[/]"
        console.print(f"{mark} {name:7} {check.layout:7} {check.name}: {check.value}")

    target = _target(args.report)
    report = selftest.run(args.implementation, on_check)
    table = Table("implementation", "status", "checks", "median wall time, ms", "why")
    for name, result in report["results"].items():
        good = sum(check["holds"] for check in result["checks"])
        times = "\n".join(f"{shape}: {ms}" for shape, ms in result["milliseconds"].items())
        table.add_row(name, result["status"], f"{good} of {len(result['checks'])} hold", times, result["why"])
    console.print(table)
    if target:
        selftest.write(report, target)
        console.print(f"report written to {target}")
    return 0 if selftest.passed(report) else 1


def _compile(args) -> int:
    console = _console()
    from rich import box
    from rich.table import Table

    from k2i_jax.kernels import compile as offline

    folder = Path(args.asm) if args.asm else None
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    reports = offline.report(args.target, heads=args.heads)
    classes = list(dict.fromkeys(name for r in reports for name in r.instructions))
    table = Table("kernel", "regs", "spills", "LDS", "loads", "B/key", "instr", *classes, box=box.SIMPLE_HEAD)
    table.columns[0].no_wrap = True
    for r in reports:
        loads = " ".join(f"{count:g}x{width}B" for width, count in sorted(r.loads.items(), reverse=True))
        numbers = (f"{r.instructions.get(name, 0):g}" for name in classes)
        name = r.name.replace("-" + r.config.body, "").replace(f"-heads{r.heads}", "")
        table.add_row(
            name, str(r.vgprs), str(r.spills), str(r.lds_bytes), loads, f"{r.bytes_per_key:g}", f"{r.total:g}", *numbers
        )
    keys = 64 if reports[0].config.body == "dot_scaled" else 16
    console.print(
        f"{args.target}, {args.heads} heads, body {reports[0].config.body}, compiled by triton {reports[0].triton}: "
        f"loads and instructions of one warp's steady loop per {keys} keys. Compiled, not run."
    )
    console.print("matrix instructions:", ", ".join(sorted({name for r in reports for name in r.matrix})))
    console.print(table)
    if folder:
        for r in reports:
            (folder / f"{args.target}-{r.name}.s").write_text(r.asm)
        console.print(f"{len(reports)} listings written to {folder}")
    return 0


def _tag(args) -> int:
    from k2i_jax.fp4 import FP4Recipe
    from k2i_jax.tag import LayoutTag

    if not args.compare:
        if not args.layout:
            raise ValueError("tag: give --layout to write a tag, or --compare A.json B.json")
        recipe = FP4Recipe[args.recipe.upper()].label if args.recipe else None
        print(LayoutTag.of(PageLayout(args.layout), recipe, args.ratio).to_json())
        return 0
    here, there = map(_read_tag, args.compare)
    print("\n".join(here.explain(there)) or "equal: raw pages may move between these peers")
    try:
        here.check(there)
    except ValueError:
        return 1
    return 0


def _read_tag(path: str) -> "LayoutTag":
    from k2i_jax.tag import LayoutTag

    try:
        return LayoutTag.from_json(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _crosscheck(args) -> int:
    console = _console()
    device_platform()
    from k2i_jax.interop import replay

    options = {"tolerance": args.tolerance, "implementation": args.implementation}
    return 0 if replay.crosscheck_files(args.files, console, json_path=_target(args.json), **options) else 1


def _watch(args) -> int:
    console = _console()
    device_platform()
    from k2i_jax.interop import replay

    options = {"tolerance": args.tolerance, "implementation": args.implementation}
    return 0 if replay.watch(args.folder, console, count=args.count, timeout=args.timeout, **options) else 1


def _sglang_check(args) -> int:
    from k2i_jax.interop import sglang_check

    return 0 if sglang_check.run(args.source) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="k2i-jax", description="DeepSeek-V4.1's index lookup (K2i) in JAX.")
    parser.add_argument("--version", action="version", version=f"k2i_jax {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    demo = commands.add_parser("demo", help="score a case written by SGLang, in both layouts, and compare")
    demo.add_argument("--case", metavar="FILE.npz", help="a case file (default: the one that ships with the package)")
    demo.add_argument("--implementation", choices=sorted(IMPLEMENTATIONS), help="default: the best for the device")
    demo.add_argument("--interpret", action="store_true", help="run the Pallas kernels interpreted, on any host")
    demo.add_argument(
        "--sglang", action="store_true", help="run SGLang's own decode body, with this scorer in aiter's place"
    )
    demo.set_defaults(run=_demo)

    config = commands.add_parser("show-config", help="versions, devices, implementations that can run here")
    config.add_argument("--json", action="store_true", help="as JSON")
    config.set_defaults(run=_show_config)

    selftest = commands.add_parser("selftest", help="run the parity checks on this machine's device")
    selftest.add_argument("--report", metavar="FILE.json", help="write what was measured")
    selftest.add_argument(
        "--implementation",
        action="append",
        choices=sorted(IMPLEMENTATIONS),
        help="only these (may be repeated)",
    )
    selftest.set_defaults(run=_selftest)

    compiler = commands.add_parser("compile", help="compile the Pallas kernels for a GPU that need not be here")
    compiler.add_argument("--target", choices=["gfx950", "gfx942", "sm_90"], required=True)
    compiler.add_argument("--heads", type=int, default=32, help="index heads (default: 32)")
    compiler.add_argument("--asm", metavar="DIR", help="keep the assembly there")
    compiler.set_defaults(run=_compile)

    tag = commands.add_parser("tag", help="what two peers must share before raw pages move: write one, compare two")
    tag.add_argument("--layout", choices=[str(layout) for layout in PageLayout], help="print this layout's tag as JSON")
    tag.add_argument("--recipe", choices=["deepseek", "sglang", "sglang_v4_c4"], help="the quantiser, if known")
    tag.add_argument("--ratio", type=int, help="positions a key, if known")
    tag.add_argument("--compare", nargs=2, metavar=("A.json", "B.json"), help="explain the differences in words")
    tag.set_defaults(run=_tag)

    check = commands.add_parser("crosscheck", help="replay bundles of the capture plugin and compare")
    check.add_argument("files", nargs="+", metavar="FILE", help="step*.safetensors")
    check.add_argument("--json", metavar="OUT.json", help="write the reports")
    watch = commands.add_parser("watch", help="replay bundles as they arrive in a folder")
    watch.add_argument("folder", metavar="DIR")
    watch.add_argument("--count", type=int, help="stop after so many bundles")
    watch.add_argument("--timeout", type=float, metavar="S", help="stop when none came for so long")
    for command, run in ((check, _crosscheck), (watch, _watch)):
        command.add_argument("--tolerance", type=float, default=1e-5, help="bound on a row's error (default: 1e-5)")
        command.add_argument("--implementation", choices=sorted(IMPLEMENTATIONS), help="how this side scores")
        command.set_defaults(run=run)

    sglang = commands.add_parser("sglang", help="look at the installed SGLang")
    actions = sglang.add_subparsers(required=True, metavar="action")
    names = actions.add_parser("check", help="is every name of SGLang's that is relied on still there?")
    names.add_argument("--source", metavar="DIR", help="SGLang's package folder (default: the installed one)")
    names.set_defaults(run=_sglang_check)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; 0 if all held, 1 if a check did not, 2 for bad input (one line on stderr)."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, OSError, ImportError, NoBackend) as error:
        print(f"k2i-jax: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
