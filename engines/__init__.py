"""The code that runs on ranks: models, plans, programs, messages between ranks."""

import sys

from engines.errors import is_deleted

if "torch" not in sys.modules and is_deleted():
    raise ImportError(
        "The folder that this process works in was deleted, and PyTorch cannot be loaded there: the "
        "process would exit without an error message. Go to another one (cd, os.chdir)."
    )
