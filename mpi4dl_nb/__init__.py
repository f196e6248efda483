"""Train convolutional networks on images larger than a GPU, from a notebook.

The `help()` of each of these is enough to use it:

- `Plan` says how a model and its images are split, `Cluster` starts the ranks, and `Training` trains on them; its
  `verify` compares the gradients with those of one process.
- `forecast`, `tune`, `largest_image`, `scaling` and `capabilities` predict and compare plans.
- `Slicer`, `Stepper`, `Configurator`, `TimelineView`, `Tuner`, `Monitor` and `Workbench` are the widgets; the functions
  `show_...` return the same as Matplotlib figures, and `save_page` writes them into one file that is alive.
- `open_image`, `crop_picture`, `folder_images` and `table_images` read pictures and slides.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import mpi4dl_nb.old_names  # noqa: F401 (its import is what it is for)

__version__ = "0.1.0"


# A name is imported when it is first used (SPEC 1 of Scientific Python, which has it done by `lazy_loader`; where a GPU
# is checked there is only PyTorch). So a rank that imports `mpi4dl_nb.engines` loads nothing of the notebook.


def _find_modules() -> dict[str, str]:
    """Return the module of each public name, from the imports of the stub."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [line for line in stub.body if isinstance(line, ast.ImportFrom)]
    return {alias.name: str(line.module) for line in imports for alias in line.names}


_MODULES = _find_modules()
__all__ = list(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
