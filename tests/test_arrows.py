"""The arrows between the rooms: who may import whom. Read from the sources; nothing is imported."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.pure import find_pure_files, list_pure_modules

ROOT = Path(__file__).parents[1]

PURE = list_pure_modules()
NOTEBOOK_SIDE = ("ipyparallel", "ipywidgets", "matplotlib", "IPython", "mpi4dl_nb")


@dataclass(frozen=True)
class Rule:
    """Modules that `applies_to` matches may import a name only if `allows` says so."""

    says: str
    applies_to: Callable[[str], bool]
    allows: Callable[[str], bool]


def is_inside(name: str, *rooms: str) -> bool:
    """Whether a dotted name is one of the rooms, or lies in one.

    >>> is_inside("engines.comm.mpi", "engines.comm"), is_inside("engines.common", "engines.comm")
    (True, False)
    """
    return any(name == room or name.startswith(room + ".") for room in rooms)


def is_pure(module: str) -> bool:
    return any(fnmatch(module, pattern) or pattern == f"{module}.*" for pattern in PURE)


def is_allowed_in_pure(name: str) -> bool:
    return name.partition(".")[0] in {*sys.stdlib_module_names, "numpy"} or is_pure(name)


RULES = (
    Rule(
        "engines run without a notebook",
        applies_to=lambda module: is_inside(module, "mpi4dl_nb.engines"),
        allows=lambda name: is_inside(name, "mpi4dl_nb.engines") or not is_inside(name, *NOTEBOOK_SIDE),
    ),
    Rule(
        "only engines/comm speaks MPI",
        applies_to=lambda module: not is_inside(module, "mpi4dl_nb.engines.comm"),
        allows=lambda name: not is_inside(name, "mpi4py"),
    ),
    Rule(
        "pure files import the standard library, numpy and other pure files",
        applies_to=is_pure,
        allows=is_allowed_in_pure,
    ),
    Rule(
        "drawings know no widgets",
        applies_to=lambda module: is_inside(module, "mpi4dl_nb.draw"),
        allows=lambda name: not is_inside(name, "ipywidgets", "mpi4dl_nb.widgets"),
    ),
)


def list_imports(tree: ast.Module, package: str, modules: frozenset[str]) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything that the source imports, wherever it stands in the file.

    `from a import b` counts as `a.b` where that is one of our modules, and as `a` where b is a name in a.
    """
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=source, names=names, level=level):
                up = package.split(".")[: len(package.split(".")) - level + 1] if level else []
                base = ".".join([*up, *([source] if source else [])])
                for alias in names:
                    submodule = f"{base}.{alias.name}"
                    yield node.lineno, submodule if submodule in modules else base
            case ast.Call(
                func=ast.Name(id=("__import__" | "import_module")) | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name if not name.startswith(".") else package + name


def name_module(path: str) -> str:
    """The dotted name of a file's module; the folder of the engines is a package of mpi4dl_nb.

    >>> name_module("engines/comm/mpi.py"), name_module("mpi4dl_nb/draw/__init__.py")
    ('mpi4dl_nb.engines.comm.mpi', 'mpi4dl_nb.draw')
    """
    name = ".".join(Path(path).with_suffix("").parts).removesuffix(".__init__")
    return name if is_inside(name, "mpi4dl_nb") else f"mpi4dl_nb.{name}"


def list_complaints(files: dict[str, str]) -> list[str]:
    """One line per forbidden import. `files` is path -> source, the path relative to the root."""
    names = {path: name_module(path) for path in files}
    modules = frozenset(names.values())
    found = []
    for path, source in files.items():
        module = names[path]
        package = module if path.endswith("__init__.py") else module.rpartition(".")[0]
        for line, name in list_imports(ast.parse(source, path), package, modules):
            broken = [rule for rule in RULES if rule.applies_to(module) and not rule.allows(name)]
            found += [f"{path}:{line} imports {name}, but {rule.says}" for rule in broken]
    return found


def read_house() -> dict[str, str]:
    """Every Python file of the two packages, path -> source."""
    paths = [path for room in ("engines", "mpi4dl_nb") for path in sorted((ROOT / room).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def test_the_house_keeps_its_arrows():
    files = read_house()
    assert files, "no file was read: the test would hold nothing"
    assert not (found := list_complaints(files)), "\n" + "\n".join(found)


def name_package(module: str) -> str:
    """The package that a module lies in; a module that lies in none but ours stands for itself.

    >>> name_package("mpi4dl_nb.engines.comm.mpi"), name_package("mpi4dl_nb.draw"), name_package("mpi4dl_nb.demo")
    ('mpi4dl_nb.engines.comm', 'mpi4dl_nb.draw', 'mpi4dl_nb.demo')
    """
    depth = 3 if is_inside(module, "mpi4dl_nb.engines") else 2
    return ".".join(module.split(".")[:depth])


def order_packages(files: dict[str, str]) -> list[str]:
    """The packages, each after those that it imports. Raises graphlib.CycleError if some need each other."""
    modules = frozenset(map(name_module, files))
    needed: dict[str, set[str]] = {}
    for path, source in files.items():
        module = name_module(path)
        package = module if path.endswith("__init__.py") else module.rpartition(".")[0]
        names = {name for _, name in list_imports(ast.parse(source, path), package, modules)}
        ours = {name_package(name) for name in names & modules}
        needed.setdefault(name_package(module), set()).update(ours - {name_package(module)})
    # Whoever imports a module of ours has imported the roots; they import nothing but the engines' old names.
    roots = {"mpi4dl_nb", "mpi4dl_nb.engines", "mpi4dl_nb.old_names"}
    return list(TopologicalSorter({name: needed[name] - roots for name in needed.keys() - roots}).static_order())


def test_packages_import_one_way():
    order = order_packages(read_house())
    chain = ["geometry", "plan", "program", "compiler", "images", "train", "predict", "inference", "server"]
    places = [order.index(f"mpi4dl_nb.engines.{name}") for name in chain]
    assert places == sorted(places)


def test_packages_that_need_each_other_are_seen():
    with pytest.raises(CycleError):
        order_packages(
            {
                "engines/comm/mpi.py": "from mpi4dl_nb.engines.train import loop",
                "engines/train/loop.py": "def f():\n    from ..comm import mpi",
            }
        )


@pytest.mark.parametrize(
    ("path", "source", "name"),
    [
        ("engines/program/worker.py", "import ipyparallel as ipp", "ipyparallel"),
        ("engines/predict/cost.py", "def f():\n    from matplotlib import pyplot", "matplotlib"),
        ("engines/program/worker.py", "from mpi4dl_nb import draw", "mpi4dl_nb"),
        ("engines/program/worker.py", "from mpi4py import MPI", "mpi4py"),
        ("engines/program/worker.py", "importlib.import_module('mpi4py.MPI')", "mpi4py.MPI"),
        ("mpi4dl_nb/cluster/cluster.py", "from mpi4py.MPI import COMM_WORLD", "mpi4py.MPI"),
        ("engines/plan/__init__.py", "import torch", "torch"),
        ("engines/plan/__init__.py", "from ..compiler import norm", "mpi4dl_nb.engines.compiler.norm"),
        (
            "engines/geometry/tiles.py",
            "from ..compiler import norm",
            "mpi4dl_nb.engines.compiler.norm",
        ),
        ("engines/geometry/tiles.py", "from ..graph.trace import trace", "mpi4dl_nb.engines.graph.trace"),
        ("engines/plan/make_schedule.py", "from ..program import Worker", "mpi4dl_nb.engines.program"),
        ("mpi4dl_nb/draw/plan.py", "import ipywidgets", "ipywidgets"),
        ("mpi4dl_nb/draw/plan.py", "from mpi4dl_nb.widgets import Slicer", "mpi4dl_nb.widgets"),
        ("mpi4dl_nb/draw/plan.py", "from ..widgets import slicer", "mpi4dl_nb.widgets"),
    ],
)
def test_a_forbidden_import_is_seen(path, source, name):
    rooms = ["engines/compiler/norm.py", "engines/compiler/operator_table.py", "engines/program/__init__.py"]
    found = list_complaints({**dict.fromkeys(rooms, ""), path: source})
    assert any(line.startswith(f"{path}:") and f" imports {name}, but " in line for line in found)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("engines/comm/mpi.py", "from mpi4py import MPI\nimport torch"),
        ("engines/geometry/windows.py", "from . import tiles\nfrom .tiles import Span\nimport numpy as np"),
        ("engines/pipeline/__init__.py", "from .schedule import fill_drain"),
        ("engines/plan/make_schedule.py", "from mpi4dl_nb.engines.errors import PlanError\nfrom enum import Enum"),
        ("engines/compiler/operator_table.py", "import torch\nfrom ..errors import TraceError"),
        ("mpi4dl_nb/widgets/stepper.py", "import ipywidgets\nfrom mpi4dl_nb.draw import draw_tiles"),
        ("mpi4dl_nb/cluster/cluster.py", "import ipyparallel\nfrom mpi4dl_nb.engines.plan import Plan"),
    ],
)
def test_an_allowed_import_is_let_through(path, source):
    rooms = ["engines/geometry/tiles.py", "engines/plan/make_schedule.py"]
    assert list_complaints({**dict.fromkeys(rooms, ""), path: source}) == []


def test_each_pure_module_is_a_file():
    pure = [f"mpi4dl_nb/{path}" for path in read_house() if is_pure(name_module(path))]
    assert pure
    assert sorted(pure) == sorted(set(find_pure_files()))
