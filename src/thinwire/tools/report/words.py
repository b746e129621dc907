"""Figures formatted for people, and texts from files made safe for plotly."""

from __future__ import annotations

import html

from thinwire.core.words import duration, rate

__all__ = ["bits", "duration", "factor", "hover", "megabytes", "plain", "short"]


def bits(bits_per_second: float) -> str:
    """Format a rate."""
    return rate(bits_per_second / 8)


def megabytes(count: float | None) -> str:
    """Format bytes in MB, or kB if there are few."""
    if count is None:
        return "-"
    if count < 10e3:
        return f"{count / 1e3:.3g} kB"
    return f"{count / 1e6:.1f} MB" if count >= 10e6 else f"{count / 1e6:.2f} MB"


def factor(value: float) -> str:
    """Format as a factor."""
    return f"{value:.0f}×" if value >= 99.5 else f"{value:.1f}×" if value >= 9.95 else f"{value:.2f}×"


def plain(text: str) -> str:
    """Escape for plotly, which interprets tags in every text."""
    return html.escape(" ".join(text.split()), quote=False)


def short(text: str, length: int = 34) -> str:
    """Do the same and cut long texts."""
    return plain(text if len(text) <= length else text[: length - 1] + "…")


def hover(*lines: str, width: int = 70) -> str:
    """Return the lines of a hover label, the first in bold, long ones wrapped."""
    wrapped: list[str] = []
    for line in filter(None, lines):
        row = ""
        for word in line.split():
            if row and len(row) + len(word) >= width:
                wrapped.append(row)
                row = word
            else:
                row = f"{row} {word}".strip()
        wrapped.append(row)
    first, *rest = [html.escape(line, quote=False) for line in wrapped] or [""]
    return "<br>".join([f"<b>{first}</b>", *rest])
