"""A table of facts in HTML for display in notebooks: plain text, legible in light and dark themes."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

__all__ = ["format_html_table"]

_LEFT = 'style="text-align: left"'


def format_html_table(caption: str, facts: Mapping[str, object]) -> str:
    """Format one row for each fact, with its name and its value.

    >>> format_html_table("Cluster", {"ranks": "< 5"})[-24:]
    '&lt; 5</td></tr></table>'
    """
    rows = (
        f'<tr><th scope="row" {_LEFT}>{escape(str(name))}</th><td {_LEFT}>{escape(str(fact))}</td></tr>'
        for name, fact in facts.items()
    )
    head = f'<table style="border: 1px solid currentColor"><caption {_LEFT}>{escape(caption)}</caption>'
    return f"{head}{''.join(rows)}</table>"
