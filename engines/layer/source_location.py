"""The origin of a traced operator: the user's module and the user's line."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from pathlib import Path

from torch import fx

from engines.layer.graph import MODEL

__all__ = ["describe_location", "find_current_line", "find_source_line", "get_module_path"]

_OURS = ("/torch/", str(Path(__file__).parent))


def get_module_path(node: fx.Node) -> str:
    """Return the dotted path of the user's module; empty for the model itself."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]) if stack else ""
    return path if path.startswith("loss") else f"{path}.".removeprefix(MODEL).rstrip(".")


def find_source_line(node: fx.Node) -> str:
    """Return file, line and text of the deepest frame in the user's code; empty if unknown."""
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    heads = [
        (head.strip(), text.strip()) for head, text in itertools.pairwise(lines) if head.strip().startswith("File ")
    ]
    return _find_user_frame((head.split(", in ")[0].replace("File ", ""), text) for head, text in heads)


def describe_location(node: fx.Node) -> str:
    """Return module and line, for messages."""
    return f"{get_module_path(node) or 'the model itself'}, {find_source_line(node) or 'source unknown'}"


def find_current_line() -> str:
    """Return file, line and text of the deepest frame of the running code that is the user's."""
    frame, found = sys._getframe(1), []
    while frame is not None:
        found.append((f'"{frame.f_code.co_filename}", line {frame.f_lineno}', frame))
        frame = frame.f_back  # type: ignore[assignment]
    for head, frame in found:
        if not any(ours in head for ours in _OURS):
            return f"{head}: {_get_line_text(frame.f_code.co_filename, frame.f_lineno)}"
    return "source unknown"


def _get_line_text(file: str, line: int) -> str:
    import linecache

    return linecache.getline(file, line).strip()


def _find_user_frame(frames: Iterable[tuple[str, str]]) -> str:
    theirs = [(head, text) for head, text in frames if not any(ours in head for ours in _OURS)]
    return f"{theirs[-1][0]}: {theirs[-1][1]}" if theirs else ""
