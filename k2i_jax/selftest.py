"""``k2i-jax selftest``: the parity checks on whatever device is here, and a file that says what was measured where."""

import datetime
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from k2i_jax import reference, show_config
from k2i_jax.candidates import CandidateBlocks, candidate_table
from k2i_jax.case import load_case
from k2i_jax.implementations import IMPLEMENTATIONS, device_platform
from k2i_jax.parity import (
    BOUNDARY_LENGTHS,
    FLOAT64_BOUND,
    LAYOUTS,
    Check,
    bits_equal,
    candidates_match,
    check_case,
    measure_ms,
    random_problem,
)
from k2i_jax.plane_ops import repack
from k2i_jax.score import index_logits
from k2i_jax.select import select_candidate_blocks

REPEATS = 20
TIMED_ROWS, TIMED_KEYS, TIMED_HEADS = 8, 8192, 32


def run(implementations: list[str] | None, on_check) -> dict[str, Any]:
    """Runs every check of every implementation that this device can run.

    Args:
      implementations: names, or None for all; those that cannot run here are recorded with the reason.
      on_check: called with (implementation, Check) as results come in.

    Returns:
      The report: ``config``, ``date``, and ``results``, one per implementation: ``status`` ("measured",
      "interpreted" or "not measured"), ``why``, ``checks``, ``milliseconds``.
    """
    results = {}
    for name in implementations or list(IMPLEMENTATIONS):
        implementation = IMPLEMENTATIONS[name]
        why = implementation.why_not(device_platform())
        interpret = bool(why) and implementation.interprets
        if why and not interpret:
            results[name] = {"status": "not measured", "why": why, "checks": [], "milliseconds": {}}
            continue
        options = {"implementation": name, "interpret": interpret}
        result: dict[str, Any] = {
            "status": "interpreted" if interpret else "measured",
            "why": why or "",
            "checks": [],
            "milliseconds": {},
        }
        results[name] = result
        try:
            for check in _checks(options):
                on_check(name, check)
                result["checks"].append(check._asdict())
            if not interpret:
                result["milliseconds"] = _times(options)
        except Exception as error:  # a device may fail in any way; the report must still be written
            check = Check("ran to the end", "both", f"{type(error).__name__}: {error}", False)
            on_check(name, check)
            result["checks"].append(check._asdict())
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"date": date, "config": show_config.collect(), "results": results}


def _checks(options: dict[str, Any]):
    for check in check_case(load_case(), options):
        yield check._replace(name=f"SGLang's case: {check.name}")
    yield from _check_boundaries(options)


def _check_boundaries(options: dict[str, Any]):
    """Lengths around blocks, pages and tiles: permuted pages, garbage (NaN scales too) in every byte not live."""
    queries, weights, plane, table = random_problem(1, 32, BOUNDARY_LENGTHS)
    expected, magnitude = reference.index_logits(queries, weights, plane, table)
    logits = {}
    for layout in LAYOUTS:
        native = repack(plane, layout)
        ours = np.asarray(index_logits(queries, weights, native, table, **options))
        logits[layout] = ours
        error = float(reference.relative_error(ours, expected, magnitude).max())
        tails = bool(((ours == -np.inf) == (expected == -np.inf)).all())
        name = f"lengths {BOUNDARY_LENGTHS[0]} to {BOUNDARY_LENGTHS[-1]} among garbage: error against float64"
        yield Check(name, layout, f"{error:.1e}", error <= FLOAT64_BOUND and tails)
        runs = (index_logits(queries, weights, native, table, **options) for _ in range(REPEATS))
        same = all(bits_equal(ours, run) for run in runs)
        yield Check(f"{REPEATS} runs: same bits", layout, "equal" if same else "differ", same)
        chosen = select_candidate_blocks(ours, table.live_ends(), topk_blocks=16)
        want = reference.select_candidate_blocks(ours, table.live_ends(), topk_blocks=16)
        ids = [[int(i) for i in row if i >= 0] for row in np.asarray(chosen.ids)]
        yield Check("candidate blocks: the plain rule's", layout, "equal" if ids == want else "differ", ids == want)
        candidates = candidate_table(CandidateBlocks(chosen.ids, chosen.count), table)
        same = candidates_match(queries, weights, native, ours, candidates, options)
        yield Check("candidate logits: the bits of the FULL logits", layout, "equal" if same else "differ", same)
    same = bits_equal(*logits.values())
    yield Check("boundary lengths: same bits in both layouts", "both", "equal" if same else "differ", same)


def _times(options: dict[str, Any]) -> dict[str, float]:
    """Median wall time of a FULL step, per layout."""
    queries, weights, plane, table = random_problem(2, TIMED_HEADS, (TIMED_KEYS,) * TIMED_ROWS)
    shape = f"{TIMED_ROWS} rows x {TIMED_KEYS} keys x {TIMED_HEADS} heads"
    times = {}
    for layout in LAYOUTS:
        native = repack(plane, layout)
        run = lambda native=native: index_logits(queries, weights, native, table, **options)
        times[f"{layout}, {shape}"] = round(measure_ms(run), 3)
    return times


def passed(report: dict[str, Any]) -> bool:
    """Whether every check that ran holds."""
    return all(check["holds"] for result in report["results"].values() for check in result["checks"])


def write(report: dict[str, Any], target: Path) -> None:
    """Writes the report beside its final name, then renames it: a reader never sees half of one."""
    with tempfile.NamedTemporaryFile("w", dir=target.parent, suffix=".part", delete=False) as file:
        json.dump(report, file, indent=1)
    os.replace(file.name, target)
