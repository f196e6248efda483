"""What the build of the site refuses: each kind of fault, put into a page."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

SITE = Path(__file__).parents[1] / "docs" / "site"
SOUND = (
    '<h1 id="top">Words</h1><a href="#top">up</a> <a href="b.html#end">end</a> <a href="https://example.org/">out</a>'
)


@pytest.fixture
def check_site(monkeypatch):
    monkeypatch.syspath_prepend(SITE)
    return importlib.import_module("check_site")


def write_site(folder: Path, text: str) -> Path:
    (folder / "a.html").write_text(SOUND + text, encoding="utf-8")
    (folder / "b.html").write_text('<p id="end">End.</p>', encoding="utf-8")
    (folder / "c.png").write_bytes(b"")
    return folder


def test_a_sound_site_has_no_problems(check_site, tmp_path):
    problems, size_bytes = check_site.check_site(write_site(tmp_path, '<img src="c.png" alt="A tile.">'))
    assert problems == []
    assert size_bytes == sum(path.stat().st_size for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('<img src="c.png">', "a.html: <img> without alt: c.png"),
        ('<img src="c.png" alt=" ">', "a.html: <img> without alt: c.png"),
        ('<iframe src="b.html"></iframe>', "a.html: <iframe> without title: b.html"),
        ('<a href="d.html">there</a>', "a.html: d.html does not exist."),
        ('<a href="b.html#start">there</a>', "a.html: b.html#start has no such place."),
        ('<img src="d.png" alt="A tile.">', "a.html: d.png does not exist."),
        ('<script src="https://a.org/b.js"></script>', "a.html: https://a.org/b.js is loaded from a network."),
        ('<link href="//example.org/a.css">', "a.html: //example.org/a.css is loaded from a network."),
    ],
)  # fmt: skip
def test_a_fault_is_named(check_site, tmp_path, text: str, problem: str):
    assert check_site.check_site(write_site(tmp_path, text))[0] == [problem]


def test_a_site_that_is_too_large_is_refused(check_site, tmp_path, monkeypatch):
    monkeypatch.setattr(check_site, "MOST_BYTES", 100)
    assert check_site.check_site(write_site(tmp_path, ""))[0] == ["The site has 0 MB, and may have 0 MB."]


def test_a_folder_with_other_files_is_not_deleted(check_site, tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("the only copy", encoding="utf-8")
    assert importlib.import_module("build").main([str(tmp_path)]) == 1
    assert "holds other files than a built site" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").exists()
