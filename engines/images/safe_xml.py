"""Parsing of untrusted XML, such as OME-XML; document types, which could define entities, are refused."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn
from xml.etree import ElementTree as ET
from xml.parsers import expat

__all__ = ["XML_BYTES", "find_attributes", "parse_xml"]

XML_BYTES = 1 << 25  # of a text that is parsed to a tree, which takes about ten times as much memory

Attributes = dict[str, str]


def _refuse(*named: object) -> NoReturn:
    raise ValueError("it has a document type, whose entities could grow without end")


class _NoDoctypeBuilder(ET.TreeBuilder):
    def doctype(self, *named: object) -> NoReturn:
        _refuse()


def parse_xml(text: str | bytes) -> ET.Element:
    """Return the root element. Raises ET.ParseError, and ValueError for a document type, which no picture's XML needs.

    >>> parse_xml("<a><b>1</b></a>").findtext("b")
    '1'
    """
    return ET.fromstring(text, ET.XMLParser(target=_NoDoctypeBuilder()))


def find_attributes(text: str | bytes, outer: str, inner: Sequence[str]) -> dict[str, Attributes]:
    """Return the attributes of the first element `outer`, and of its first direct child of each name in `inner`.

    Names are given without namespaces. No tree is built, and parsing stops after these elements, since the document may
    have megabytes of other content. Raises expat.ExpatError, and ValueError for a document type.

    >>> find_attributes("<a><n:b c='1'><d e='2'/><d e='3'/></n:b><b/></a>", "b", ["d", "f"])
    {'b': {'c': '1'}, 'd': {'e': '2'}}
    """
    # Two states: until `outer` is met, only its name is looked for; from then on, the depth tells its direct children
    # from deeper elements, and its own end from theirs.
    parser, found, depth = expat.ParserCreate(), dict[str, Attributes](), 0

    def find_outer(name: str, attributes: Attributes) -> None:
        if name.endswith(outer) and name.rpartition(":")[2] == outer:
            found[outer] = attributes
            parser.StartElementHandler, parser.EndElementHandler = find_inner, end_element

    def find_inner(name: str, attributes: Attributes) -> None:
        nonlocal depth
        depth += 1
        plain = name.rpartition(":")[2]
        if depth == 1 and plain in inner:
            found.setdefault(plain, attributes)
        if len(found) == 1 + len(inner):
            raise _ParsingDoneError

    def end_element(_name: str) -> None:
        nonlocal depth
        depth -= 1
        if depth < 0:
            raise _ParsingDoneError

    parser.StartDoctypeDeclHandler, parser.StartElementHandler = _refuse, find_outer
    with suppress(_ParsingDoneError):
        parser.Parse(text, True)
    return found


class _ParsingDoneError(Exception):
    """Raised to stop the parser once all wanted elements are found."""
