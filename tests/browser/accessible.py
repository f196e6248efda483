"""What keeps a person from using a notebook's outputs by keyboard, with a screen reader, or in another theme.

`assert find_access_faults(notebook) == []` at the end of a test of a widget.
"""

from __future__ import annotations

from collections.abc import Iterator

OUTPUTS = ".jp-Notebook .jp-OutputArea-output"
NAMED = {"button", "checkbox", "combobox", "image", "img", "link", "listbox", "menuitem", "progressbar",
         "ProgressIndicator", "radio", "slider", "spinbutton", "switch", "tab", "textbox"}  # fmt: skip
LEAST, LEAST_LARGE = 4.5, 3.0  # contrast of text: WCAG 2.2, success criterion 1.4.3

# Controls that are there, in their order; each is given its number.
MARK = """outputs => {
    const wanted = 'a[href], button, input, select, textarea, [tabindex]';
    const found = [...document.querySelectorAll(outputs)].flatMap(each => [...each.querySelectorAll(wanted)]);
    const there = found.filter(each => !each.disabled && each.tabIndex >= 0 && each.checkVisibility());
    there.forEach((each, number) => each.dataset.tried = number);
    return there.map(each => each.ariaLabel || each.title || each.innerText || each.alt || each.className);
}"""
FOCUSED = "() => document.activeElement?.dataset.tried ?? ''"

PICTURES = """outputs => [...document.querySelectorAll(outputs)].flatMap(
    each => [...each.querySelectorAll('img:not([alt]), img[alt=""]')].map(image => image.outerHTML)
)"""

# Every text with its colour, and the colours behind it, from the nearest.
TEXTS = """outputs => {
    const left_out = 'script, style, :disabled, [aria-disabled="true"]';
    const shown = node => node.textContent.trim() && node.parentElement.checkVisibility({visibilityProperty: true});
    const found = [];
    for (const output of document.querySelectorAll(outputs)) {
        const walker = document.createTreeWalker(output, NodeFilter.SHOW_TEXT);
        while (walker.nextNode()) {
            const node = walker.currentNode, owner = node.parentElement;
            if (!shown(node) || owner.closest(left_out)) continue;
            const style = getComputedStyle(owner), behind = [];
            for (let each = owner; each; each = each.parentElement) behind.push(getComputedStyle(each).backgroundColor);
            found.push([node.textContent.trim().slice(0, 60), style.color, behind, parseFloat(style.fontSize),
                        parseInt(style.fontWeight)]);
        }
    }
    return found;
}"""


def find_access_faults(notebook) -> list[str]:
    """What is wrong in the outputs of an open notebook; empty where nothing is. It moves the focus."""
    page = notebook.page
    return [*find_nameless(page), *find_unreached(page), *find_pale(page)]


def find_nameless(page) -> Iterator[str]:
    """Controls and pictures without a name in the tree that Chromium shows to screen readers."""
    session = page.context.new_cdp_session(page)
    root = session.send("DOM.getDocument", {"depth": 0})["root"]["nodeId"]
    for output in session.send("DOM.querySelectorAll", {"nodeId": root, "selector": OUTPUTS})["nodeIds"]:
        for node in session.send("Accessibility.queryAXTree", {"nodeId": output})["nodes"]:
            role, name = (node.get(key, {}).get("value", "") for key in ("role", "name"))
            if role in NAMED and not node.get("ignored") and not name.strip():
                markup = session.send("DOM.getOuterHTML", {"backendNodeId": node["backendDOMNodeId"]})["outerHTML"]
                yield f"a {role} has no name: {markup[:160]}"
    session.detach()
    found = page.evaluate(PICTURES, OUTPUTS)  # those that say nothing at all are left out of the tree
    yield from (f"a picture has no words: {markup[:160]}" for markup in found)


def find_unreached(page) -> Iterator[str]:
    """Controls that Tab does not come to from the first one."""
    names = page.evaluate(MARK, OUTPUTS)
    if not names:
        return
    page.evaluate("() => document.querySelector('[data-tried=\"0\"]').focus()")
    reached = {page.evaluate(FOCUSED)}
    for _ in range(3 * len(names)):
        if len(reached - {""}) == len(names):
            break
        page.keyboard.press("Tab")
        reached.add(page.evaluate(FOCUSED))
    yield from (f"Tab does not reach {name!r}" for number, name in enumerate(names) if str(number) not in reached)


def find_pale(page) -> Iterator[str]:
    """Texts that stand out too little from what is behind them."""
    for text, colour, behind, size_px, weight in page.evaluate(TEXTS, OUTPUTS):
        found = compute_contrast(colour, behind)
        large = size_px >= 24 or (size_px >= 18.66 and weight >= 700)
        if found < (LEAST_LARGE if large else LEAST):
            yield f"{text!r} has a contrast of {found:.2f}: {colour} on {behind[0]}"


def compute_contrast(colour: str, behind: list[str]) -> float:
    """The ratio of lightness of a text and of the colours behind it, nearest first, each as CSS tells it.

    >>> compute_contrast("rgb(0, 0, 0)", ["rgba(0, 0, 0, 0)", "rgb(255, 255, 255)"])
    21.0
    """
    ground = (255.0, 255.0, 255.0)
    for each in reversed(behind):
        ground = _lay_over(each, ground)
    one, other = (_compute_lightness(each) + 0.05 for each in (_lay_over(colour, ground), ground))
    return max(one, other) / min(one, other)


def _lay_over(colour: str, ground: tuple[float, ...]) -> tuple[float, ...]:
    """A colour as it is seen on a ground."""
    kind, _, numbers = colour.rstrip(")").partition("(")
    parts = [float(part) for part in numbers.replace(",", " ").replace("/", " ").replace("srgb", "").split()]
    scale = 255 if kind == "color" else 1
    alpha = parts[3] if len(parts) > 3 else 1.0
    return tuple(alpha * scale * part + (1 - alpha) * under for part, under in zip(parts[:3], ground, strict=True))


def _compute_lightness(colour: tuple[float, ...]) -> float:
    """The relative luminance of WCAG 2.2."""
    linear = [c / 3294.6 if c <= 10.31475 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
