"""The constants that a module's file assigns, read from its source: what a notebook sets later differs from them."""

from __future__ import annotations

import ast
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_ARITHMETIC: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Invert: operator.invert,
    ast.Not: operator.not_,
}


def parse_constants(file: str) -> dict[str, object]:
    """Return the values of the names that a file assigns at top level and nowhere else in the file.

    These are literals and what is computed from them and from such names: `SIDE = 64`, `H, W = SIDE, 2 * SIDE`. Values
    of calls, subscripts and attributes are left out. A file that cannot be read has none.
    """
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (OSError, ValueError, SyntaxError):
        return {}
    reader = _ConstantReader(tree)
    for line in tree.body:
        if isinstance(line, ast.Assign | ast.AnnAssign) and line.value is not None:
            for target in line.targets if isinstance(line, ast.Assign) else [line.target]:
                reader.assign(target, line.value)
    return reader.found


class _ConstantReader(ast.NodeVisitor):
    """Computes expressions of constants. `visit` raises an error for all that is no constant, or has no value."""

    def __init__(self, tree: ast.Module) -> None:
        names = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
        self._assigned = Counter(name.id for name in names if not isinstance(name.ctx, ast.Load))
        self.found: dict[str, object] = {}

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        """Add the constants that an assignment gives to names which are assigned once."""
        if isinstance(target, ast.Name) and self._assigned[target.id] == 1:
            with suppress(Exception):
                constant = self.visit(value)
                if constant == constant:  # noqa: PLR0124 (NaN differs from itself)
                    self.found[target.id] = constant
        elif isinstance(target, ast.Tuple | ast.List):
            parts = self._get_parts(value)
            starred = any(isinstance(part, ast.Starred) for part in (*target.elts, *parts))
            if len(target.elts) == len(parts) and not starred:
                for pair in zip(target.elts, parts, strict=True):
                    self.assign(*pair)

    def _get_parts(self, value: ast.expr) -> list[ast.expr]:
        if isinstance(value, ast.Tuple | ast.List):
            return value.elts
        known = self.found.get(value.id) if isinstance(value, ast.Name) else None
        return [ast.Constant(part) for part in known] if isinstance(known, tuple | list) else []

    def generic_visit(self, node: ast.AST) -> Any:
        raise TypeError(f"no constant: {ast.unparse(node)}")

    def visit_Constant(self, node: ast.Constant) -> Any:
        return node.value

    def visit_Name(self, node: ast.Name) -> Any:
        return self.found[node.id]

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        return _ARITHMETIC[type(node.op)](self.visit(node.operand))

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        pair = self.visit(node.left), self.visit(node.right)
        if any(isinstance(operand, list | dict | set) for operand in pair):
            raise TypeError("a list that is multiplied is a table, which the file may fill later")
        return _ARITHMETIC[type(node.op)](*pair)

    def visit_Tuple(self, node: ast.Tuple) -> Any:
        return tuple(self._visit_all(node.elts))

    def visit_List(self, node: ast.List) -> Any:
        return self._visit_all(node.elts)

    def visit_Set(self, node: ast.Set) -> Any:
        return set(self._visit_all(node.elts))

    def visit_Dict(self, node: ast.Dict) -> Any:
        return dict(zip(self._visit_all(node.keys), self._visit_all(node.values), strict=True))

    def _visit_all(self, nodes: Iterable[ast.expr | None]) -> list[Any]:
        return [self.visit(node) for node in nodes]  # type: ignore[arg-type]  # a key of `**` is None: visit fails
