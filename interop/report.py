"""What a cross-check found: numbers, a verdict, and ways to look at them."""

import dataclasses
import json
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Cause:
    """A usual fault, tried out: what our score becomes with it, against theirs.

    Attributes:
      name: e.g. "key pages read as page64".
      error: largest relative error over the rows tried, had our side made the same fault.
      explains: whether that fault makes the difference go away.
    """

    name: str
    error: float
    explains: bool


@dataclasses.dataclass(frozen=True)
class Report:
    """The outcome of :func:`k2i_jax.interop.crosscheck.crosscheck`.

    Attributes:
      verdict: one line in words.
      ok: whether the two agree: scores within the tolerance, masks, and selections but for ties.
      rows, columns: rows compared, and columns below their ends.
      tolerance: bound on a row's error.
      same_bits: whether every compared score has the same bits.
      error: relative error per row, ``norm(theirs - ours) / norm(magnitude)``: max and median; and quantiles of
        ``abs(theirs - ours)`` over all columns.
      masks: columns that one side alone takes for visible, by kind.
      worst: the largest differences: row, column, position, slot (None without a table), ours, theirs.
      selection: agreement of the selections; None if none were given.
      causes: usual faults that were tried, best first; empty if all is well or the inputs are unknown.
      notes: what else was seen.
    """

    verdict: str
    ok: bool
    rows: int
    columns: int
    tolerance: float
    same_bits: bool
    error: dict[str, float]
    masks: dict[str, int]
    worst: list[dict[str, Any]]
    selection: dict[str, Any] | None
    causes: list[Cause]
    notes: list[str]
    differences: np.ndarray = dataclasses.field(repr=False, compare=False)  # f32[rows, columns], NaN past a row's end

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without the array of differences."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "differences"}
        return {**found, "causes": [dataclasses.asdict(cause) for cause in self.causes]}

    def to_json(self, **options: Any) -> str:
        """:meth:`to_dict` as JSON; numbers that JSON lacks are written as strings."""
        return json.dumps(_finite(self.to_dict()), **{"indent": 1, **options})

    def print(self, console: Any = None) -> None:
        """Prints tables to a rich console (extra ``cli``).

        Raises:
          ImportError: rich is not installed.
        """
        try:
            from rich.console import Console
            from rich.table import Table
        except ModuleNotFoundError:
            raise ImportError("printing tables needs rich: pip install 'k2i_jax[cli]' (or read .verdict)") from None

        console = console or Console(highlight=False)
        console.print(f"[{'green' if self.ok else 'bold red'}]{self.verdict}[/]")
        table = Table("what", "value", title=f"{self.rows} rows, {self.columns} scores below their ends", min_width=60)
        table.add_row("same bits", "yes" if self.same_bits else "no")
        for name, value in {**self.error, "tolerance of a row's error": self.tolerance, **self.masks}.items():
            table.add_row(name, f"{value:.2e}" if isinstance(value, float) else str(value))
        for name, value in (self.selection or {}).items():
            table.add_row(f"selection: {name}", str(value))
        console.print(table)
        if self.worst and not self.same_bits:
            table = Table(*self.worst[0], title="largest differences")
            for entry in self.worst:
                table.add_row(*(f"{v:.7g}" if isinstance(v, float) else str(v) for v in entry.values()))
            console.print(table)
        if self.causes:
            table = Table("usual fault, tried on our side", "error left", "explains it")
            for cause in self.causes:
                table.add_row(cause.name, f"{cause.error:.1e}", "[bold]yes[/]" if cause.explains else "no")
            console.print(table)
        for note in self.notes:
            console.print(f"note: {note}")

    def plot(self, path: Any) -> None:
        """Draws the error over positions, and over rows and 64-column pages, into an image file (extra ``plot``).

        Raises:
          ImportError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError:
            raise ImportError("plotting needs matplotlib: pip install 'k2i_jax[plot]'") from None
        rows, width = self.differences.shape
        size = np.nan_to_num(np.abs(self.differences.astype(np.float64)), nan=0.0, posinf=0.0)
        pages = np.pad(size, ((0, 0), (0, -width % 64))).reshape(rows, -1, 64).max(axis=2)
        figure = Figure(figsize=(10, 7), layout="constrained")
        top, bottom = figure.subplots(2, 1)
        top.semilogy(np.maximum(size.max(axis=0, initial=0), 1e-12), linewidth=0.8)
        top.set(xlabel="column", ylabel="largest |theirs - ours|", title=self.verdict)
        image = bottom.imshow(np.log10(np.maximum(pages, 1e-12)), aspect="auto", interpolation="nearest")
        bottom.set(xlabel="page (64 columns)", ylabel="row")
        figure.colorbar(image, ax=bottom, label="log10 of the largest |theirs - ours|")
        figure.savefig(path)


def _finite(x: Any) -> Any:
    if isinstance(x, dict):
        return {name: _finite(value) for name, value in x.items()}
    if isinstance(x, list):
        return [_finite(value) for value in x]
    return str(x) if isinstance(x, float) and not np.isfinite(x) else x
