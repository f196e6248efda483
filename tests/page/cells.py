"""A widget in cells of several widths, in a window that is wider: what is cut or covered there, and what moves."""

from __future__ import annotations

from typing import Any

from tests.page.harness import PageHarness

WIDTHS_PX = (320, 500, 700, 1000, 1400)
WINDOW_PX = (1500, 800)
AROUND_PX = 96  # what a notebook has above and below its cells, see page.css

# Texts that end outside of what clips them, without the whole text under the pointer; and pairs that lie on each other.
# Bars of a schedule and lists of keys are left out: their texts are elsewhere too, or lie above others on purpose.
_FAULTS = """() => {
    const root = document.querySelector(".mpi4dl-page"), own = (each) => [...each.childNodes].filter(
        (node) => node.nodeType === 3 && node.textContent.trim());
    const ignored = ".mpi4dl-hidden, .mpi4dl-hidden *, .mpi4dl-lane *, .mpi4dl-key-help *, .mpi4dl-tooltip *, option, "
        + ".mpi4dl-scale, .mpi4dl-plan-card *, .mpi4dl-plan-card";
    const texts = [...root.querySelectorAll("*")].filter((each) => !(each instanceof SVGElement)
        && own(each).length && each.checkVisibility() && !each.matches(ignored));
    const place = (each) => {
        const range = document.createRange();
        range.setStart(own(each)[0], 0);
        range.setEndAfter(own(each).at(-1));
        return range.getBoundingClientRect();
    };
    const faults = [], shown = [];
    for (const each of texts) {
        const box = place(each), visible = { ...box.toJSON() };
        let isCut = false;
        for (let outer = each; outer !== document.body; outer = outer.parentElement) {
            const { overflowX, overflowY } = getComputedStyle(outer), clip = outer.getBoundingClientRect();
            const clips = (way) => way === "hidden" || way === "clip";
            if (overflowX !== "visible") {
                visible.left = Math.max(visible.left, clip.left);
                visible.right = Math.min(visible.right, clip.right);
            }
            if (overflowY !== "visible") {
                visible.top = Math.max(visible.top, clip.top);
                visible.bottom = Math.min(visible.bottom, clip.bottom);
            }
            const out = clips(overflowX) && (box.right > clip.right + 1.5 || box.left < clip.left - 1.5)
                || clips(overflowY) && (box.bottom > clip.bottom + 3 || box.top < clip.top - 3);
            if (out && !each.closest("[title]:not([title=''])")) isCut = true;
        }
        if (isCut) faults.push(`cut: ${each.textContent.trim().slice(0, 60)}`);
        else shown.push([each, visible]);
    }
    shown.forEach(([one, a], at) => {
        for (const [other, b] of shown.slice(at + 1)) {
            // Words of one paragraph wrap: the boxes around their lines may lie on each other.
            if (one.parentElement === other.parentElement && getComputedStyle(one).display === "inline") continue;
            if (one.contains(other) || other.contains(one)) continue;
            const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
            const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
            const words = [one, other].map((each) => each.textContent.slice(0, 40));
            if (wide > 2 && high > 4) faults.push(`covered: ${words.join(" | ")}`);
        }
    });
    if (root.scrollWidth > root.clientWidth + 1) faults.push(`wider than its cell: ${root.scrollWidth} px`);
    return faults;
}"""
_PLACES = """(names) => Object.fromEntries(names.map((name) => {
    const { left, top, width, height } = document.querySelector(name).getBoundingClientRect();
    return [name, [left, top, width, height].map(Math.round)];
}))"""


def set_cell_width(harness: PageHarness, wide_px: int) -> None:
    """Give the widget a cell of this width, in a window that stays as it is."""
    harness.page.evaluate("(wide) => { document.getElementById('room').style.width = `${wide}px`; }", wide_px)
    harness.advance(5)


def find_faults(harness: PageHarness) -> list[str]:
    """Return what a reader could not read: texts that are cut, or lie on others, or that the cell has no room for."""
    return harness.page.evaluate(_FAULTS)


def measure_height(harness: PageHarness) -> float:
    """Return the height of the widget's view in px."""
    return harness.page.evaluate("() => document.querySelector('.mpi4dl-page').getBoundingClientRect().height")


def measure_places(harness: PageHarness, *names: str) -> dict[str, Any]:
    """Return [left, top, width, height] of elements by their selectors, in whole px."""
    return harness.page.evaluate(_PLACES, list(names))
