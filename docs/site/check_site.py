"""Checks of the built site: what pages refer to is there, pictures have words, and it is small enough to publish."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

MOST_BYTES = 60_000_000
LOADED = {"script": "src", "img": "src", "iframe": "src", "link": "href", "source": "src"}
"""Elements for which a browser asks for a file by itself, and the attribute that names it."""


@dataclass
class PageFacts(HTMLParser):
    """The anchors of a page, the addresses that it names, and its pictures and frames without words."""

    text: str
    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    wordless: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Read an element."""
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        if values.get(LOADED.get(tag, "")):
            self.files.append(values[LOADED[tag]])
        words = {"img": "alt", "iframe": "title"}.get(tag)
        if words and not values.get(words, "").strip():
            self.wordless.append(f"<{tag}> without {words}: {values.get('src', '')[:80]}")


def check_site(folder: Path) -> tuple[list[str], int]:
    """Return what is wrong with the site in a folder, in words, and its bytes."""
    pages = {path.resolve(): PageFacts(path.read_text(encoding="utf-8")) for path in folder.rglob("*.html")}
    problems = [f"{path.relative_to(folder.resolve())}: {text}" for path in pages for text in check_page(path, pages)]
    size_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if size_bytes > MOST_BYTES:
        problems.append(f"The site has {size_bytes / 1e6:.0f} MB, and may have {MOST_BYTES / 1e6:.0f} MB.")
    return sorted(problems), size_bytes


def check_page(path: Path, pages: dict[Path, PageFacts]) -> Iterator[str]:
    """Yield what is wrong with a page."""
    facts = pages[path]
    yield from facts.wordless
    for address in facts.files:
        if urlsplit(address).scheme not in ("", "data") or address.startswith("//"):
            yield f"{address} is loaded from a network."
    for address in (*facts.links, *facts.files):
        if (split := urlsplit(address)).scheme or split.netloc:
            continue
        target = (path.parent / unquote(split.path)).resolve() if split.path else path
        if not target.exists():
            yield f"{address} does not exist."
        elif split.fragment and target in pages and unquote(split.fragment) not in pages[target].anchors:
            yield f"{address} has no such place."
