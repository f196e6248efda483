"""Joins the ES modules of `mpi4dl_nb/page` into one: a notebook takes the code of a widget as a single module.

There is a folder for each widget, and `shared` for what several need. A widget gets texts: with the path of a
file it would be connected to a watcher of the file, which keeps it in memory for good.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

FOLDER = Path(__file__).parents[1].joinpath("page")
_IMPORT = re.compile(r'^import \{[^}]*\} from "(?P<file>\.{1,2}/[\w./]+)";\n', re.MULTILINE)
_DOCS = re.compile(r"^ */\*\*(?:(?!\*/).)*\*/\n", re.MULTILINE | re.DOTALL)
_EXPORT = re.compile(r"^export (?=(?:async )?function|const|class)", re.MULTILINE)
_DEFAULT = re.compile(r"^export default (?P<object>\{[^}]*\});\s*\Z", re.MULTILINE)


@lru_cache
def join_modules(entry: str) -> str:
    """Return module `entry` and all modules that it imports as one module, each once, before those that import it.

    The modules import by `import { name } from "./file.js";` only, or from another folder, so that joined text without
    these lines means the same. Their names must differ, which `tests/page` checks. Comments that begin with `/**`, on
    what functions do and on types, are left out. No network is needed, and no build.

    >>> join_modules("slicer/transform.js").startswith("//")
    True
    """
    texts: dict[Path, str] = {}

    def visit(path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        for match in _IMPORT.finditer(text):
            imported = path.parent.joinpath(match["file"]).resolve()
            if imported not in texts:
                visit(imported)
        bare = _DOCS.sub("", _IMPORT.sub("", text))
        texts[path] = bare if path == first else _EXPORT.sub("", bare)

    first = FOLDER.joinpath(entry).resolve()
    visit(first)
    return "\n".join(texts.values())


def wrap_module(code: str) -> str:
    """Return a JavaScript function that returns the default export of a module without imports.

    Several modules stand in one script so, and none sees the names of another.

    >>> wrap_module("const one = 1;\\nexport default { one };")
    '() => {\\nconst one = 1;\\nreturn { one };\\n}'
    """
    body = _DEFAULT.sub(r"return \g<object>;", _EXPORT.sub("", code))
    return f"() => {{\n{body}\n}}"


def read_style(*files: str) -> str:
    """Return the style sheet of all widgets, followed by `files`."""
    return "\n".join(FOLDER.joinpath(file).read_text(encoding="utf-8") for file in ("shared/page.css", *files))
