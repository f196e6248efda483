"""The code that runs on ranks: models, plans, programs, messages between ranks."""

import sys
from importlib import import_module

from mpi4dl_nb.engines.errors import is_deleted

if __name__ == "engines":  # imported by its old name in a repository, where the folder is found: see old_names.py
    sys.modules[__name__] = import_module("mpi4dl_nb.engines")

if "torch" not in sys.modules and is_deleted():
    raise ImportError(
        "The folder that this process works in was deleted, and PyTorch cannot be loaded there: the "
        "process would exit without an error message. Go to another one (cd, os.chdir)."
    )
