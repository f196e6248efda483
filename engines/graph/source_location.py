"""The origin of a traced operator: the user's module and the user's line."""

from __future__ import annotations

import itertools
import linecache
import sys
from pathlib import Path
from types import FrameType

from torch import fx

from engines.graph.model_graph import MODEL

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
    theirs = [
        f"{head.strip().split(', in ')[0].replace('File ', '')}: {text.strip()}"
        for head, text in itertools.pairwise(lines)
        if head.strip().startswith("File ") and not any(ours in head.split(", in ")[0] for ours in _OURS)
    ]
    return theirs[-1] if theirs else ""


def describe_location(node: fx.Node) -> str:
    """Return module and line, for messages."""
    return f"{get_module_path(node) or 'the model itself'}, {find_source_line(node) or 'source unknown'}"


def find_current_line() -> str:
    """Return file, line and text of the deepest frame of the running code that is the user's."""
    # The frame itself, not a formatted traceback: this runs at each read of numbers, and most of these succeed.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file, line = frame.f_code.co_filename, frame.f_lineno
        if not any(ours in file for ours in _OURS):
            return f'"{file}", line {line}: {linecache.getline(file, line).strip()}'
        frame = frame.f_back
    return "source unknown"
