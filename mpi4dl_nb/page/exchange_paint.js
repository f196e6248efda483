// Paints the ranks of a frame on a canvas: their values with halos, and the strips and sums that travel.
import { cutHalo, findMiddle, getCellHead, locateTile } from "./exchange_layout.js";
import { bendBetween, computeFlight, computeTerm, findCentre, growRectangle } from "./exchange_motion.js";
import { readValues } from "./step_frames.js";

const FOCUS = "#d95f02", FONT = "system-ui, sans-serif";

/** Return a canvas with one pixel for each value, coloured from `span` [low, high] by 256 colours of a palette. */
export function colourValues({ numbers, high, wide }, [low, most], palette) {
  const canvas = new OffscreenCanvas(wide, high), context = canvas.getContext("2d");
  const image = context.createImageData(wide, high);
  const colours = new Uint32Array(palette.buffer, palette.byteOffset, 256), pixels = new Uint32Array(image.data.buffer);
  const scale = most > low ? 255 / (most - low) : 0;
  numbers.forEach((number, at) => {
    const index = Math.round((number - low) * scale);
    pixels[at] = colours[index > 255 ? 255 : index > 0 ? index : 0];
  });
  context.putImageData(image, 0, 0);
  return canvas;
}

/** Paints frames. `setup` is the kernel's description of the step, `palettes` the colours of values and gradients. */
export class ExchangePainter {
  constructor(setup, palettes) {
    this.setup = setup;
    this.palettes = [palettes.slice(0, 1024), palettes.slice(1024, 2048)];
    this.images = new Map();
    this.before = null;
  }

  /** Take a frame, with the place of each rank's values; the values shown before fade out. */
  setFrame(frame, placed, fades) {
    this.before = fades && this.frame ? { placed: this.placed, images: this.images } : null;
    this.frame = frame;
    this.images = new Map();
    this.place(placed);
    placed.forEach((place, rank) => {
      const values = place && readValues(frame, place.panel.values);
      if (values) this.images.set(rank, colourValues(values, place.group.span, this.palettes[Number(place.group.gradient)]));
    });
    this.strips = frame.meta.messages.map((message) => this.colourMessage(message));
  }

  /** Take new places of the same values. */
  place(placed) {
    this.placed = placed;
  }

  colourMessage(message) {
    const palette = this.palettes[Number(message.back)], arrived = readValues(this.frame, message.arrived);
    if (!arrived) return { arrived: null, before: null };
    const place = this.placed[message.target];
    const span = place ? place.group.span : [Math.min(...arrived.numbers), Math.max(...arrived.numbers)];
    const before = readValues(this.frame, message.before);
    return { arrived: colourValues(arrived, span, palette), before: before && colourValues(before, span, palette) };
  }

  /** Paint all at `progress` (0 to 1) of the frame's motion. `focus` is the chosen message, `look` the theme's colours. */
  paint(context, layout, progress, focus, look, cursor) {
    Object.assign(this, { context, layout, look });
    const { messages, sums } = this.frame.meta;
    layout.boxes.forEach((box, index) => this.paintBox(box, this.setup.boxes[index]));
    layout.cells.forEach((cell, rank) => this.paintCell(cell, rank, progress));
    const flights = messages.map((_, index) => computeFlight(progress, index, messages.length));
    messages.forEach((message, index) => this.paintTarget(message, this.strips[index], flights[index]));
    messages.forEach((message, index) => index !== focus && this.paintWay(message, flights[index], false, messages.length));
    if (messages[focus]) this.paintWay(messages[focus], flights[focus], true, messages.length);
    messages.forEach((message, index) => this.paintStrip(message, this.strips[index], flights[index], index === focus));
    sums.forEach((sum, index) => this.paintSum(sum, index, sums.length, progress));
    if (cursor) this.paintCursor(cursor);
  }

  paintBox([left, top, width, height], { title }) {
    const { context, look } = this;
    context.fillStyle = look.panel;
    context.beginPath();
    context.roundRect(left - 6, top - 2, width + 12, height + 6, 6);
    context.fill();
    context.fillStyle = look.faint;
    context.font = `600 12px ${FONT}`;
    context.textBaseline = "alphabetic";
    context.textAlign = "left";
    context.fillText(title, left - 4, top - 8);
  }

  paintCell(cell, rank, progress) {
    const { context, look } = this, [left, top, width, height] = cell, state = this.frame.meta.ranks[rank];
    const place = this.placed[rank];
    if (getCellHead(cell)) this.paintHead(cell, rank, state);
    if (!place) {
      context.strokeStyle = look.faint;
      context.lineWidth = 1;
      context.setLineDash([4, 4]);
      context.strokeRect(left + 4.5, top + getCellHead(cell) + 2.5, width - 9, height - getCellHead(cell) - 9);
      context.setLineDash([]);
      this.writeInside(this.frame.meta.empty[rank] ?? "", [left + 10, top + getCellHead(cell), width - 20, height - 22]);
      return;
    }
    const { rectangle: [x, y, wide, high], panel } = place, image = this.images.get(rank);
    const old = this.before?.placed[rank], faded = Math.min(1, progress * (this.frame.meta.messages.length ? 6 : 1));
    context.imageSmoothingEnabled = false;
    if (old && faded < 1 && this.before.images.get(rank)) context.drawImage(this.before.images.get(rank), ...old.rectangle);
    context.globalAlpha = old ? faded : 1;
    if (image) context.drawImage(image, x, y, wide, high);
    context.globalAlpha = 1;
    const own = locateTile(place, cell, panel.own);
    this.tintHalo(place, cell);
    context.strokeStyle = look.ink;
    context.lineWidth = state.moved ? 2 : 1;
    context.strokeRect(...own);
  }

  /** Tint and hatch what a rank holds of its neighbours' pixels, or beyond the image. */
  tintHalo(place, cell) {
    const { context, look } = this;
    for (const tile of cutHalo(place.panel.held, place.panel.own)) {
      const [left, top, width, height] = locateTile(place, cell, tile);
      context.save();
      context.beginPath();
      context.rect(left, top, width, height);
      context.clip();
      context.fillStyle = look.tint;
      context.fillRect(left, top, width, height);
      context.strokeStyle = look.hatch;
      context.lineWidth = 1;
      context.beginPath();
      for (let at = Math.floor((left + top) / 7) * 7; at < left + width + top + height; at += 7) {
        context.moveTo(at - top, top);
        context.lineTo(at - top - height, top + height);
      }
      context.stroke();
      context.restore();
    }
  }

  paintHead([left, top, width], rank, state) {
    const { context, look } = this;
    context.textBaseline = "middle";
    context.textAlign = "left";
    context.font = `${state.moved ? 700 : 400} 12px ${FONT}`;
    context.fillStyle = look.ink;
    const name = `${state.moved ? "▶ " : ""}${width > 90 ? "rank " : ""}${rank}`;
    context.fillText(name, left + 4, top + 10);
    const start = left + 10 + context.measureText(name).width;
    context.font = `12px ${FONT}`;
    context.fillStyle = look.faint;
    const words = [`${state.work} ${state.kind}`.trim(), state.work].find(
      (each) => context.measureText(each).width < left + width - start - 2);
    if (words) context.fillText(words, start, top + 10);
  }

  writeInside(text, [left, top, width, height]) {
    const { context, look } = this;
    context.font = `12px ${FONT}`;
    context.fillStyle = look.faint;
    context.textAlign = "center";
    context.textBaseline = "middle";
    const lines = [""];
    for (const word of text.split(" ")) {
      const longer = `${lines.at(-1)} ${word}`.trim();
      if (context.measureText(longer).width > width && lines.at(-1)) lines.push(word);
      else lines[lines.length - 1] = longer;
    }
    if (lines.length * 16 > height) return;
    lines.forEach((line, at) =>
      context.fillText(line, left + width / 2, top + height / 2 + 4 + 16 * (at - (lines.length - 1) / 2)));
  }

  /** Return the rectangles of a message on its source and its target. */
  locateMessage(message) {
    const target = this.placed[message.target], size = target?.group.size;
    return [message.source, message.target].map(
      (rank) => locateTile(this.placed[rank], this.layout.cells[rank], message.tile, size));
  }

  /** Until a strip has landed, its place shows what was there before: gradients, or nothing yet. */
  paintTarget(message, strip, flight) {
    if (flight.landed) return;
    const { context, look } = this, place = this.locateMessage(message)[1];
    if (strip.before) context.drawImage(strip.before, ...place);
    else {
      context.fillStyle = look.panel;
      context.fillRect(...place);
      context.strokeStyle = look.faint;
      context.lineWidth = 1;
      context.setLineDash([2, 2]);
      context.strokeRect(...place);
      context.setLineDash([]);
    }
  }

  paintWay(message, flight, focused, count) {
    if (!focused && count > 40) return;
    const { context, look } = this, [from, to] = this.locateMessage(message);
    context.globalAlpha = focused ? 1 : 0.45;
    context.strokeStyle = focused ? FOCUS : look.ink;
    context.lineWidth = focused ? 2 : 1;
    context.setLineDash([3, 3]);
    context.strokeRect(...growRectangle(from, 1));
    context.setLineDash([]);
    context.beginPath();
    for (let part = 0; part <= 16; part++) context.lineTo(...findCentre(bendBetween(from, to, part / 16)));
    context.stroke();
    const tip = findCentre(to), near = findCentre(bendBetween(from, to, 0.93));
    const turn = Math.atan2(tip[1] - near[1], tip[0] - near[0]), size = focused ? 8 : 5;
    context.fillStyle = context.strokeStyle;
    context.beginPath();
    context.moveTo(...tip);
    for (const side of [-0.45, 0.45]) context.lineTo(tip[0] - size * Math.cos(turn + side), tip[1] - size * Math.sin(turn + side));
    context.fill();
    context.globalAlpha = 1;
    if (focused && flight.landed) {
      context.lineWidth = 2.5;
      context.strokeRect(...to);
    }
  }

  paintStrip(message, strip, flight, focused) {
    const { context, look } = this, [from, to] = this.locateMessage(message);
    if (flight.landed) {
      if (flight.glow) {
        context.globalAlpha = 0.8 * flight.glow;
        context.strokeStyle = FOCUS;
        context.lineWidth = 4;
        context.strokeRect(...growRectangle(to, 1 + 0.12 * flight.glow));
        if (message.back) this.writeSign("+", findCentre(to), 16);
        context.globalAlpha = 1;
      }
      return;
    }
    if (!flight.lift && !flight.travel) return;
    const place = growRectangle(bendBetween(from, to, flight.travel), 1 + 0.15 * flight.lift);
    context.save();
    context.shadowColor = "rgb(0 0 0 / 55%)";
    context.shadowBlur = 10 * flight.lift;
    context.shadowOffsetY = 4 * flight.lift;
    context.fillStyle = look.panel;
    context.fillRect(...place);
    context.restore();
    if (strip.arrived) context.drawImage(strip.arrived, ...place);
    for (const [colour, wide] of [["#ffffff", 4], [focused ? FOCUS : "#1a1a1a", focused ? 2.2 : 1.2]]) {
      context.strokeStyle = colour;
      context.lineWidth = wide;
      context.strokeRect(...place);
    }
    if (message.back) this.writeSign("+", findCentre(place), 13);
  }

  writeSign(text, [x, y], size) {
    const { context } = this;
    context.font = `700 ${size}px ${FONT}`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.lineWidth = 4;
    context.strokeStyle = "#ffffff";
    context.strokeText(text, x, y);
    context.fillStyle = "#1a1a1a";
    context.fillText(text, x, y);
  }

  /** The terms of a sum go to a sum sign in the middle of its ranks, and the total comes back. */
  paintSum(sum, index, count, progress) {
    const { context, look, layout } = this, middle = findMiddle(layout.cells, sum.group);
    const sign = [middle[0] + 46 * (index - (count - 1) / 2), middle[1]];
    const { at, total } = computeTerm(progress, sum);
    for (const rank of sum.group) {
      const start = findCentre(layout.cells[rank]), place = start.map((each, side) => each + (sign[side] - each) * at);
      context.strokeStyle = look.ink;
      context.globalAlpha = 0.5;
      context.lineWidth = 1.2;
      context.beginPath();
      context.moveTo(...start);
      context.lineTo(...sign);
      context.stroke();
      context.globalAlpha = 1;
      context.fillStyle = total ? FOCUS : look.brand;
      context.strokeStyle = "#ffffff";
      context.lineWidth = 2;
      context.beginPath();
      // A term is a disc, the total a square: colour is not the only sign.
      if (total) context.rect(place[0] - 7, place[1] - 7, 14, 14);
      else context.arc(...place, 7, 0, 2 * Math.PI);
      context.fill();
      context.stroke();
    }
    context.fillStyle = look.paper;
    context.strokeStyle = look.ink;
    context.lineWidth = 2;
    context.beginPath();
    context.arc(...sign, 18, 0, 2 * Math.PI);
    context.fill();
    context.stroke();
    context.fillStyle = look.ink;
    context.font = `700 20px ${FONT}`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillText("Σ", sign[0], sign[1] + 1);
  }

  paintCursor({ rank, row, col }) {
    const place = this.placed[rank];
    if (!place) return;
    const { context } = this, pixel = locateTile(place, this.layout.cells[rank], [row, col, row + 1, col + 1]);
    for (const [colour, wide] of [["#ffffff", 4], ["#1a1a1a", 2]]) {
      context.strokeStyle = colour;
      context.lineWidth = wide;
      context.strokeRect(...pixel);
    }
  }
}
