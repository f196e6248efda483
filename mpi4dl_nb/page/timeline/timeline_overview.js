// The whole step in a low strip above a timeline, with a window over the part that is shown.

import { getContext, strokeRectangle } from "../shared/canvas.js";
import { clamp } from "../shared/numbers.js";
import { listenToDrag } from "../shared/pointer_drag.js";
import { limitSpan, mergeBars, panSpan, zoomSpan } from "./timeline_span.js";

const EDGE_PX = 6;

/** Return the height in px of an overview of so many ranks.
 * @type {(rows: number) => number} */
export function getOverviewHeight(rows) {
  return clamp(rows * 8, 28, 72);
}

/** Draw all rows of a step of `seconds` into `width` x `height` px, a strip each: work over messages and waiting.
 * @type {(context: Context, lanes: Lane[][], fills: string[], seconds: number, width: number, height: number) => void}
 */
function drawOverview(context, lanes, fills, seconds, width, height) {
  const high = height / lanes.length, gap = high > 4 ? 1 : 0;
  lanes.forEach(([work, messages], row) => {
    for (const lane of [messages, work]) {
      const boxes = mergeBars(lane, { start: 0, end: seconds }, width);
      for (let box = 0; box < boxes.length; box += 5) {
        context.fillStyle = fills[boxes[box + 2]];
        context.fillRect(boxes[box], row * high, boxes[box + 1] - boxes[box], high - gap);
      }
    }
  });
}

/** Return the left and right of the window over an overview of `width` px; it is never too narrow to be caught.
 * @type {(span: TimeSpan, seconds: number, width: number) => Pair} */
export function getWindow(span, seconds, width) {
  const [left, right] = [(span.start / seconds) * width, (span.end / seconds) * width];
  const spare = Math.max(EDGE_PX - (right - left), 0) / 2;
  return [left - spare, right + spare];
}

/** Return what a press at x would move: the `start` or `end` of the window, all of it (`both`), or nothing (`jump`).
 * @type {(x: number, span: TimeSpan, seconds: number, width: number) => WindowHandle} */
export function findHandle(x, span, seconds, width) {
  const [left, right] = getWindow(span, seconds, width);
  const grip = Math.min(EDGE_PX, (right - left) / 4);
  if (Math.abs(x - left) <= grip) return "start";
  if (Math.abs(x - right) <= grip) return "end";
  return x > left && x < right ? "both" : "jump";
}

/** Return the span after dragging `handle` from one x to another, both in px of an overview of `width` px.
 * @type {(span: TimeSpan, handle: WindowHandle, from: number, to: number, seconds: number, width: number) => TimeSpan}
 */
export function dragWindow(span, handle, from, to, seconds, width) {
  const by = ((to - from) / width) * seconds, length = span.end - span.start;
  /** @type {(at: number, wanted: number) => TimeSpan} */
  const resize = (at, wanted) => zoomSpan(span, at, 1, length / Math.max(wanted, 1e-9), seconds);
  if (handle === "start") return resize(1, length - by);
  if (handle === "end") return resize(0, length + by);
  return panSpan(span, -by, length, seconds);
}

/** The overview on its canvas: drawn once for a width and theme, with a window that can be dragged. */
export class TimelineOverview {
  /** @param {HTMLCanvasElement} canvas */
  constructor(canvas) {
    this.canvas = canvas;
    this.drawn = "";
    this.whole = document.createElement("canvas"); // all bars
  }

  /** Draw the overview of a scene; the bars only if `forget` was called, or the size or theme has changed.
   * @type {(scene: DrawnScene) => void} */
  draw(scene) {
    const { canvas } = this, width = scene.layout.plot, height = getOverviewHeight(scene.lanes.length);
    const wanted = `${canvas.width} ${scene.theme.paper}`, context = getContext(canvas);
    if (wanted !== this.drawn) {
      Object.assign(this.whole, { width: canvas.width, height: canvas.height }); // which empties it
      const whole = getContext(this.whole);
      whole.scale(scene.pixelRatio, scene.pixelRatio);
      drawOverview(whole, scene.lanes, scene.fills[1], scene.seconds, width, height);
      this.drawn = wanted;
    }
    context.clearRect(0, 0, width, height);
    context.drawImage(this.whole, 0, 0, width, height);
    const [left, right] = getWindow(scene.span, scene.seconds, width);
    context.fillStyle = scene.theme.paper;
    context.globalAlpha = 0.72;
    context.fillRect(0, 0, left, height);
    context.fillRect(right, 0, width - right, height);
    context.globalAlpha = 1;
    strokeRectangle(context, [1, Math.max(left, 1), height - 1, Math.min(right, width - 1)], scene.theme.brand, 2);
  }

  forget() {
    this.drawn = "";
  }

  /** Let the pointer drag the window: page.show(span) shows another part.
   * @type {(page: Pick<TimelineHost, "scene" | "show">) => void} */
  listen(page) {
    const { canvas } = this;
    const cursors = { start: "ew-resize", end: "ew-resize", both: "grab", jump: "pointer" };
    /** @type {{ x: number, handle: WindowHandle, span: TimeSpan | null } | null} */
    let drag = null;
    /** @type {(x: number) => WindowHandle} */
    const find = (x) => findHandle(x, page.scene.span, page.scene.seconds, page.scene.layout.plot);
    listenToDrag(canvas, {
      begin(x) {
        const { scene } = page, handle = find(x);
        if (handle === "jump") {
          const time = (x / scene.layout.plot) * scene.seconds, half = (scene.span.end - scene.span.start) / 2;
          page.show(limitSpan({ start: time - half, end: time + half }, scene.seconds));
        }
        drag = { x, handle: handle === "jump" ? "both" : handle, span: null };
      },
      move(x) {
        const { scene } = page;
        if (!drag) return;
        drag.span ??= scene.span;
        page.show(dragWindow(drag.span, drag.handle, drag.x, x, scene.seconds, scene.layout.plot));
      },
      hover(x) { canvas.style.cursor = cursors[find(x)]; },
    });
  }
}
