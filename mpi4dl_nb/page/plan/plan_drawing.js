// Draws the scene of a plan on a canvas: the image with its cuts, the flows, and the blocks of the ranks.

import { DARK, FONT, makeOffscreen } from "../shared/canvas.js";
import { drawTissue, EMPTY_FRONT, fillTexture, getBlockFaces } from "./plan_paint.js";

/** @type {Pair} */
const AXIS_U = [Math.cos(Math.PI / 6), -0.5];

/** @type {(context: Context, points: Polygon, transform: Transform) => void} */
function tracePolygon(context, points, transform) {
  context.beginPath();
  for (const [x, y] of points) context.lineTo(x * transform.scale + transform.x, y * transform.scale + transform.y);
  context.closePath();
}

/** Draw the image that is cut: an invented tissue, with the cuts of the first stage over it.
 * @type {(context: Context, scene: PlanScene, transform: Transform, colours: Theme) => void} */
export function drawImageSheet(context, scene, transform, colours) {
  /** @type {(point: Pair) => Pair} */
  const place = ([x, y]) => [x * transform.scale + transform.x, y * transform.scale + transform.y];
  const [corner, right, , below] = scene.image.map(place);
  const wide = Math.hypot(right[0] - corner[0], right[1] - corner[1]), high = below[1] - corner[1];
  if (wide < 4 || high < 4) return;
  const tissue = makeOffscreen(Math.ceil(wide), Math.ceil(high));
  drawTissue(tissue, wide, high);
  context.save();
  context.transform(AXIS_U[0], AXIS_U[1], 0, 1, ...corner);
  context.drawImage(tissue.canvas, 0, 0);
  context.restore();
  context.strokeStyle = DARK; // tissue is bright in both themes
  context.setLineDash(scene.cuts.length > 256 ? [] : [5, 3]);
  context.lineWidth = 1.3;
  for (const cut of scene.cuts.length > 1 ? scene.cuts.slice(0, 4096) : []) {
    tracePolygon(context, cut, transform);
    context.stroke();
  }
  context.setLineDash([]);
  context.strokeStyle = colours.ink;
  context.lineWidth = 1.5;
  tracePolygon(context, scene.image, transform);
  context.stroke();
}

/** Draw the flows into one stage: lines with an arrowhead halfway, as the ends lie behind the blocks.
 * @type {(context: Context, pairs: [Pair, Pair][], transform: Transform, colours: Theme) => void} */
export function drawFlows(context, pairs, transform, colours) {
  context.strokeStyle = context.fillStyle = colours.faint;
  context.lineWidth = pairs.length === 1 ? 2 : 1;
  context.globalAlpha = pairs.length > 24 ? 0.45 : 0.85;
  for (const [from, to] of pairs) {
    const [x0, x1] = [from[0], to[0]].map((value) => value * transform.scale + transform.x);
    const [y0, y1] = [from[1], to[1]].map((value) => value * transform.scale + transform.y);
    context.beginPath();
    context.moveTo(x0, y0);
    context.lineTo(x1, y1);
    context.stroke();
    const angle = Math.atan2(y1 - y0, x1 - x0), size = Math.min(6, Math.hypot(x1 - x0, y1 - y0) / 6);
    const [mx, my] = [(x0 + x1) / 2, (y0 + y1) / 2];
    context.beginPath();
    for (const turn of [0, 2.5, -2.5]) {
      context.lineTo(mx + size * Math.cos(angle + turn), my + size * Math.sin(angle + turn));
    }
    context.fill();
  }
  context.globalAlpha = 1;
}

/** Return the part of a block's front that its memory fills, from below, as a polygon; `share` is from 0 to 1.
 * @type {(front: Polygon, share: number) => Polygon} */
export function fillFront(front, share) {
  /** @type {(from: Pair, to: Pair) => Pair} */
  const rise = ([x0, y0], [x1, y1]) => [x0 + (x1 - x0) * share, y0 + (y1 - y0) * share];
  return [rise(front[3], front[0]), rise(front[2], front[1]), front[2], front[3]];
}

/**
 * Draw one block of a rank, filled from below like a tank with its memory as a share of that of the fullest rank, and
 * with its number on its front if there is room. `load` has `level` and `share`; none if they are not known.
 * @type {(context: Context, box: PlanBox, transform: Transform, load?: Pick<PlanLoad, "level" | "share">) => void}
 */
export function drawBlock(context, box, transform, load) {
  const level = load?.level ?? -1;
  const [front, top, left] = getBlockFaces(level);
  context.lineWidth = 1;
  context.lineJoin = "round";
  context.strokeStyle = DARK;
  const { faces } = box;
  /** @type {[Polygon, string][]} */
  const fills = [[faces.left, left], [faces.top, top], [faces.front, level < 0 ? front : EMPTY_FRONT]];
  for (const [face, colour] of fills) {
    tracePolygon(context, face, transform);
    context.fillStyle = colour;
    context.fill();
    context.stroke();
  }
  if (load && level >= 0) {
    tracePolygon(context, fillFront(faces.front, load.share), transform);
    context.fillStyle = front;
    context.fill();
    fillTexture(context, level);
    context.lineWidth = 0.8;
    context.stroke();
  }
  writeOnFront(context, box, transform, level);
}

/** @type {(context: Context, box: PlanBox, transform: Transform, level: number) => void} */
function writeOnFront(context, box, transform, level) {
  const [corner, , bottom] = box.faces.front;
  const [wide, high] = [box.span[0] * transform.scale, box.span[1] * transform.scale];
  const words = [`rank ${box.block.rank}`, String(box.block.rank)];
  context.save();
  const middle = [0, 1].map((axis) => (corner[axis] + bottom[axis]) / 2 * transform.scale);
  context.transform(AXIS_U[0], AXIS_U[1], 0, 1, middle[0] + transform.x, middle[1] + transform.y);
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.lineJoin = "round";
  for (const text of words) {
    const size = Math.min(17, high * 0.6, (wide * 1.5) / text.length);
    if (size < 9 && text !== words[1]) continue;
    if (size < 7) break;
    context.font = `600 ${size}px ${readFont(context)}`;
    if (context.measureText(text).width > wide * 0.92) continue;
    context.lineWidth = 3.5;
    context.strokeStyle = level < 0 ? getBlockFaces(level)[0] : "rgb(246 248 250 / 80%)";
    context.strokeText(text, 0, 0);
    context.fillStyle = DARK;
    context.fillText(text, 0, 0);
    break;
  }
  context.restore();
}

/** @type {(context: Context) => string} */
function readFont(context) {
  return context.canvas.dataset?.font || FONT;
}

/** Draw the outline of a block that is meant: of the pointer or of the keyboard.
 * @type {(context: Context, box: PlanBox, transform: Transform, colours: Theme, width: number) => void} */
export function drawOutline(context, box, transform, colours, width) {
  const { front, top, left } = box.faces;
  const outline = [left[3], left[0], top[1], front[1], front[2], front[3]];
  /** @type {[number, string][]} */
  const strokes = [[width + 3, colours.paper], [width, colours.brand]];
  for (const [size, colour] of strokes) {
    tracePolygon(context, outline, transform);
    context.lineWidth = size;
    context.strokeStyle = colour;
    context.stroke();
  }
}

/** Write the name of a sheet, and below it as many of the words as there is room for, at its lower left corner.
 * @type {(context: Context, foot: Pair, transform: Transform, name: string, words: string, room: number, colours:
 * Theme) => void} */
export function writeSheetName(context, foot, transform, name, words, room, colours) {
  const [x, y] = [foot[0] * transform.scale + transform.x, foot[1] * transform.scale + transform.y];
  const font = readFont(context);
  context.textAlign = "left";
  context.textBaseline = "top";
  /** @type {(text: string, dy: number, style: string, colour: string) => boolean} */
  const write = (text, dy, style, colour) => {
    context.font = `${style} ${font}`;
    if (context.measureText(text).width > room) return false;
    context.lineWidth = 4;
    context.strokeStyle = colours.paper;
    context.strokeText(text, x, y + dy);
    context.fillStyle = colour;
    context.fillText(text, x, y + dy);
    return true;
  };
  if (!write(name, 9, "600 13px", colours.ink)) {
    write(name.replace("stage ", ""), 9, "600 12px", colours.ink);
    return;
  }
  const parts = words.split(" of ");
  parts.forEach((part, line) => write(part, 26 + 14 * line, "12px", colours.faint));
}
