"""`python -m tests.pure`: the pure files, whose types are checked most strictly and whose examples are run."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def list_pure_modules() -> list[str]:
    """Return the names of the pure modules, as mypy has them; `*` stands for a folder's files."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (override,) = settings["tool"]["mypy"]["overrides"]
    names: list[str] = override["module"]
    return names


def find_pure_files() -> list[str]:
    """Return the paths of the pure modules. Raises FileNotFoundError if a name stands for no file."""
    paths = []
    for name in list_pure_modules():
        stem = name.replace(".", "/")
        files = sorted(path for form in (f"{stem}.py", f"{stem}/__init__.py") for path in ROOT.glob(form))
        if not files:
            raise FileNotFoundError(f"pyproject.toml lists {name}, which is no module")
        paths += [str(path.relative_to(ROOT)) for path in files]
    return paths


if __name__ == "__main__":
    print(*find_pure_files())
