"""One widget in a bare page of Chromium, joined to the Python object without a notebook: a test takes seconds."""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from typing import Any

PAGE = """<!doctype html><html><body style="margin: 8px; background: white"><div id="room"></div></body></html>"""

# A model as anywidget gives it to `render`: values, their observers, and messages.
MODEL = """
async ({ code, style, state, binary }) => {
    const unpack = (text) => new DataView(Uint8Array.from(atob(text), (each) => each.charCodeAt(0)).buffer);
    const pack = (value) => {
        const bytes = new Uint8Array(value.buffer ?? value, value.byteOffset ?? 0, value.byteLength);
        return btoa(Array.from(bytes, (each) => String.fromCharCode(each)).join(""));
    };
    const values = { ...state };
    for (const name of binary) values[name] = unpack(state[name]);
    const observers = new Map(), changed = new Map();
    const call = (event, ...rest) => [...(observers.get(event) ?? [])].forEach((observer) => observer(...rest));
    const model = {
        get: (name) => values[name],
        set: (name, value) => {
            if (values[name] === value) return;
            values[name] = value; changed.set(name, value); call(`change:${name}`);
        },
        save_changes: () => {
            if (changed.size) window.pageChanged(Object.fromEntries(changed));
            changed.clear();
        },
        send: (content, callbacks, buffers) => window.pageSent(content, (buffers ?? []).map(pack)),
        on: (events, observer) => events.split(" ").forEach(
            (event) => observers.set(event, [...(observers.get(event) ?? []), observer])),
        off: (events, observer) => (events ?? "").split(" ").forEach(
            (event) => observers.set(event, (observers.get(event) ?? []).filter((each) => each !== observer))),
    };
    window.kernelChanged = (changes, names) => {
        for (const [name, value] of Object.entries(changes)) {
            values[name] = names.includes(name) ? unpack(value) : value;
            call(`change:${name}`);
        }
    };
    window.kernelSent = (content, buffers) => call("msg:custom", content, buffers.map(unpack));
    document.head.append(Object.assign(document.createElement("style"), { textContent: style }));
    const url = URL.createObjectURL(new Blob([code], { type: "text/javascript" }));
    const widget = (await import(url)).default;
    // As in a notebook, what a widget makes is put into the page after `render`: before, it has no size and no style.
    const room = document.createElement("div");
    window.cleanUp = await widget.render({ model, el: room });
    document.getElementById("room").append(room);
}
"""


class PageHarness:
    """Shows a widget in a page of `browser`. `errors` are what the page's console called errors.

    While `is_busy`, the kernel hears nothing of the page, as one that computes.
    """

    is_busy = False

    def __init__(self, browser: Any, widget: Any, size: tuple[int, int] = (1280, 800), **context: Any) -> None:
        self.widget, self.errors, self._from_page = widget, [], False
        self._thread, self._later, self._asked = get_ident(), deque[Any](), deque[Callable[[], None]]()
        self.page = browser.new_context(viewport={"width": size[0], "height": size[1]}, **context).new_page()
        self.page.on("console", lambda said: said.type == "error" and self.errors.append(said.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.set_content(PAGE)
        self.page.expose_function("pageSent", self._receive)
        self.page.expose_function("pageChanged", self._take_over)
        widget.send = self._send  # in place of the kernel's connection
        state = {
            name: getattr(widget, name) for name in widget.keys if name not in ("_esm", "_css", "layout", "tooltip")
        }
        self._names = list(state)
        widget.observe(self._tell, self._names)
        ready, binary = _to_json(state)
        code, style = (_read(widget, name) for name in ("_esm", "_css"))
        self.page.evaluate(MODEL, {"code": code, "style": style, "state": ready, "binary": binary})

    def advance(self, frames: int = 2) -> None:
        """Give the page what other threads have told, and wait for its next frames."""
        while self._later:
            self._tell(self._later.popleft())
        for _ in range(frames):
            self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => done()))")

    def switch_to_dark(self) -> None:
        """Change the colours of the page as a dark theme of JupyterLab does."""
        colours = {"ui-font-color1": "#e8e8e8", "layout-color0": "#111318", "layout-color2": "#2b2d31"}
        style = "; ".join(f"--jp-{name}: {colour}" for name, colour in colours.items())
        self.page.evaluate("(style) => { document.body.style.cssText = style; }", style)
        self.advance(4)

    def close(self) -> None:
        """Close the page. Its console must have told no error."""
        self.widget.unobserve(self._tell, self._names)
        self.page.context.close()
        assert self.errors == []

    def _receive(self, content: dict[str, Any], buffers: list[str]) -> None:
        self._handle(lambda: self.widget._handle_custom_msg(content, [base64.b64decode(each) for each in buffers]))

    def _take_over(self, changes: dict[str, Any]) -> None:
        def take_over() -> None:
            self._from_page = True
            try:
                self.widget.set_state(changes)
            finally:
                self._from_page = False

        self._handle(take_over)

    def _handle(self, answer: Callable[[], None]) -> None:
        """Answer one message after another, as a kernel does: the page may send the next one during an answer."""
        if self.is_busy:
            return
        self._asked.append(answer)
        if len(self._asked) > 1:
            return
        while self._asked:
            try:
                self._asked[0]()
            finally:
                self._asked.popleft()

    def _tell(self, change: Any) -> None:
        if get_ident() != self._thread:  # only the browser's thread may speak with the page
            self._later.append(change)
            return
        ready, binary = _to_json({change["name"]: change["new"]})
        if not self._from_page or getattr(self.widget, change["name"]) != change["new"]:
            self.page.evaluate("([changes, names]) => window.kernelChanged(changes, names)", [ready, binary])

    def _send(self, content: dict[str, Any], buffers: list[bytes] | None = None) -> None:
        packed = [base64.b64encode(each).decode() for each in buffers or []]
        self.page.evaluate("([content, buffers]) => window.kernelSent(content, buffers)", [content, packed])


def _to_json(state: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the values with bytes as base64, and the names of these."""
    binary = [name for name, value in state.items() if isinstance(value, bytes)]
    plain = {name: value for name, value in state.items() if name not in binary and _is_plain(value)}
    return plain | {name: base64.b64encode(state[name]).decode() for name in binary}, binary


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float | bool | list | tuple | dict) or value is None


def _read(widget: Any, name: str) -> str:
    found = getattr(widget, name, "")
    return found.read_text() if isinstance(found, Path) else str(found)
