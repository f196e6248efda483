// Canvases: their size in pixels of the device, and strokes that are seen on any colours.

import { toBox } from "./rectangles.js";

export const FONT = "system-ui, sans-serif";
export const DARK = "#1a1a1a"; // on colours of any theme: of values, of tissue, of bars
export const WHITE = "#ffffff";

/** Return the context of a canvas. There always is one, as nothing asks a canvas for another kind.
 * @type {(canvas: HTMLCanvasElement, settings?: CanvasRenderingContext2DSettings) => Context} */
export function getContext(canvas, settings) {
  return /** @type {Context} */ (canvas.getContext("2d", settings));
}

/** Return the context of a new canvas that is on no page.
 * @type {(wide: number, high: number, settings?: CanvasRenderingContext2DSettings) => OffscreenContext} */
export function makeOffscreen(wide, high, settings) {
  return /** @type {OffscreenContext} */ (new OffscreenCanvas(wide, high).getContext("2d", settings));
}

/** Return the context of an empty canvas that is `wide` x `high` px of the page, whose unit is such a px.
 * @type {(canvas: HTMLCanvasElement, wide: number, high: number) => Context} */
export function fitCanvas(canvas, wide, high) {
  const ratio = devicePixelRatio || 1, [width, height] = [wide, high].map((side) => Math.round(side * ratio));
  if (canvas.width !== width || canvas.height !== height) {
    Object.assign(canvas, { width, height });
    Object.assign(canvas.style, { width: `${wide}px`, height: `${high}px` });
  }
  const context = getContext(canvas);
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, wide, high);
  return context;
}

/** Stroke a rectangle; `dash` has the lengths of dashes and of the gaps between them.
 * @type {(context: Context, rectangle: Rectangle, colour: string, wide: number, dash?: number[]) => void} */
export function strokeRectangle(context, rectangle, colour, wide, dash = []) {
  context.strokeStyle = colour;
  context.lineWidth = wide;
  context.setLineDash(dash);
  context.strokeRect(...toBox(rectangle));
  context.setLineDash([]);
}

/** Stroke a rectangle on a wider one.
 * @type {(context: Context, rectangle: Rectangle, colour?: string, wide?: number, casing?: string) => void} */
export function strokeCasedRectangle(context, rectangle, colour = DARK, wide = 2, casing = WHITE) {
  strokeRectangle(context, rectangle, casing, wide + 2);
  strokeRectangle(context, rectangle, colour, wide);
}

/** Set the font and the colour of texts, and where they are: `align` is at their x and `baseline` at their y.
 * @type {(context: Context, font: string, colour: string, align?: CanvasTextAlign, baseline?: CanvasTextBaseline) =>
 * void} */
export function setLetters(context, font, colour, align = "left", baseline = "middle") {
  Object.assign(context, { font, fillStyle: colour, textAlign: align, textBaseline: baseline });
}

/** Write a text centred at (x, y), on white edges.
 * @type {(context: Context, text: string, place: Pair, font: string) => void} */
export function writeCased(context, text, [x, y], font) {
  setLetters(context, font, DARK, "center");
  Object.assign(context, { lineWidth: 4, strokeStyle: WHITE });
  context.strokeText(text, x, y);
  context.fillText(text, x, y);
}
