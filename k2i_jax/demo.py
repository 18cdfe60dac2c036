"""``k2i-jax demo``: score a case that SGLang wrote, in both layouts, and hold the results against SGLang's."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from k2i_jax.candidates import candidate_table
from k2i_jax.case import Case, load_case
from k2i_jax.layout import KEY_BYTES, PageLayout
from k2i_jax.parity import check_case, measure_ms
from k2i_jax.plane import IndexKPlane
from k2i_jax.score import candidate_logits, index_logits
from k2i_jax.select import reindex, select_candidate_blocks, select_topk

_BARS = "▁▂▃▄▅▆▇█"


def run(path: str | None, options: dict[str, Any], console: Console) -> bool:
    """Prints the report; True if every check holds.

    Raises:
      ValueError: the case file cannot be read.
    """
    case = load_case(path)
    rows, heads, _ = case.queries.payload.shape
    device = jax.devices()[0]
    console.print(
        f"[bold]k2i_jax demo[/] · case [bold]{case.name}[/], written by SGLang's own code: {rows} query rows x {heads} "
        f"heads, {case.table.pages.shape[0]} sequences, {next(iter(case.planes.values())).num_pages} pages of 64 keys "
        f"({KEY_BYTES} B a key) · on {device.platform} ({device.device_kind})"
    )
    checks = list(check_case(case, options))
    table = Table("check", *case.planes, title="The same keys, two byte layouts", title_justify="left")
    for name in dict.fromkeys(check.name for check in checks):
        cells = {check.layout: check for check in checks if check.name == name}
        both = cells.get("both")
        table.add_row(name, *(_cell(cells.get(layout, both)) for layout in case.planes))
    console.print(table, _timings(case, options), _strip(case, options, console.width), sep="\n")
    holds = all(check.holds for check in checks)
    verdict = "[bold green]all checks hold[/]" if holds else "[bold red]some checks do not hold[/]"
    console.print(verdict)
    return holds


def run_sglang(path: str | None, options: dict[str, Any], console: Console) -> bool:
    """SGLang's own decode body, SOURCE then REINDEX, on a case in both layouts; True if it selects what it recorded.

    Raises:
      ImportError: SGLang's source is not here.
      ValueError: the case file cannot be read.
    """
    from k2i_jax.interop.sglang_body import Backend, run_decode
    from k2i_jax.interop.sglang_host import import_sglang

    case = load_case(path)
    sglang = import_sglang()
    console.print(
        f"[bold]k2i_jax demo[/] · SGLang {sglang.version}'s own low_ratio_index_topk_hip_decode, SOURCE then REINDEX, "
        f"on case [bold]{case.name}[/]; k2i_jax scores in aiter's place "
        "(without a GPU SGLang's Triton kernels run interpreted: a minute)"
    )
    columns = {}
    for layout in case.planes:
        outcome = run_decode(Backend(sglang, case.arrays, layout), **options)
        found = {
            "candidate_ids": outcome.candidate_ids,
            "topk_positions": outcome.positions,
            "topk_slots": outcome.slots,
        }
        same = {name: _sets(ids) == _sets(case.arrays[name]) for name, ids in found.items()}
        columns[layout] = {
            "candidate blocks of the SOURCE": same["candidate_ids"],
            "positions that the REINDEX selected": same["topk_positions"],
            "slots that the REINDEX selected": same["topk_slots"],
        }
        first, second = outcome.calls
        console.print(
            f"{layout}: SGLang asked for page8={first['page8']}, pages_per_block {first['pages_per_block']} then "
            f"{second['pages_per_block']}, tables {list(first['tables'])} then {list(second['tables'])}"
        )
    table = Table("as recorded", *columns, title="SGLang's body with this scorer", title_justify="left")
    for name in next(iter(columns.values())):
        table.add_row(name, *(_word(column[name]) for column in columns.values()))
    holds = all(all(column.values()) for column in columns.values())
    console.print(table)
    console.print("[bold green]all checks hold[/]" if holds else "[bold red]some checks do not hold[/]")
    return holds


def _sets(ids) -> list[list[int]]:
    return [sorted(row[row >= 0].tolist()) for row in np.asarray(ids)]


def _word(holds: bool) -> Text:
    return Text("✓ equal" if holds else "✗ differ", style="green" if holds else "bold red")


def _cell(check) -> Text:
    return Text(("✓ " if check.holds else "✗ ") + check.value, style="green" if check.holds else "bold red")


def _timings(case: Case, options: dict[str, Any]) -> Table:
    table = Table("median wall time, ms", *case.planes, title="Times on this machine", title_justify="left")
    args = case.queries, case.weights
    logits = index_logits(*args, case.planes[PageLayout.PAGE64], case.table, **options)
    ends = case.table.live_ends()
    blocks = select_candidate_blocks(logits, ends, topk_blocks=case.topk_blocks)
    candidates = candidate_table(blocks, case.table)
    steps: dict[str, Callable[[IndexKPlane], Any]] = {
        "FULL logits": lambda plane: index_logits(*args, plane, case.table, **options),
        "candidate blocks from them": lambda _: select_candidate_blocks(logits, ends, topk_blocks=case.topk_blocks),
        f"top {case.k} of them": lambda _: select_topk(logits, case.table, k=case.k),
        "candidate logits": lambda plane: candidate_logits(*args, plane, candidates, **options),
        "REINDEX, whole": lambda plane: reindex(*args, plane, case.table, blocks, k=case.k, **options),
    }
    for name, step in steps.items():
        table.add_row(name, *(f"{measure_ms(functools.partial(step, plane)):.2f}" for plane in case.planes.values()))
    return table


def _strip(case: Case, options: dict[str, Any], width: int) -> Text:
    """The longest row's blocks as bars of their best score; kept ones stand out."""
    row = int(np.argmax(case.arrays["lengths"]))
    logits = index_logits(case.queries, case.weights, case.planes[PageLayout.PAGE8], case.table, **options)
    blocks = select_candidate_blocks(logits, case.table.live_ends(), topk_blocks=case.topk_blocks)
    kept = set(np.asarray(blocks.ids)[row].tolist())
    count = -(-int(case.arrays["lengths"][row]) // 8)
    best = np.asarray(logits)[row, : count * 8].reshape(count, 8).max(axis=1)
    low, high = best.min(), best.max()
    levels = ((best - low) / max(high - low, 1e-30) * (len(_BARS) - 1)).round().astype(int)
    text = Text(f"Row {row}: best score of each block of 8 positions; the {len(kept - {-1})} kept are bright\n")
    for block, level in enumerate(levels):
        text.append(_BARS[level], style="bold cyan" if block in kept else "dim")
        if (block + 1) % max(width - 1, 1) == 0:
            text.append("\n")
    return text
