"""What the site adds to Sphinx: saved pages within pages, links to public names, and formulas without a script."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import Any

from docutils import nodes
from docutils.parsers.rst import directives
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective, SphinxRole
from sphinx.writers.html5 import HTML5Translator

import mpi4dl_nb

PUBLIC = frozenset(mpi4dl_nb.__all__)
README_TITLE = "Install and train"  # as in docs/index.md


class SavedPageDirective(SphinxDirective):
    """Show `saved/NAME.html` of the site. Its height in px is `wide`, and in a window of a phone's width `narrow`."""

    required_arguments = 1
    option_spec = {  # noqa: RUF012 (docutils reads it from the class)
        "title": directives.unchanged_required,
        "wide": directives.positive_int,
        "narrow": directives.positive_int,
    }

    def run(self) -> Sequence[nodes.Node]:
        """Return the frame, and a link that opens the page alone."""
        address = "../" * self.env.docname.count("/") + f"saved/{self.arguments[0]}.html"
        title, heights = escape(self.options["title"]), (self.options["wide"], self.options["narrow"])
        frame = (
            f'<div class="saved-page" style="--wide: {heights[0]}px; --narrow: {heights[1]}px">'
            f'<iframe src="{address}" title="{title}" loading="lazy"></iframe>'
            f'<p><a href="{address}">Open alone: {title}</a></p></div>'
        )
        return [nodes.raw("", frame, format="html")]


class PublicRole(SphinxRole):
    """Code in a docstring: a link to its section of the reference if it is a public name."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Return the code, within a reference if there is one."""
        code = nodes.literal(self.rawtext, self.text)
        name = re.match(r"\w*", self.text)[0]
        return [make_reference(name, code, self.env) if name in PUBLIC else code], []


def make_reference(name: str, shown: nodes.Node, env: BuildEnvironment) -> pending_xref:
    """Return a reference to a public name, shown as `shown`."""
    target = f"mpi4dl_nb.{name}"
    return pending_xref("", shown, refdomain="py", reftype="obj", reftarget=target, refdoc=env.docname)


def resolve_type(app: Sphinx, env: BuildEnvironment, node: pending_xref, shown: nodes.Node) -> nodes.Node | None:
    """Resolve a type of a signature by its public name: the signature has that of the module that defines it."""
    name = node["reftarget"].rpartition(".")[2]
    if node.get("refdomain") != "py" or name not in PUBLIC:
        return None
    target = f"mpi4dl_nb.{name}"
    return env.domains["py"].resolve_xref(env, node["refdoc"], app.builder, "obj", target, node, shown)


def write_formula(writer: HTML5Translator, node: nodes.math | nodes.math_block) -> None:
    """Write a formula as MathML, which browsers draw themselves; Sphinx would load a script from a network."""
    writer.body.append(tex2mathml(node.astext(), as_block=isinstance(node, nodes.math_block)))
    raise nodes.SkipNode


def drop_widget_state(app: Sphinx, _: nodes.document) -> None:
    """Remove the state of live widgets, which nothing in a page would read."""
    app.env.nb_metadata.get(app.env.docname, {}).pop("js_files", None)


def name_readme(app: Sphinx, env: BuildEnvironment) -> None:
    """Name README's page as the menu does, in its tab, in searches and in links to the next page.

    Its heading is the project's name, and so is that of the start page.
    """
    env.titles["README"] = env.longtitles["README"] = nodes.title("", README_TITLE)


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the parts to Sphinx."""
    app.add_directive("saved-page", SavedPageDirective)
    app.add_role("public", PublicRole())
    app.add_html_math_renderer("mathml", (write_formula, None), (write_formula, None))
    app.connect("missing-reference", resolve_type)
    app.connect("doctree-read", drop_widget_state)
    app.connect("env-check-consistency", name_readme)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
