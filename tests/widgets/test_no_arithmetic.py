"""Widgets hold no arithmetic: what they show is computed by functions that need no widget."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import mpi4dl_nb.widgets

FILES = sorted(Path(mpi4dl_nb.widgets.__file__).parent.glob("*.py"))
ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.MatMult)


def find_sums(source: str) -> list[int]:
    """The lines that compute."""
    found = []
    for node in ast.walk(ast.parse(source)):
        operator = isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ARITHMETIC)
        called = isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("sum", "round", "divmod")
        if operator or called:
            found.append(node.lineno)
    return sorted(found)


def test_arithmetic_is_found():
    assert find_sums("a = b | c\nd = e + 1\nf += 1\ng = -1") == [2, 3]
    assert find_sums("h = sum(i)") == [1]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_widget_computes_nothing(file):
    assert find_sums(file.read_text()) == []
