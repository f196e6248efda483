// Colours and textures of a plan's blocks: a level of memory is a colour, a texture and (in the legend) words.

import { makeOffscreen } from "../shared/canvas.js";

/** @type {Record<number, [string, string, string]>} */
const FACES = {
  "-1": ["#dfe3e7", "#cfd4d9", "#bcc2c8"],
  0: ["#cfe4f7", "#b4d2ee", "#93bbe0"],
  1: ["#8dbfe8", "#74a9d6", "#5b91c0"],
  2: ["#f3c15b", "#dba942", "#bf8f2b"],
  3: ["#e2796c", "#cb6155", "#a9483d"],
  4: ["#cfe4f7", "#b4d2ee", "#93bbe0"],
};

/** The front of a block above its memory. */
export const EMPTY_FRONT = "#f6f8fa";

/** Return the colours of the front, top and left side of a block of this level.
 * @type {(level: number) => [string, string, string]} */
export function getBlockFaces(level) {
  return FACES[level] ?? FACES[-1];
}

/** Return the strokes of one cell of a level's texture, 10 px wide: lines [x0, y0, x1, y1] or dots [x, y].
 * @type {(level: number) => (Pair | Rectangle)[]} */
export function getTexture(level) {
  if (level === 1) return [[2.5, 2.5], [7.5, 7.5]];
  if (level === 2) return [[-1, 11, 11, -1], [-1, 1, 1, -1], [9, 11, 11, 9]];
  if (level === 3) return [[-1, 11, 11, -1], [-1, -1, 11, 11]];
  return [];
}

/** @type {Map<number, OffscreenCanvas>} */
const CELLS = new Map(); // the cell of each level's texture, drawn once

/** Fill the current path of `context` with the texture of a level.
 * @type {(context: Context, level: number) => void} */
export function fillTexture(context, level) {
  if (!getTexture(level).length) return;
  const cell = CELLS.get(level) ?? drawCell(level);
  CELLS.set(level, cell);
  context.fillStyle = /** @type {CanvasPattern} */ (context.createPattern(cell, "repeat"));
  context.fill();
}

/** @type {(level: number) => OffscreenCanvas} */
function drawCell(level) {
  const pen = makeOffscreen(10, 10);
  pen.strokeStyle = pen.fillStyle = level === 3 ? "rgb(122 20 12 / 70%)" : "rgb(0 0 0 / 32%)";
  pen.lineWidth = 1.2;
  for (const stroke of getTexture(level)) {
    pen.beginPath();
    if (stroke.length === 2) pen.arc(...stroke, 1.1, 0, 7);
    else { pen.moveTo(stroke[0], stroke[1]); pen.lineTo(stroke[2], stroke[3]); }
    if (stroke.length === 2) pen.fill(); else pen.stroke();
  }
  return pen.canvas;
}

/** Draw an invented tissue with nuclei as the image of a plan, `wide` by `high` px, always the same one.
 * @type {(context: OffscreenContext, wide: number, high: number) => void} */
export function drawTissue(context, wide, high) {
  let seed = 7;
  const draw = () => (seed = (seed * 16807) % 2147483647) / 2147483647;
  context.fillStyle = "#f5dfe8";
  context.fillRect(0, 0, wide, high);
  for (let number = 0; number < 150; number += 1) {
    const gland = number < 26;
    context.fillStyle = gland ? `rgb(226 ${150 + draw() * 40} 190 / 55%)` : `rgb(${96 + draw() * 40} 62 140 / 80%)`;
    context.beginPath();
    const size = gland ? 0.05 + draw() * 0.07 : 0.009 + draw() * 0.008;
    context.ellipse(draw() * wide, draw() * high, size * wide, size * wide * (0.6 + draw() * 0.4), draw() * 3, 0, 7);
    context.fill();
  }
}
