"""The constants that a module's file assigns, read from its source: what a notebook sets later differs from them."""

from __future__ import annotations

import ast
from collections import Counter
from contextlib import suppress
from pathlib import Path

_CONSTANT = (
    *(ast.Constant, ast.Name, ast.UnaryOp, ast.BinOp, ast.Tuple, ast.List, ast.Set, ast.Dict),
    *(ast.unaryop, ast.operator, ast.expr_context),
)
"""What an expression of constants consists of."""


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


class _ConstantReader:
    """Computes expressions of constants."""

    def __init__(self, tree: ast.Module) -> None:
        names = (node for node in ast.walk(tree) if isinstance(node, ast.Name))
        self._assigned = Counter(name.id for name in names if not isinstance(name.ctx, ast.Load))
        self.found: dict[str, object] = {}

    def assign(self, target: ast.expr, value: ast.expr) -> None:
        """Add the constants that an assignment gives to names which are assigned once."""
        if isinstance(target, ast.Name) and self._assigned[target.id] == 1:
            with suppress(Exception):
                constant = self._compute(value)
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

    def _compute(self, value: ast.expr) -> object:
        """Return the value of an expression. Raises an error if it is no constant, or has no value."""
        for node in ast.walk(value):
            if not isinstance(node, _CONSTANT) or (isinstance(node, ast.Dict) and None in node.keys):
                raise TypeError(f"no constant: {ast.unparse(node)}")
            if isinstance(node, ast.BinOp) and (self._is_table(node.left) or self._is_table(node.right)):
                raise TypeError("a list that is multiplied is a table, which the file may fill later")
        return eval(compile(ast.Expression(value), "", "eval"), {"__builtins__": {}}, self.found)

    def _is_table(self, node: ast.expr) -> bool:
        known = self.found.get(node.id) if isinstance(node, ast.Name) else None
        return isinstance(node, ast.List | ast.Dict | ast.Set) or isinstance(known, list | dict | set)
