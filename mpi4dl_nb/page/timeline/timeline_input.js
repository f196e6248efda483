// Pointer, wheel and keys of a timeline. What they do is done by `page`: move, select, hover and redraw.

import { DRAG_PX, listenToDrag, locatePointer } from "../shared/pointer_drag.js";

const STEP_PX = 80;

/** What each key does, for the list of keys below a timeline.
 * @type {[string, string][]} */
export const TIMELINE_KEYS = [
  ["w s or + −", "zoom in, zoom out at the selected event"],
  ["a d or Shift + ← →", "earlier, later"],
  ["← →", "the event before, after on the rank"],
  ["↑ ↓", "the rank above, below"],
  ["Home End", "the first, last event of the rank"],
  ["f or Enter", "zoom to the selected event"],
  ["n N", "the next, previous match of the search"],
  ["/", "search"],
  ["0", "all of the step"],
  ["Esc", "select nothing"],
];

/** Return what a key does to a scene: { span } to show, { event } to select, or { action }; null if it does nothing.
 * @type {(scene: TimelineScene, event: Pick<KeyboardEvent, "key" | "shiftKey">) => KeyAct | null} */
export function handleTimelineKey(scene, { key, shiftKey }) {
  /** @type {Record<string, number>} */
  const moves = { ArrowLeft: 1, ArrowRight: -1 };
  if (shiftKey && moves[key]) return { span: scene.pan(moves[key] * STEP_PX) };
  const last = scene.getRowRange(scene.selected < 0 ? scene.getChosenRow() : scene.events.row[scene.selected]);
  switch (key) {
    case "w": case "W": case "+": case "=": return { span: scene.zoom(1.5) };
    case "s": case "S": case "-": return { span: scene.zoom(1 / 1.5) };
    case "a": case "A": return { span: scene.pan(STEP_PX) };
    case "d": case "D": return { span: scene.pan(-STEP_PX) };
    case "0": return { span: { start: 0, end: scene.seconds } };
    case "ArrowLeft": return { event: scene.findNeighbour(-1) };
    case "ArrowRight": return { event: scene.findNeighbour(1) };
    case "ArrowUp": return { event: scene.findInRow(-1) };
    case "ArrowDown": return { event: scene.findInRow(1) };
    case "Home": return { event: last[0] };
    case "End": return { event: last[1] - 1 };
    case "f": case "F": case "Enter": return scene.selected < 0 ? null : { span: scene.focusSelected() };
    case "n": return { event: scene.findMatch(1) };
    case "N": return { event: scene.findMatch(-1) };
    case "/": return { action: "search" };
    case "Escape": return scene.selected < 0 && scene.rank < 0 ? null : { action: "clear" };
    default: return null;
  }
}

/** Listen to the pointer and the wheel on the canvas of a timeline.
 * @type {(canvas: HTMLCanvasElement, page: TimelineHost) => void} */
export function listenToPointer(canvas, page) {
  /** @type {{ x: number, y: number, startX: number, startY: number, moved: boolean } | null} */
  let drag = null;
  canvas.addEventListener("wheel", (event) => {
    const [x, y] = locatePointer(event, canvas), { scene } = page;
    const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
    const by = (event.deltaY || event.deltaX) * (event.deltaMode ? 30 : 1);
    if (sideways) page.show(scene.pan(-(event.deltaX || event.deltaY)));
    else if (scene.findRank(x, y) >= 0) {
      const before = scene.scroll;
      scene.scrollBy(by);
      if (scene.scroll === before) return; // nothing to scroll here: the page scrolls
      page.redraw();
    } else if (by > 0 && scene.isWhole) return; // all is shown: the page scrolls
    else page.show(scene.zoom(Math.exp(-by * 0.0022), x));
    event.preventDefault();
    page.leave(); // what is under the pointer changes with each frame; the next move describes it
  }, { passive: false });
  listenToDrag(canvas, {
    begin(x, y) { drag = { x, y, startX: x, startY: y, moved: false }; },
    move(x, y) {
      if (!drag) return;
      drag.moved ||= Math.hypot(x - drag.startX, y - drag.startY) >= DRAG_PX;
      if (!drag.moved) return;
      canvas.style.cursor = "grabbing";
      page.scene.scrollBy(drag.y - y);
      page.show(page.scene.pan(x - drag.x));
      page.leave();
      Object.assign(drag, { x, y });
    },
    end(x, y, event) {
      const clicked = event.type === "pointerup" && !drag?.moved;
      drag = null;
      canvas.style.cursor = "";
      if (clicked) page.press(x, y);
    },
    hover: (x, y) => page.hover(x, y),
  });
  canvas.addEventListener("pointerleave", () => { if (!drag) page.leave(); });
  canvas.addEventListener("dblclick", () => page.show(page.scene.focusSelected(), true));
}
