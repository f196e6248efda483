"""The tutorials import from `mpi4dl_nb`: a deeper module only where they teach it, and then their text names it."""

from __future__ import annotations

import ast
from pathlib import Path

import nbformat
import pytest

import mpi4dl_nb

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))

TAUGHT = {
    "02": {
        "mpi4dl_nb.engines.train.training": "memory of a step on each rank, measured in a function that the ranks run"
    },
    "03": {
        "mpi4dl_nb.engines.comm.all_reduce": "the sum over ranks",
        "mpi4dl_nb.engines.comm.all_reduce_sizes": "the messages of such a sum",
        "mpi4dl_nb.engines.comm.device": "the cores of each rank",
        "mpi4dl_nb.engines.comm.world": "the same sum, by hand with messages",
        "mpi4dl_nb.engines.bench.asynchronous": "asynchronous replicas, measured",
        "mpi4dl_nb.engines.bench.communication": "three implementations of the sum, measured",
        "mpi4dl_nb.engines.program.instructions": "the buckets of gradients in a program",
    },
    "04": {
        "mpi4dl_nb.engines.bench.bubble": "bubbles of stages that sleep",
        "mpi4dl_nb.engines.compiler.stages": "the layers of each stage",
        "mpi4dl_nb.engines.compiler.compile": "the schedule that the compiler derives",
        "mpi4dl_nb.engines.train.recipe": "what the ranks of such a function receive",
        "mpi4dl_nb.engines.train.training": "memory of a step on each rank, measured in a function that the ranks run",
    },
    "06": {
        "mpi4dl_nb.engines.bench.communication": "a slow link",
        "mpi4dl_nb.engines.comm.world": "the cost of a message",
        "mpi4dl_nb.engines.predict.rank_tally": "the FLOPs of a program",
        "mpi4dl_nb.engines.train.training": "steps of several designs in turn, in a function that the ranks run",
        "mpi4dl_nb.engines.train.verify": "batches for these steps",
    },
    "07": {"mpi4dl_nb.engines.images.picture": "the bytes that each rank has read"},
    "08": {
        "mpi4dl_nb.engines.compiler.compile": "the schedule that the compiler derives",
        "mpi4dl_nb.engines.plan.make_schedule": "schedules, computed from a placement and batches",
        "mpi4dl_nb.engines.plan.schedule": "the batches of a schedule",
        "mpi4dl_nb.engines.plan.layout": "the roles of each rank",
    },
    "09": {"mpi4dl_nb.engines.compiler.stages": "the layers of each stage"},
    "10": {
        "mpi4dl_nb.engines.program.kernels": "the recipe of an operator",
        "mpi4dl_nb.engines.compiler.operator_table": "the recipe of an operator",
        "mpi4dl_nb.engines.geometry.tiles": "the recipe of an operator",
        "mpi4dl_nb.engines.geometry.windows": "the recipe of an operator",
        "mpi4dl_nb.engines.train.training": "the part of a batch that each rank receives",
    },
    "12": {"mpi4dl_nb.engines.server.rank_functions": "what a rank keeps of a training"},
    "11": {
        "mpi4dl_nb.engines.predict.published": "published results",
        "mpi4dl_nb.engines.predict.published_replay": "published results",
        "mpi4dl_nb.launch.hosts": "the assignment of ranks to hosts",
    },
}
"""What each notebook may import from a module below `mpi4dl_nb`, and what it teaches by it."""


def find_imports(notebook: nbformat.NotebookNode) -> dict[str, set[str]]:
    """The names that code cells import, by module."""
    found: dict[str, set[str]] = {}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            source = "\n".join(line for line in cell.source.splitlines() if not line.startswith(("%", "!")))
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.ImportFrom):
                    found.setdefault(node.module, set()).update(each.name for each in node.names)
                elif isinstance(node, ast.Import):
                    found |= {each.name: set() for each in node.names}
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_imports_public_names_or_what_it_teaches(path: Path):
    notebook = nbformat.read(path, as_version=4)
    imports = find_imports(notebook)
    deeper = {module for module in imports if module.startswith("mpi4dl_nb.")}
    assert deeper == TAUGHT.get(path.stem[:2], {}).keys(), "import it from mpi4dl_nb, or say here what it teaches"
    assert imports.get("mpi4dl_nb", set()) <= set(mpi4dl_nb.__all__)
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    for module in deeper:
        assert f"`{module.rpartition('.')[0]}`" in text, f"the text does not name the package of {module}"
        assert not imports[module] & set(mpi4dl_nb.__all__), f"import these names of {module} from mpi4dl_nb"
