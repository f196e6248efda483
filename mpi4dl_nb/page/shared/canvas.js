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

/** Return the context of a canvas that is `wide` x `high` px of the page, whose unit is such a px.
 * @type {(canvas: HTMLCanvasElement, wide: number, high: number) => Context} */
export function fitCanvas(canvas, wide, high) {
  const ratio = devicePixelRatio || 1, [width, height] = [wide, high].map((side) => Math.round(side * ratio));
  if (canvas.width !== width || canvas.height !== height) {
    Object.assign(canvas, { width, height });
    Object.assign(canvas.style, { width: `${wide}px`, height: `${high}px` });
  }
  const context = getContext(canvas);
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

/** Stroke a rectangle on a wider white one.
 * @type {(context: Context, rectangle: Rectangle, colour?: string, wide?: number) => void} */
export function strokeCasedRectangle(context, rectangle, colour = DARK, wide = 2) {
  for (const [strokeStyle, lineWidth] of [[WHITE, wide + 2], [colour, wide]]) {
    Object.assign(context, { strokeStyle, lineWidth });
    context.strokeRect(...toBox(rectangle));
  }
}

/** Write a text centred at (x, y), on white edges.
 * @type {(context: Context, text: string, place: Pair, font: string) => void} */
export function writeCased(context, text, [x, y], font) {
  Object.assign(context, { font, textAlign: "center", textBaseline: "middle", lineWidth: 4, strokeStyle: WHITE, fillStyle: DARK });
  context.strokeText(text, x, y);
  context.fillText(text, x, y);
}
