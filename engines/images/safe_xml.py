"""XML that somebody else wrote: elements and text, and nothing that defines more of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn
from xml.etree import ElementTree as ET
from xml.parsers import expat

__all__ = ["XML_BYTES", "find_attributes", "parse_xml"]

XML_BYTES = 1 << 25  # of a text that is parsed to a tree, which takes some ten times as much

Attributes = dict[str, str]


def _refuse(*named: object) -> NoReturn:
    raise ValueError("it has a document type, whose entities could grow without end")


class _NoDoctypeBuilder(ET.TreeBuilder):
    def doctype(self, *named: object) -> NoReturn:
        _refuse()


def parse_xml(text: str | bytes) -> ET.Element:
    """The root element. Raises ET.ParseError, and ValueError at a document type: no picture's XML needs one.

    >>> parse_xml("<a><b>1</b></a>").findtext("b")
    '1'
    """
    return ET.fromstring(text, ET.XMLParser(target=_NoDoctypeBuilder()))


def find_attributes(text: str | bytes, outer: str, inner: Sequence[str]) -> dict[str, Attributes]:
    """Attributes of the first element `outer`, and of the first of each name in `inner` that lies right in it.

    Names are without their namespaces. No tree is made, and nothing is read behind them: what they are in may have
    megabytes of other things. Raises expat.ExpatError, and ValueError at a document type.

    >>> find_attributes("<a><n:b c='1'><d e='2'/><d e='3'/></n:b><b/></a>", "b", ["d", "f"])
    {'b': {'c': '1'}, 'd': {'e': '2'}}
    """
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
    """What was looked for is found."""
