"""Replays a bundle: the same scores and selections, computed here, held against what SGLang computed."""

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from k2i_jax.candidates import CandidateBlocks, CandidateTable
from k2i_jax.fp4 import FP4Array
from k2i_jax.interop.bundle import Bundle, read
from k2i_jax.interop.crosscheck import Report, crosscheck
from k2i_jax.layout import SUB_PAGE_SIZE, PageLayout, query_scale_from_aiter
from k2i_jax.page_table import PageTable
from k2i_jax.plane import IndexKPlane
from k2i_jax.score import candidate_logits, index_logits
from k2i_jax.select import reindex, select_candidate_blocks, select_topk


@dataclasses.dataclass(frozen=True)
class Finding:
    """One layer's scoring call (or, without a report, a layer that scored nothing), compared.

    Attributes:
      layer: layer id.
      what: role of the layer and what was compared.
      report: of the logits and the selection; None if nothing was scored.
      problems: other things that do not agree, a line each.
      skips: what SGLang left out, in its own terms.
    """

    layer: int
    what: str
    report: Report | None
    problems: list[str]
    skips: list[str]

    @property
    def ok(self) -> bool:
        return not self.problems and (self.report is None or self.report.ok)


def replay(bundle: Bundle, *, tolerance: float = 1e-5, **options: Any) -> list[Finding]:
    """Scores every recorded call again, for the rows whose logits were kept, and selects from our own scores.

    Args:
      bundle: what :func:`read` gave.
      tolerance: as in ``crosscheck``.
      **options: ``implementation``, ``interpret``.
    """
    findings = []
    for layer in bundle.facts["layers"]:
        role = "SOURCE" if layer["source"] else "REINDEX" if layer["reindex"] else "FULL"
        what = f"{role}, ratio {layer['ratio']}, {'page8' if layer['page8'] else 'page64'}"
        if not layer["calls"]:
            findings.append(Finding(layer["layer"], what, None, [], layer["skips"]))
        for index in range(len(layer["calls"])):
            report, problems = _Call(bundle, layer, index, options).compare(tolerance)
            findings.append(Finding(layer["layer"], what, report, problems, layer["skips"]))
    return findings


class _Call:
    """One scoring call, as far as its logits were kept."""

    def __init__(self, bundle: Bundle, layer: dict[str, Any], index: int, options: dict[str, Any]):
        arrays, name = bundle.arrays, f"layer{layer['layer']}"
        self.layer, self.facts, self.options = layer, layer["calls"][index], options
        self.arrays, self.name = arrays, name
        rows, self.sampled = self.facts["rows"], self.facts["sampled"]
        in_layer = [layer["rows"].index(row) for row in self.sampled]
        in_call = [rows.index(row) for row in self.sampled]
        q = jnp.asarray(arrays[f"{name}.q_fp4"][in_layer])
        scale = query_scale_from_aiter(jnp.asarray(arrays[f"{name}.q_scale"][in_layer]), q.shape[1])
        self.queries = FP4Array(q, scale)
        self.weights = jnp.asarray(arrays[f"{name}.weights"][in_layer])
        self.ends = arrays[f"{name}.call{index}.row_ends"][in_call].astype(np.int32)
        keys = f"keys{self.facts['keys']}"
        layout = PageLayout.PAGE8 if bundle.facts["keys"][self.facts["keys"]]["page8"] else PageLayout.PAGE64
        self.plane = IndexKPlane.from_arrays(arrays[f"{keys}.payload"], arrays[f"{keys}.scale"], layout)
        self.pages = arrays[f"{keys}.pages"]
        sequences = [self.facts["sequences"][i] for i in in_call]
        tables = arrays[f"{name}.call{index}.tables"][sequences]
        if self.facts["candidates"]:
            ids = arrays[f"{name}.call{index}.ids"][sequences]
            virtual = self._kept(tables // SUB_PAGE_SIZE) * SUB_PAGE_SIZE + tables % SUB_PAGE_SIZE
            self.table: PageTable | CandidateTable = CandidateTable(
                jnp.asarray(ids), jnp.asarray(virtual, jnp.int32), jnp.asarray(self.ends)
            )
            self.original: PageTable | CandidateTable = CandidateTable(
                jnp.asarray(ids), jnp.asarray(tables), jnp.asarray(self.ends)
            )
        else:
            self.table = PageTable.from_rows(self._kept(tables), self.ends)
            self.original = PageTable.from_rows(tables, self.ends)
        self.theirs = self._rectangle(arrays[f"{name}.call{index}.logits"])
        self.in_layer = in_layer

    def _kept(self, pages: np.ndarray) -> np.ndarray:
        """Page ids of the pool as rows of what was kept of it; -1 for pages that were not."""
        at = np.minimum(np.searchsorted(self.pages, pages), len(self.pages) - 1)
        return np.where(self.pages[at] == pages, at, -1).astype(np.int32)

    def _rectangle(self, ragged: np.ndarray) -> np.ndarray:
        """The kept logits, -inf past each row's end, as wide as our own."""
        ends = np.maximum(self.ends, 0)
        if ends.sum() != len(ragged):
            raise ValueError(f"{self.name}: {len(ragged)} logits for rows that end at {ends.tolist()}")
        out = np.full((len(ends), self.table.width), -np.inf, np.float32)
        out[np.arange(self.table.width) < ends[:, None]] = ragged
        return out

    def compare(self, tolerance: float) -> tuple[Report, list[str]]:
        args = (self.queries, self.weights, self.plane, self.table)
        scale = self.facts["weight_scale"]
        score: Callable[..., Any] = candidate_logits if self.facts["candidates"] else index_logits
        ours = score(*args, weight_scale=scale, **self.options)
        k = self.layer["index_topk"]
        theirs, problems = self._selected()
        blocks = self._blocks() if self.layer["reindex"] and not self.facts["candidates"] else None
        if blocks is not None:
            selection = reindex(*args[:3], self.table, blocks, k=k, weight_scale=scale, **self.options)  # type: ignore[arg-type]
        else:
            selection = select_topk(ours, self.table, k=k)
        report = crosscheck(
            ours, self.theirs, self.ends, queries=self.queries, weights=self.weights, plane=self.plane,
            table=self.table, weight_scale=scale, our_selection=selection, their_selection=theirs, tolerance=tolerance,
            **self.options,
        )  # fmt: skip
        return report, [*problems, *self._published(ours)]

    def _blocks(self) -> CandidateBlocks | None:
        """The candidates recorded for these rows; None where two-level was off."""
        found: dict[int, np.ndarray] = {}
        for index, rows in enumerate(self.layer["candidates"]):
            found.update(zip(rows, self.arrays[f"{self.name}.candidates{index}"], strict=True))
        if any(row not in found for row in self.sampled):
            return None
        return CandidateBlocks.from_ids(np.stack([found[row] for row in self.sampled]))

    def _selected(self) -> tuple[np.ndarray, list[str]]:
        """The positions that SGLang selected, and what is wrong with their slots.

        Without recorded positions (SGLang keeps them only where somebody asked) the slots say which they are.
        """
        slots = self.arrays[f"{self.name}.slots"][self.in_layer]
        recorded = self.arrays.get(f"{self.name}.positions")
        columns = jnp.broadcast_to(jnp.arange(self.original.width, dtype=jnp.int32), self.theirs.shape)
        candidates = isinstance(self.original, CandidateTable)
        places = np.asarray(self.original.positions(columns) if candidates else columns)  # type: ignore[union-attr]
        where = np.asarray(self.original.slots(columns))
        positions, problems = np.full_like(slots, -1), []
        for i, (row, end) in enumerate(zip(self.sampled, np.maximum(self.ends, 0).tolist(), strict=True)):
            position_of = dict(zip(where[i, :end].tolist(), places[i, :end].tolist(), strict=True))
            found = [-1 if slot < 0 else position_of.get(slot, -1) for slot in slots[i].tolist()]
            foreign = [slot for slot in slots[i].tolist() if slot >= 0 and slot not in position_of]
            if foreign:
                problems.append(f"slots of row {row}: {foreign[:4]} lie in none of the pages that it sees")
            elif recorded is not None and recorded[self.in_layer[i]].tolist() != found:
                problems.append(f"slots of row {row} are not where its positions lie")
            positions[i] = found
        return (positions if recorded is None else recorded[self.in_layer]), problems

    def _published(self, ours) -> list[str]:
        """Whether a SOURCE chose the blocks that our scores choose."""
        if not self.layer["source"] or (recorded := self._blocks()) is None:
            return []
        mine = select_candidate_blocks(ours, self.ends, topk_blocks=self.layer["topk_blocks"])
        lines = []
        for row, a, b in zip(
            self.sampled, np.asarray(mine.ids).tolist(), np.asarray(recorded.ids).tolist(), strict=True
        ):
            extra, missing = set(b) - set(a) - {-1}, set(a) - set(b) - {-1}
            if extra or missing:
                lines.append(f"candidate blocks of row {row}: {sorted(extra)} there, {sorted(missing)} here")
        return lines


def show(bundle: Bundle, findings: list[Finding], console: Any) -> bool:
    """Prints one bundle's findings; True if all hold."""
    facts = bundle.facts
    ranks = " ".join(f"{name}{rank}" for name, rank in facts["ranks"].items())
    kept = f"{len(facts['requests kept'])} of {facts['requests']} requests"
    console.print(
        f"[bold]{bundle.path.name}[/]: SGLang {facts['sglang']}, {ranks}, step {facts['step']}, {facts['mode']}, {kept}"
    )
    for finding in findings:
        skips = f" ({'; '.join(finding.skips)})" if finding.skips else ""
        verdict = "nothing scored" if finding.report is None else finding.report.verdict
        color, mark = ("green", "✓") if finding.ok else ("bold red", "✗")
        console.print(f"  [{color}]{mark} layer {finding.layer} {finding.what}: {verdict}[/]{skips}")
        for problem in finding.problems:
            console.print(f"    {problem}")
        if finding.report is not None and not finding.report.ok:
            finding.report.print(console)
    return all(finding.ok for finding in findings)


def to_dict(bundle: Bundle, findings: list[Finding]) -> dict[str, Any]:
    """Plain data for a JSON file."""
    return {
        "bundle": str(bundle.path),
        "sglang": bundle.facts["sglang"],
        "step": bundle.facts["step"],
        "ok": all(finding.ok for finding in findings),
        "findings": [
            {"layer": f.layer, "what": f.what, "ok": f.ok, "problems": f.problems, "skips": f.skips,
             "report": None if f.report is None else json.loads(f.report.to_json())}
            for f in findings
        ],
    }  # fmt: skip


def crosscheck_files(paths: list[str], console: Any, *, json_path: Path | None = None, **options: Any) -> bool:
    """``k2i-jax crosscheck FILE...``: replays bundles; True if all agree.

    Raises:
      ValueError: a file that is no whole bundle.
    """
    results = []
    for path in paths:
        bundle = read(path)
        findings = replay(bundle, **options)
        show(bundle, findings, console)
        results.append(to_dict(bundle, findings))
    if json_path:
        json_path.write_text(json.dumps(results, indent=1))
    return all(result["ok"] for result in results)


def _state(path: Path) -> str:
    try:
        return json.loads(path.read_text())["state"]
    except (ValueError, KeyError, TypeError):
        return "no status of the capture plugin"


def watch(folder: str, console: Any, *, count: int | None = None, timeout: float | None = None, **options: Any) -> bool:
    """``k2i-jax watch DIR``: replays bundles as they arrive, until ``count`` are done or none came for ``timeout`` s.

    Returns:
      Whether all agreed (and, with ``count``, came).

    Raises:
      ValueError: no such folder.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"{folder}: no such folder")
    seen: set[str] = set()
    states: dict[str, str] = {}
    good, last = True, time.monotonic()
    while count is None or len(seen) < count:
        for path in sorted(Path(folder).glob("status-*.json")):
            state = _state(path)
            if states.get(path.name) != state:
                states[path.name] = state
                console.print(f"{path.name}: {state}")
        fresh = [path for path in sorted(Path(folder).glob("step*.safetensors")) if path.name not in seen]
        for path in fresh[: None if count is None else count - len(seen)]:
            seen.add(path.name)
            last = time.monotonic()
            try:
                bundle = read(path)
                good &= show(bundle, replay(bundle, **options), console)
            except ValueError as error:
                console.print(f"[bold red]✗ {error}[/]")
                good = False
        if timeout is not None and time.monotonic() - last > timeout:
            console.print(f"no bundle for {timeout:g} s")
            return good and (count is None or len(seen) >= count)
        if not fresh:
            time.sleep(0.2)
    return good
