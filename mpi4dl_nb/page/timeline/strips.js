// Thin bars of a lane, painted pixel by pixel: thousands of rectangles would take longer than a frame.

import { getContext } from "../shared/canvas.js";
import { clamp } from "../shared/numbers.js";

/** Return the four bytes of an opaque colour, as any CSS text, as one number for a Uint32Array of pixels.
 * @type {(context: Context, colour: string) => number} */
function packColour(context, colour) {
  context.clearRect(0, 0, 1, 1);
  context.fillStyle = colour;
  context.fillRect(0, 0, 1, 1);
  return new Uint32Array(context.getImageData(0, 0, 1, 1).data.buffer)[0];
}

/** Fill pixels of one row with the boxes [left, right, look, bar, kept] that are thinner than `wide` px, or merged.
 * @type {(pixels: Uint32Array, boxes: LaneBoxes, ratio: number, wide: number, colours: number[], faded: number[]) =>
 * boolean} */
export function fillStrip(pixels, boxes, ratio, wide, colours, faded) {
  pixels.fill(0);
  let used = false;
  for (let box = 0; box < boxes.length; box += 5) {
    if (boxes[box + 1] - boxes[box] >= wide && boxes[box + 3] >= 0) continue;
    const from = Math.max(Math.round(boxes[box] * ratio), 0);
    const to = clamp(Math.round(boxes[box + 1] * ratio), from + 1, pixels.length);
    pixels.fill((boxes[box + 4] ? colours : faded)[boxes[box + 2]], from, to);
    used = true;
  }
  return used;
}

/** Rows of pixels of the width of a lane, each of which is drawn as high as its lane. */
export class Strips {
  constructor() {
    this.canvas = document.createElement("canvas");
    this.context = getContext(this.canvas, { willReadFrequently: true });
    this.made = "";
    this.ratio = 1;
    this.wide = 1;
    /** @type {number[]} */
    this.colours = [];
    /** @type {number[]} */
    this.faded = [];
    this.image = this.context.createImageData(1, 1);
    this.pixels = new Uint32Array(1);
  }

  /** Make ready for `count` lanes of `width` px, `ratio` pixels per px, in the colours of the looks; and faded ones.
   * @type {(width: number, count: number, ratio: number, colours: string[], faded: number) => void} */
  prepare(width, count, ratio, colours, faded) {
    const made = `${width} ${count} ${ratio} ${colours}`;
    if (made === this.made) return;
    this.made = made;
    this.ratio = ratio;
    this.wide = Math.ceil(width * ratio);
    Object.assign(this.canvas, { width: this.wide, height: count });
    this.colours = colours.map((colour) => packColour(this.context, colour));
    this.faded = this.colours.map((each) => ((each & 0xffffff) | (Math.round(faded * 255) << 24)) >>> 0);
    this.image = this.context.createImageData(this.wide, count);
    this.pixels = new Uint32Array(this.image.data.buffer);
  }

  /** Fill a strip with the boxes of a lane that are thinner than `wide` px. Return whether there is any.
   * @type {(strip: number, boxes: LaneBoxes, wide: number) => boolean} */
  fill(strip, boxes, wide) {
    const pixels = this.pixels.subarray(strip * this.wide, (strip + 1) * this.wide);
    return fillStrip(pixels, boxes, this.ratio, wide, this.colours, this.faded);
  }

  /** Take over what was filled, before any strip is drawn. */
  finish() {
    this.context.putImageData(this.image, 0, 0);
  }

  /** @type {(context: Context, strip: number, left: number, top: number, width: number, height: number) => void} */
  draw(context, strip, left, top, width, height) {
    context.imageSmoothingEnabled = false;
    context.drawImage(this.canvas, 0, strip, Math.round(width * this.ratio), 1, left, top, width, height);
  }
}
