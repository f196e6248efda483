"""Check, when this package is imported, that `engines` is the package beside it and no other."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


def check_engines() -> None:
    """Raise ImportError if a folder or file of the user's is found, or was imported, as `engines`."""
    home = Path(__file__).resolve().parents[1]
    spec = find_spec("engines")
    if spec is None or spec.origin is None:
        paths = list(spec.submodule_search_locations or ()) if spec else []
    else:
        file = Path(spec.origin).resolve()
        paths = [str(file.parent if file.name == "__init__.py" else file)]
    if str(home / "engines") not in paths:
        at = paths[0] if paths else "no folder at all"
        raise ImportError(
            f"mpi4dl_nb needs its own package engines, in {home}, but Python finds {at}, which hides it. Rename that "
            "folder or file, or take its place out of sys.path, and restart Python."
        )


check_engines()
