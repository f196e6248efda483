"""What a hand on a page feels, measured in Chromium: milliseconds of an answer, and of frames while things move."""

from __future__ import annotations

import statistics
from typing import Any

# Events at one element, one for each frame, as `kind` says; the time between frames, and that of the handlers alone.
MOVE = """async ([selector, kind, frames]) => {
    const element = document.querySelector(selector), box = element.getBoundingClientRect();
    element.setPointerCapture = () => {};
    const send = (name, x, y, more = {}) => {
        const at = { clientX: box.left + x, clientY: box.top + y, pointerId: 1, bubbles: true, cancelable: true };
        Object.assign(at, more);
        element.dispatchEvent(name === "wheel" ? new WheelEvent(name, at) : new PointerEvent(name, at));
    };
    const nextFrame = () => new Promise((done) => requestAnimationFrame(done));
    const middle = [box.width / 2, box.height / 2], between = [], handling = [];
    if (kind === "drag") send("pointerdown", ...middle);
    if (kind === "scrub") send("pointerdown", 1, middle[1]);
    await nextFrame();
    let last = performance.now();
    for (let n = 0; n < frames; n += 1) {
        const start = performance.now();
        if (kind === "drag") send("pointermove", middle[0] + 90 * Math.sin(n / 8), middle[1] + 60 * Math.cos(n / 6));
        else if (kind === "zoom") send("wheel", ...middle, { deltaY: n % 60 < 30 ? -90 : 90 });
        else if (kind === "scrub") send("pointermove", box.width * (n / frames), middle[1]);
        else send("pointermove", box.width * ((n * 7) % frames) / frames, middle[1] * (0.5 + n / frames));
        handling.push(performance.now() - start);
        await nextFrame();
        const now = performance.now();
        between.push(now - last);
        last = now;
    }
    if (kind === "drag" || kind === "scrub") send("pointerup", ...middle);
    return { between, handling };
}"""
FRAME_MS = 1000 / 60


def measure_frames(page: Any, selector: str, kind: str, frames: int = 120) -> dict[str, Any]:
    """Move one thing for some frames: `hover`, `drag`, `zoom` or `scrub`.

    `frames_per_s` is of the median frame, `lost` how many frames took more than one and a half times their time, and
    `handler_ms` what the page computed for one event, in the median and at most.
    """
    found = page.evaluate(MOVE, [selector, kind, frames])
    between = found["between"]
    return {
        "frames_per_s": round(1000 / statistics.median(between), 1),
        "slowest_ms": round(max(between), 1),
        "lost": sum(each > 1.5 * FRAME_MS for each in between),
        "frames": len(between),
        "handler_ms": round(statistics.median(found["handling"]), 2),
        "slowest_handler_ms": round(max(found["handling"]), 2),
    }
