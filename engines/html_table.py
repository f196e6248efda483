"""A few facts as a table in HTML, which a notebook shows for a value: plain text, legible in light and dark."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

__all__ = ["format_html_table"]

_LEFT = 'style="text-align: left"'


def format_html_table(caption: str, facts: Mapping[str, object]) -> str:
    """One row for each fact, its name and what it is.

    >>> format_html_table("Cluster", {"ranks": "< 5"})[-24:]
    '&lt; 5</td></tr></table>'
    """
    rows = (
        f'<tr><th scope="row" {_LEFT}>{escape(str(name))}</th><td {_LEFT}>{escape(str(fact))}</td></tr>'
        for name, fact in facts.items()
    )
    head = f'<table style="border: 1px solid currentColor"><caption {_LEFT}>{escape(caption)}</caption>'
    return f"{head}{''.join(rows)}</table>"
