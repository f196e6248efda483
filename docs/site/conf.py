"""The site's settings. Its pages are the repository's own files, at the same places, so that a link serves both."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from sphinx.errors import ConfigError

ROOT = Path(__file__).parents[2]
EXECUTE = os.environ.get("EXECUTE", "on")
if EXECUTE not in ("on", "off"):
    raise ConfigError(f"EXECUTE={EXECUTE} is unknown. Use on (run the tutorials) or off (take their stored outputs).")
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]

project = "mpi4dl_nb"
extensions = ["myst_nb", "sphinx.ext.autodoc", "site_parts"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**", "notebooks/*"]
exclude_patterns = [".*", "**/.*", "build", "data", "dist", "engines", "mpi4dl_nb", "tests"]

# References: nitpicky, but of Python's names only the public ones have a place here.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!mpi4dl_nb\.\w+$).*")]

# Markdown and notebooks
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = {"on": "force", "off": "off"}[EXECUTE]
nb_execution_timeout = 1200  # of a cell, in seconds: a runner of a free service is slow
nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_merge_streams = True
nb_ipywidgets_js: dict[str, dict[str, str]] = {}  # by default a network's
# A widget of a notebook is not live in a page: the figure beside it stands for it.
nb_mime_priority_overrides = [("html", "application/vnd.jupyter.widget-view+json", None)]

# Docstrings: their single backticks are code, and a link where they hold a public name.
default_role = "public"
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 70
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = project
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = [("site.js", {"priority": 400})]
html_extra_path = ["root"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_copyright = False
highlight_language = "none"  # of blocks that name none
pygments_dark_style = "monokai"
