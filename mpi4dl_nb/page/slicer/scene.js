// A scene on a canvas: one transform, moved by wheel, drag, pinch and keys; what is on it is painted by its owner.

import { fitCanvas, getContext } from "../shared/canvas.js";
import { Tooltip, listenToKeys, makeElement } from "../shared/elements.js";
import { clamp } from "../shared/numbers.js";
import { DRAG_PX } from "../shared/pointer_drag.js";
import { makeFrameLoop, makeTimer, watchSize } from "../shared/view_life.js";
import { fitRectangle, fitTransform, keepInView, panBy, toScene, toScreen, zoomAt } from "./transform.js";

const ZOOM_STEP = 1.5;
const CLOSEST = 80; // px of the screen for one of the scene
/** @type {Record<string, Pair>} */
const ARROW_STEPS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

/**
 * A canvas in `host` that shows a scene of `size` [width, height].
 *
 * `owner` has paint(context, scene), describe(x, y) -> lines for the tooltip, pick(x, y), press(key) -> whether it is
 * handled, getPixel() -> [width, height] of a step of the cursor in the scene, leave() when nothing is looked at any more,
 * and settle() after the view has moved.
 */
export class Scene {
  /** @param {HTMLElement} host
   * @param {Pair} size
   * @param {string} label
   * @param {SceneOwner} owner
   * @param {AbortSignal} signal */
  constructor(host, size, label, owner, signal) {
    this.host = host;
    this.size = size;
    this.owner = owner;
    this.transform = { scale: 1, x: 0, y: 0 };
    /** @type {Pair} */
    this.view = [0, 0]; // until the host has a size
    this.ratio = 1;
    this.groundColour = "";
    this.moved = 0; // px, of the pointers that are down
    this.isByKeys = false;
    /** @type {Rectangle | null} */
    this.wanted = null;
    /** @type {Pair | null} */
    this.cursor = null; // the point of the scene that is looked at, by pointer or keys
    /** @type {Map<number, Pair>} */
    this.pointers = new Map();
    this.canvas = makeElement("canvas", {
      class: "mpi4dl-canvas", tabindex: 0, role: "application", "aria-label": label, "data-lm-suppress-shortcuts": "true",
    });
    host.append(this.canvas);
    this.tooltip = new Tooltip(host);
    this.context = getContext(this.canvas, { alpha: false });
    this.requestPaint = makeFrameLoop(() => this.paint(), signal);
    this.settle = makeTimer(signal);
    watchSize(host, () => this.resize(), signal);
    this.listen(this.canvas);
  }

  /** @type {(canvas: HTMLCanvasElement) => void} */
  listen(canvas) {
    canvas.addEventListener("wheel", (event) => this.handleWheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.handleDown(event));
    canvas.addEventListener("pointermove", (event) => this.handleMove(event));
    canvas.addEventListener("pointerup", (event) => this.handleUp(event));
    canvas.addEventListener("pointercancel", (event) => this.handleUp(event));
    canvas.addEventListener("pointerleave", (event) => this.handleLeave(event));
    canvas.addEventListener("dblclick", (event) => this.zoom(ZOOM_STEP * ZOOM_STEP, event.offsetX, event.offsetY));
    canvas.addEventListener("blur", (event) => this.handleLeave(event));
    listenToKeys(canvas, ({ key }) => this.handleOwnKey(key) || this.owner.press(key));
  }

  /** Follow the size of the host. The first size shows the whole scene, and what showed the whole still does. */
  resize() {
    const { clientWidth: width, clientHeight: height } = this.host;
    if (!width || !height || (width === this.view[0] && height === this.view[1])) return;
    const isFirst = !this.view[0], middle = !this.isWhole && toScene(this.transform, this.view[0] / 2, this.view[1] / 2);
    this.view = [width, height];
    this.ratio = devicePixelRatio || 1;
    fitCanvas(this.canvas, width, height);
    if (middle) {
      const [x, y] = toScreen(this.transform, ...middle);
      this.transform = panBy(this.transform, width / 2 - x, height / 2 - y);
    } else this.transform = isFirst && this.wanted ? fitRectangle(this.wanted, this.view, 20) : this.fitWhole();
    this.requestPaint();
  }

  /** The colour below the scene. It is read once for a theme: a style that is read in each frame is computed in each. */
  get ground() {
    this.groundColour ||= getComputedStyle(this.host).backgroundColor;
    return this.groundColour;
  }

  /** Take over the colours of another theme. */
  recolour() {
    this.groundColour = "";
    this.requestPaint();
  }

  fitWhole() {
    return fitTransform(this.size, this.view, 8);
  }

  /** @returns {Pair} */
  get limits() {
    return [this.fitWhole().scale, CLOSEST];
  }

  /** Whether the whole scene is shown. */
  get isWhole() {
    return !this.view[0] || this.transform.scale <= this.limits[0] * 1.001;
  }

  /** Move to a transform, within limits.
   * @type {(transform: Transform) => void} */
  moveTo(transform) {
    this.transform = keepInView(transform, this.size, this.view);
    this.requestPaint();
    this.settle(400, () => this.owner.settle());
  }

  /** Show the whole scene. */
  showWhole() {
    this.moveTo(this.fitWhole());
  }

  /** Show a rectangle of the scene; before the first size, remember it.
   * @type {(rectangle: Rectangle) => void} */
  showRectangle(rectangle) {
    this.wanted = rectangle;
    if (!this.view[0]) return;
    const fitted = fitRectangle(rectangle, this.view, 20);
    const scale = clamp(fitted.scale, ...this.limits);
    this.moveTo(zoomAt(fitted, this.view[0] / 2, this.view[1] / 2, scale / fitted.scale, this.limits));
  }

  /** Zoom by a factor at a point of the screen, by default the cursor or the middle.
   * @type {(factor: number, x?: number, y?: number) => void} */
  zoom(factor, x, y) {
    const [atX, atY] = x !== undefined && y !== undefined ? [x, y] : this.cursor ? toScreen(this.transform, ...this.cursor)
      : [this.view[0] / 2, this.view[1] / 2];
    const moved = zoomAt(this.transform, atX, atY, factor, this.limits);
    this.moveTo(moved.scale <= this.limits[0] ? this.fitWhole() : moved);
  }

  paint() {
    if (!this.view[0]) return;
    this.owner.paint(this.context, this);
  }

  /** Look at a point of the scene: the tooltip beside it says what is there.
   * @type {(x: number, y: number) => void} */
  lookAt(x, y) {
    this.cursor = [x, y];
    const lines = this.owner.describe(x, y);
    if (lines.length) this.tooltip.show(lines, ...toScreen(this.transform, x, y));
    else this.tooltip.hide();
    this.requestPaint();
  }

  /** @type {(event: WheelEvent) => void} */
  handleWheel(event) {
    const factor = Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0015));
    if (factor < 1 && this.isWhole) return; // nothing to zoom out of: the notebook scrolls
    event.preventDefault();
    this.tooltip.hide();
    this.zoom(factor, event.offsetX, event.offsetY);
  }

  /** @type {(event: PointerEvent) => void} */
  handleDown(event) {
    if (event.button) return;
    this.canvas.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, [event.offsetX, event.offsetY]);
    this.moved = 0;
  }

  /** @type {(event: PointerEvent) => void} */
  handleMove(event) {
    const before = this.pointers.get(event.pointerId);
    /** @type {Pair} */
    const now = [event.offsetX, event.offsetY];
    if (!before) {
      this.lookAt(...toScene(this.transform, ...now));
      return;
    }
    this.moved += Math.hypot(now[0] - before[0], now[1] - before[1]);
    const others = [...this.pointers].filter(([id]) => id !== event.pointerId);
    this.pointers.set(event.pointerId, now);
    if (this.moved < DRAG_PX) return;
    this.tooltip.hide();
    if (others.length) {
      const [, anchor] = others[0];
      /** @type {(point: Pair) => number} */
      const spread = (point) => Math.hypot(point[0] - anchor[0], point[1] - anchor[1]);
      this.zoom(spread(now) / spread(before), ...anchor);
    } else this.moveTo(panBy(this.transform, now[0] - before[0], now[1] - before[1]));
  }

  /** @type {(event: PointerEvent) => void} */
  handleUp(event) {
    if (this.pointers.delete(event.pointerId) && event.type === "pointerup" && this.moved < DRAG_PX) {
      this.owner.pick(...toScene(this.transform, event.offsetX, event.offsetY));
    }
  }

  /** @type {(event: Event) => void} */
  handleLeave(event) {
    if (this.pointers.size) return;
    if (event.type === "pointerleave" && document.activeElement === this.canvas && this.isByKeys) return;
    if (this.cursor) this.owner.leave();
    this.cursor = null;
    this.isByKeys = false;
    this.tooltip.hide();
    this.requestPaint();
  }

  /** @type {(key: string) => boolean} */
  handleOwnKey(key) {
    if (key === "+" || key === "=") this.zoom(ZOOM_STEP);
    else if (key === "-") this.zoom(1 / ZOOM_STEP);
    else if (key === "0") this.showWhole();
    else if (key in ARROW_STEPS) this.moveCursor(ARROW_STEPS[key]);
    else return false;
    return true;
  }

  /** Move the cursor by one pixel of the owner, or by 10 px of the screen where pixels are smaller; follow it.
   * @type {(way: Pair) => void} */
  moveCursor(way) {
    const start = this.cursor ?? toScene(this.transform, this.view[0] / 2, this.view[1] / 2);
    const point = start.map((place, axis) => {
      const step = Math.max(this.owner.getPixel()[axis], 10 / this.transform.scale);
      return clamp(place + way[axis] * step, 0.5 * step, this.size[axis] - 0.5 * step);
    });
    const screen = toScreen(this.transform, ...point);
    const shift = screen.map((at, axis) => clamp(at, 40, this.view[axis] - 40) - at);
    if (!this.isWhole && (shift[0] || shift[1])) this.moveTo(panBy(this.transform, ...shift));
    this.isByKeys = true;
    this.lookAt(...point);
  }
}
