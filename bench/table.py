"""One measured figure, what it is held against, and the table of them all."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen


@frozen
class Figure:
    """``value`` in ``unit`` against ``target``: at least that, or at most that; no target: to know.

    ``detail`` says what went into it.
    """

    name: str
    value: float
    unit: str = ""
    target: float | None = None
    at_least: bool = True
    detail: str = ""

    @property
    def holds(self) -> bool:
        """Whether the target is met."""
        if self.target is None:
            return True
        return self.value >= self.target if self.at_least else self.value <= self.target

    @property
    def row(self) -> tuple[str, str, str, str, str]:
        """The cells of its row."""
        if self.target is None:
            wanted, verdict = "", ""
        else:
            wanted = f"{'≥' if self.at_least else '≤'} {self.target:g}{self.unit}"
            verdict = "ok" if self.holds else "MISSED"
        return self.name, f"{self.value:.2f}{self.unit}", wanted, verdict, self.detail


def render(figures: Iterable[Figure]) -> str:
    """The table."""
    rows = [("what", "measured", "wanted", "", "from"), *(figure.row for figure in figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
