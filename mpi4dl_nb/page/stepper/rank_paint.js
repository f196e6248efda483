// Paints each rank of a frame in its cell: its values as colours, what it borrows striped, and padding dotted.
import { FONT, getContext, makeOffscreen, setLetters, strokeCasedRectangle, strokeRectangle } from "../shared/canvas.js";
import { findCentre, measureRectangle, toBox } from "../shared/rectangles.js";
import { getCellHead, locateTile, splitHalo } from "./exchange_layout.js";
import { LIGHT_LOOK } from "./step_caption.js";
import { NO_FRAME, getDuration, readValues } from "./step_frames.js";

const FADE_MS = 280;

/** Return a canvas with one pixel for each value, coloured from `span` [low, high] by 256 colours of a palette.
 * @type {(values: FrameValues, span: Pair, palette: Uint8Array<ArrayBuffer>) => OffscreenCanvas} */
export function colourValues({ numbers, high, wide }, [low, most], palette) {
  const context = makeOffscreen(wide, high), image = context.createImageData(wide, high);
  const colours = new Uint32Array(palette.buffer, palette.byteOffset, 256), pixels = new Uint32Array(image.data.buffer);
  const scale = most > low ? 255 / (most - low) : 0;
  numbers.forEach((number, at) => {
    const index = Math.round((number - low) * scale);
    pixels[at] = colours[index > 255 ? 255 : index > 0 ? index : 0];
  });
  context.putImageData(image, 0, 0);
  return context.canvas;
}

/** Paints ranks. `setup` is the kernel's description of the step, `palettes` the colours of values and gradients. */
export class RankPainter {
  /** @param {StepSetup} setup
   * @param {Uint8Array<ArrayBuffer>[]} palettes
   * @param {HTMLCanvasElement} canvas */
  constructor(setup, palettes, canvas) {
    this.setup = setup;
    this.palettes = palettes;
    this.context = getContext(canvas);
    this.look = LIGHT_LOOK;
    /** @type {StepLayout} */
    this.layout = { high: 0, boxes: [], cells: [] };
    this.frame = NO_FRAME;
    /** @type {PanelPlaces} */
    this.placed = [];
    /** @type {Map<number, OffscreenCanvas>} */
    this.images = new Map(); // of the values of each rank
    /** @type {{ placed: PanelPlaces, images: Map<number, OffscreenCanvas> } | null} */
    this.before = null;
  }

  /** Take a frame, with the place of each rank's values; the values shown before fade out.
   * @type {(frame: StepFrame, placed: PanelPlaces, fades: boolean) => void} */
  setFrame(frame, placed, fades) {
    this.before = fades ? { placed: this.placed, images: this.images } : null;
    this.frame = frame;
    this.images = new Map();
    this.placed = placed;
    placed.forEach((place, rank) => {
      const values = place && readValues(frame, place.panel.values);
      const palette = this.palettes[Number(place?.group.gradient)];
      if (values) this.images.set(rank, colourValues(values, place.group.span, palette));
    });
  }

  /** Paint all boxes and cells at `progress` (0 to 1) of the frame's motion; `look` are the theme's colours.
   * @type {(layout: StepLayout, progress: number, look: StepLook) => void} */
  paintRanks(layout, progress, look) {
    this.layout = layout;
    this.look = look;
    layout.boxes.forEach((box, index) => this.paintBox(box, this.setup.boxes[index]));
    layout.cells.forEach((cell, rank) => this.paintCell(cell, rank, progress));
  }

  /** @type {(box: Rectangle, words: StepBox) => void} */
  paintBox(box, { title }) {
    const { context, look } = this, [left, top, width, height] = toBox(box);
    context.fillStyle = look.panel;
    context.beginPath();
    context.roundRect(left - 6, top - 2, width + 12, height + 6, 6);
    context.fill();
    setLetters(context, `600 12px ${FONT}`, look.faint, "left", "alphabetic");
    context.fillText(title, left - 4, top - 8);
  }

  /** @type {(cell: Rectangle, rank: number, progress: number) => void} */
  paintCell(cell, rank, progress) {
    const { context, look } = this, state = this.frame.meta.ranks[rank], place = this.placed[rank];
    if (!place) {
      const [top, left, bottom, right] = cell, head = top + getCellHead(cell);
      strokeRectangle(context, [head + 2.5, left + 4.5, bottom - 6.5, right - 4.5], look.faint, 1, [4, 4]);
      const busy = this.frame.meta.messages.some((each) => each.source === rank || each.target === rank);
      const why = busy ? "" : this.frame.meta.empty[rank] ?? "";  // a message is drawn in its place
      this.writeInside(why, [head + 2.5, left + 10, bottom - 6.5, right - 10]);
      return;
    }
    const image = this.images.get(rank);
    const old = this.before?.placed[rank], faded = Math.min(1, (progress * getDuration(this.frame.meta)) / FADE_MS);
    context.imageSmoothingEnabled = false;
    const oldImage = this.before?.images.get(rank);
    if (old && oldImage && faded < 1) context.drawImage(oldImage, ...toBox(old.rectangle));
    context.globalAlpha = old ? faded : 1;
    if (image) context.drawImage(image, ...toBox(place.rectangle));
    context.globalAlpha = 1;
    this.markHalo(place);
    strokeRectangle(context, locateTile(place, place.panel.own), look.ink, state.moved ? 2 : 1);
  }

  /** Mark what a rank holds beside its own pixels: stripes on what it borrows, dots on grey beyond the image.
   * @type {(place: PanelPlace) => void} */
  markHalo(place) {
    const { context, look } = this, { borrowed, padding } = splitHalo(place.panel, place.group.size);
    /** @type {(tile: Rectangle, ground: string, draw: (sides: Rectangle) => void) => void} */
    const mark = (tile, ground, draw) => {
      const sides = locateTile(place, tile);
      context.save();
      context.beginPath();
      context.rect(...toBox(sides));
      context.clip();
      context.fillStyle = ground;
      context.fillRect(...toBox(sides));
      draw(sides);
      context.restore();
    };
    for (const tile of borrowed) mark(tile, look.tint, (sides) => this.drawStripes(sides));
    for (const tile of padding) mark(tile, look.padding, (sides) => this.drawDots(sides));
  }

  /** @type {(sides: Rectangle) => void} */
  drawStripes([top, left, bottom, right]) {
    const { context, look } = this;
    context.strokeStyle = look.hatch;
    context.lineWidth = 1;
    context.beginPath();
    for (let at = Math.floor((left + top) / 7) * 7; at < right + bottom; at += 7) {
      context.moveTo(at - top, top);
      context.lineTo(at - bottom, bottom);
    }
    context.stroke();
  }

  /** @type {(sides: Rectangle) => void} */
  drawDots([top, left, bottom, right]) {
    const { context, look } = this;
    context.fillStyle = look.hatch;
    for (let y = Math.ceil(top / 5) * 5; y < bottom; y += 5) {
      for (let x = Math.ceil(left / 5) * 5; x < right; x += 5) context.fillRect(x, y, 1.5, 1.5);
    }
  }

  /** Name each rank and what it did, on a plain ground: arrows that are painted before lie below. */
  paintHeads() {
    this.layout.cells.forEach((cell, rank) => {
      if (getCellHead(cell)) this.paintHead(cell, rank, this.frame.meta.ranks[rank]);
    });
  }

  /** @type {(cell: Rectangle, rank: number, state: RankState) => void} */
  paintHead([top, left, , right], rank, state) {
    const { context, look } = this;
    const font = `${state.moved ? 700 : 400} 12px ${FONT}`;
    setLetters(context, font, look.ink);
    const name = `${state.moved ? "▶ " : ""}${right - left > 90 ? "rank " : ""}${rank}`;
    const start = left + 10 + context.measureText(name).width;
    context.font = `12px ${FONT}`;
    const short = `${state.work} ${state.kind}`.trim(), long = state.phase ? `${short}, ${state.phase}` : short;
    const words = [long, short, state.work, ""].find(
      (each) => context.measureText(each).width < right - start - 2) ?? "";
    context.globalAlpha = 0.85;
    context.fillStyle = look.panel;
    context.fillRect(left + 1, top + 2, start + context.measureText(words).width + 3 - left, 15);
    context.globalAlpha = 1;
    context.fillStyle = look.faint;
    context.fillText(words, start, top + 10);
    context.font = font;
    context.fillStyle = look.ink;
    context.fillText(name, left + 4, top + 10);
  }

  /** @type {(text: string, room: Rectangle) => void} */
  writeInside(text, room) {
    const { context, look } = this, [x, y] = findCentre(room), [height, width] = measureRectangle(room);
    setLetters(context, `12px ${FONT}`, look.faint, "center");
    const lines = [""];
    for (const word of text.split(" ")) {
      const longer = `${lines.at(-1)} ${word}`.trim();
      if (context.measureText(longer).width > width && lines.at(-1)) lines.push(word);
      else lines[lines.length - 1] = longer;
    }
    if (lines.length * 16 > height) return;
    lines.forEach((line, at) => context.fillText(line, x, y + 16 * (at - (lines.length - 1) / 2)));
  }

  /** @type {(pixel: StepPixel) => void} */
  paintCursor({ rank, row, col }) {
    const place = this.placed[rank];
    if (!place) return;
    strokeCasedRectangle(this.context, locateTile(place, [row, col, row + 1, col + 1]));
  }
}
