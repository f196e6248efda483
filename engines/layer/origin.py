"""Where a traced operator comes from: the user's module, and the user's line."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from pathlib import Path

from torch import fx

from engines.layer.graph import MODEL

__all__ = ["line_now", "module_of", "source_of", "where"]

_OURS = ("/torch/", str(Path(__file__).parent))


def module_of(node: fx.Node) -> str:
    """The dotted path of the user's module; empty for the model itself."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return path if path.startswith("loss") else f"{path}.".removeprefix(MODEL).rstrip(".")


def source_of(node: fx.Node) -> str:
    """File, line and text of the deepest frame that is the user's; empty where it is not known."""
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    heads = [
        (head.strip(), text.strip()) for head, text in itertools.pairwise(lines) if head.strip().startswith("File ")
    ]
    return _deepest((head.split(", in ")[0].replace("File ", ""), text) for head, text in heads)


def where(node: fx.Node) -> str:
    """Module and line, for messages."""
    return f"{module_of(node) or 'the model itself'}, {source_of(node) or 'source unknown'}"


def line_now() -> str:
    """The same of the code that runs now, for whoever is called by it while it is traced."""
    frame, found = sys._getframe(1), []
    while frame is not None:
        found.append((f'"{frame.f_code.co_filename}", line {frame.f_lineno}', frame))
        frame = frame.f_back  # type: ignore[assignment]
    for head, frame in found:
        if not any(ours in head for ours in _OURS):
            return f"{head}: {_text(frame.f_code.co_filename, frame.f_lineno)}"
    return "source unknown"


def _text(file: str, line: int) -> str:
    import linecache

    return linecache.getline(file, line).strip()


def _deepest(frames: Iterable[tuple[str, str]]) -> str:
    theirs = [(head, text) for head, text in frames if not any(ours in head for ours in _OURS)]
    return f"{theirs[-1][0]}: {theirs[-1][1]}" if theirs else ""
