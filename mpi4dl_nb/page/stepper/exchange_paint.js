// Paints what moves between the ranks of a frame: strips of messages, and the terms of sums.
import { DARK, FONT, WHITE, setLetters, strokeCasedRectangle, strokeRectangle, writeCased } from "../shared/canvas.js";
import { findCentre, growRectangle, toBox } from "../shared/rectangles.js";
import { SIGN_PX, locateMessage, placeSumSign } from "./exchange_layout.js";
import { bendBetween, computeFlight, computeTerm, liftRectangle } from "./exchange_motion.js";
import { RankPainter, colourValues } from "./rank_paint.js";
import { readValues } from "./step_frames.js";

const FOCUS = "#d95f02", MOST_WAYS = 40;

/** Paints frames: all ranks, and above them what travels. */
export class ExchangePainter extends RankPainter {
  /** @type {StripPictures[]} */
  strips = []; // of the frame's messages

  /** @override
   * @type {(frame: StepFrame, placed: PanelPlaces, fades: boolean) => void} */
  setFrame(frame, placed, fades) {
    super.setFrame(frame, placed, fades);
    this.strips = frame.meta.messages.map((message) => this.colourMessage(message));
  }

  /** @type {(message: StepMessage) => StripPictures} */
  colourMessage(message) {
    const palette = this.palettes[Number(message.back)], arrived = readValues(this.frame, message.arrived);
    if (!arrived) return { arrived: null, before: null };
    const place = this.placed[message.target];
    /** @type {Pair} */
    const span = place ? place.group.span : [Math.min(...arrived.numbers), Math.max(...arrived.numbers)];
    const before = readValues(this.frame, message.before);
    return { arrived: colourValues(arrived, span, palette), before: before && colourValues(before, span, palette) };
  }

  /** Paint all at `progress` (0 to 1) of the frame's motion: `focus` is the chosen message, `look` the theme.
   * @type {(layout: StepLayout, progress: number, focus: number, look: StepLook, cursor: StepPixel
   * | null) => void} */
  paint(layout, progress, focus, look, cursor) {
    const { messages, sums } = this.frame.meta;
    this.paintRanks(layout, progress, look);
    const flights = messages.map((_, index) => computeFlight(progress, index, messages.length));
    messages.forEach((message, index) => this.paintTarget(message, this.strips[index], flights[index]));
    const others = messages.length > MOST_WAYS ? [] : messages.keys();
    for (const index of others) if (index !== focus) this.paintWay(messages[index], flights[index], false);
    if (messages[focus]) this.paintWay(messages[focus], flights[focus], true);
    const signs = sums.map(({ group }, index) => placeSumSign(layout.cells, group, 46 * (index - (sums.length - 1) / 2)));
    sums.forEach((sum, index) => this.paintTerms(sum, signs[index], progress));
    this.paintHeads();  // above the terms of sums, which would hide a name, and below the strips that move
    messages.forEach((message, index) => this.paintStrip(message, this.strips[index], flights[index], index === focus));
    for (const sign of signs) this.paintSign(sign);
    if (cursor) this.paintCursor(cursor);
  }

  /** Return the rectangles of a message on its source and its target.
   * @type {(message: StepMessage) => [Rectangle, Rectangle]} */
  locateEnds(message) {
    const target = this.placed[message.target], size = target?.group.size;
    /** @type {(rank: number) => Rectangle} */
    const locate = (rank) => locateMessage(this.placed[rank], this.layout.cells[rank], message.tile, size);
    return [locate(message.source), locate(message.target)];
  }

  /** Until a strip has landed, its place shows what was there before: gradients, or nothing yet.
   * @type {(message: StepMessage, strip: StripPictures, flight: Flight) => void} */
  paintTarget(message, strip, flight) {
    if (flight.landed) return;
    const { context, look } = this, place = this.locateEnds(message)[1];
    if (strip.before) context.drawImage(strip.before, ...toBox(place));
    else {
      context.fillStyle = look.panel;
      context.fillRect(...toBox(place));
      strokeRectangle(context, place, look.faint, 1, [2, 2]);
    }
  }

  /** @type {(message: StepMessage, flight: Flight, focused: boolean) => void} */
  paintWay(message, flight, focused) {
    const { context, look } = this, [from, to] = this.locateEnds(message);
    context.globalAlpha = focused ? 1 : 0.35;
    // The way is as the frame where it begins.
    strokeRectangle(context, growRectangle(from, 0.5), focused ? FOCUS : look.ink, focused ? 2 : 1, [3, 3]);
    context.beginPath();
    for (let part = 0; part <= 16; part++) context.lineTo(...findCentre(bendBetween(from, to, part / 16)));
    if (focused) this.strokeCased();
    else context.stroke();
    const tip = findCentre(to), near = findCentre(bendBetween(from, to, 0.93));
    const turn = Math.atan2(tip[1] - near[1], tip[0] - near[0]), size = focused ? 8 : 5;
    context.fillStyle = context.strokeStyle;
    context.beginPath();
    context.moveTo(...tip);
    for (const side of [turn - 0.45, turn + 0.45]) {
      context.lineTo(tip[0] - size * Math.cos(side), tip[1] - size * Math.sin(side));
    }
    context.fill();
    context.globalAlpha = 1;
    if (focused && flight.landed) strokeRectangle(context, to, FOCUS, 2.5);
  }

  /** @type {(message: StepMessage, strip: StripPictures, flight: Flight, focused: boolean) => void} */
  paintStrip(message, strip, flight, focused) {
    const { context, look } = this, [from, to] = this.locateEnds(message);
    if (flight.landed) {
      if (flight.glow) {
        context.globalAlpha = 0.8 * flight.glow;
        strokeRectangle(context, growRectangle(to, 1 + 5 * flight.glow), focused ? FOCUS : look.brand, 4);
        if (strip.before) writeCased(context, "+", findCentre(to), `700 16px ${FONT}`);
        context.globalAlpha = 1;
      }
      return;
    }
    // At rest a strip is a part of its owner's picture, but a gradient that will be added is in no picture.
    if (!flight.lift && !flight.travel && !strip.before) return;
    const place = liftRectangle(bendBetween(from, to, flight.travel), flight.lift);
    const [left, top, width, height] = toBox(place), depth = 5 * flight.lift;
    context.fillStyle = "rgb(0 0 0 / 30%)";  // a plain shadow: a blurred one takes a frame's whole time
    context.fillRect(left + depth, top + depth, width, height);
    context.fillStyle = look.panel;
    context.fillRect(left, top, width, height);
    if (strip.arrived) context.drawImage(strip.arrived, left, top, width, height);
    strokeCasedRectangle(context, place, focused ? FOCUS : DARK, focused ? 2.2 : 1.2);
    if (strip.before) writeCased(context, "+", findCentre(place), `700 13px ${FONT}`);
  }

  /** Stroke the path on a white line, so that it is seen on values of any colour. */
  strokeCased() {
    const { context } = this, { strokeStyle, lineWidth } = context;
    Object.assign(context, { strokeStyle: "rgb(255 255 255 / 75%)", lineWidth: lineWidth + 2 });
    context.stroke();
    Object.assign(context, { strokeStyle, lineWidth });
    context.stroke();
  }

  /** The terms of a sum go to a sum sign in the middle of its ranks, and the total comes back.
   * @type {(sum: StepSum, sign: Pair, progress: number) => void} */
  paintTerms(sum, sign, progress) {
    const { context, look, layout } = this;
    const { at, total } = computeTerm(progress, sum);
    for (const rank of sum.group) {
      const start = findCentre(layout.cells[rank]), place = start.map((each, side) => each + (sign[side] - each) * at);
      context.strokeStyle = DARK;
      context.lineWidth = 1.2;
      context.beginPath();
      context.moveTo(...start);
      context.lineTo(...sign);
      this.strokeCased();
      context.fillStyle = total ? FOCUS : look.brand;
      context.strokeStyle = WHITE;
      context.lineWidth = 2;
      context.beginPath();
      // A term is a disc, the total a square: colour is not the only sign.
      if (total) context.rect(place[0] - 7, place[1] - 7, 14, 14);
      else context.arc(...place, 7, 0, 2 * Math.PI);
      context.fill();
      context.stroke();
    }
  }

  /** @type {(sign: Pair) => void} */
  paintSign(sign) {
    const { context, look } = this;
    context.fillStyle = look.paper;
    context.strokeStyle = look.ink;
    context.lineWidth = 2;
    context.beginPath();
    context.arc(...sign, SIGN_PX - 1, 0, 2 * Math.PI);
    context.fill();
    context.stroke();
    setLetters(context, `700 20px ${FONT}`, look.ink, "center");
    context.fillText("Σ", sign[0], sign[1] + 1);
  }
}
