"""`python docs/site/build.py [FOLDER]`: write the site, by default into build/site, and check it.

The variable EXECUTE=off takes the stored outputs of the tutorials instead of executing them.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from sphinx.cmd.build import build_main

SITE = Path(__file__).parent
ROOT = SITE.parents[1]
INVENTORY = "objects.inv"  # of Sphinx, in every site
sys.path[:0] = [str(ROOT)]

from check_site import check_site  # noqa: E402
from save_pages import save_pages  # noqa: E402


def main(arguments: Sequence[str]) -> int:
    """Return 0, or 1 with the reasons on stderr."""
    folder = Path(*arguments) if arguments else ROOT / "build" / "site"
    if folder.exists() and not (folder / INVENTORY).exists() and (not folder.is_dir() or any(folder.iterdir())):
        print(
            f"{folder} holds other files than a built site, which would be deleted. Name a new folder.", file=sys.stderr
        )
        return 1
    shutil.rmtree(folder, ignore_errors=True)  # a page that is no longer there would be published
    folder.mkdir(parents=True)
    (folder / INVENTORY).touch()  # so that a build that fails can be repeated
    flags = ["--fail-on-warning", "--keep-going", "--quiet", "--fresh-env", "-c", str(SITE)]
    work = folder.with_name(f"{folder.name}-work")  # what Sphinx has parsed, and no part of the site
    if build_main([*flags, "-d", str(work), str(ROOT), str(folder)]):
        return 1
    save_pages(folder / "saved")
    problems, size_bytes = check_site(folder)
    print("\n".join(problems), file=sys.stderr)
    print(f"{folder}: {size_bytes / 1e6:.1f} MB")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
