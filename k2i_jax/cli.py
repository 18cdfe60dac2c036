"""The command line: ``k2i-jax``, or ``python -m k2i_jax``."""

import argparse
import json
import sys
from collections.abc import Sequence

from k2i_jax import __version__
from k2i_jax.implementations import IMPLEMENTATIONS


def _console():
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        raise SystemExit("k2i-jax: this command prints tables with rich: pip install 'k2i_jax[cli]'") from None
    # A file or a pipe gets full-width lines, whatever terminal there is.
    return Console(width=None if sys.stdout.isatty() else 118, highlight=False)


def _demo(args) -> int:
    console = _console()
    from k2i_jax import demo

    options = {"implementation": args.implementation, "interpret": args.interpret}
    return 0 if demo.run(args.case, options, console) else 1


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

    report = selftest.run(args.implementation, on_check)
    table = Table("implementation", "status", "checks", "median wall time, ms", "why")
    for name, result in report["results"].items():
        good = sum(check["holds"] for check in result["checks"])
        times = "\n".join(f"{shape}: {ms}" for shape, ms in result["milliseconds"].items())
        table.add_row(name, result["status"], f"{good} of {len(result['checks'])} hold", times, result["why"])
    console.print(table)
    if args.report:
        selftest.write(report, args.report)
        console.print(f"report written to {args.report}")
    return 0 if selftest.passed(report) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="k2i-jax", description="DeepSeek-V4.1's index lookup (K2i) in JAX.")
    parser.add_argument("--version", action="version", version=f"k2i_jax {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    demo = commands.add_parser("demo", help="score a case written by SGLang, in both layouts, and compare")
    demo.add_argument("--case", metavar="FILE.npz", help="a case file (default: the one that ships with the package)")
    demo.add_argument("--implementation", choices=sorted(IMPLEMENTATIONS), help="default: the best for the device")
    demo.add_argument("--interpret", action="store_true", help="run the Pallas kernels interpreted, on any host")
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
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; 0 if all held, 1 if a check did not, 2 for bad input (one line on stderr)."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, OSError) as error:
        print(f"k2i-jax: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
