// A debugged step on the page: all ranks, what moves between them, and a record of every instruction that has run.
import { fitCanvas } from "../shared/canvas.js";
import { Tooltip, listenToKeys, makeElement, prefersReducedMotion, readHeightLimit } from "../shared/elements.js";
import {
  boundHeight, followModel, makeFrameLoop, makeRender, makeTimer, watchSize, watchTheme,
} from "../shared/view_life.js";
import { findPixel, locateTile, placePanels, placeRanks } from "./exchange_layout.js";
import { ExchangePainter } from "./exchange_paint.js";
import { MessageStrips } from "./message_strips.js";
import { clamp } from "../shared/numbers.js";
import { locatePointer } from "../shared/pointer_drag.js";
import { findCentre, isInside } from "../shared/rectangles.js";
import { unpackTables } from "../shared/tables.js";
import { LIGHT_LOOK, makeCaption, readLook } from "./step_caption.js";
import { StepControls } from "./step_controls.js";
import { FrameStore, getDuration } from "./step_frames.js";
import { RECORD_KEYS, handleStepKey, makeKeyActions } from "./step_keys.js";
import { makeStepParts } from "./step_parts.js";
import { describePixel, movePixel } from "./step_pixels.js";
import { StepPlayer } from "./step_player.js";
import { StepTable } from "./step_table.js";

const PAUSE_MS = 260, REST_MS = 1000, MOST_PX = 660, LEAST_PX = 200;
const FRAME_PX = 20; // around the ranks' picture
const STRIPS_PX = 362, FLAT_STRIPS_PX = 224, FLAT_PX = 320; // the numbers of a message, beside the ranks or below them
const STRIPS_HIGH_PX = 340; // for two rows of numbers of each strip, below each other
const BESIDE_PX = 900; // below the ranks: strips have room beside each other, see stepper.css

/** The parts of the view, joined: the frames of `model` go to the player, and what it shows to all parts. */
class StepperView {
  /** @param {Room<StepperValues, StepperContent>} room */
  constructor({ model, el, signal }) {
    this.model = model;
    this.setup = model.get("setup");
    this.store = new FrameStore();
    this.player = new StepPlayer(this.store, {
      show: (index, moves) => this.show(index, moves),
      ask: (key, asked) => model.send({ key, asked }),
      tell: () => this.request(),
    });
    const canvas = makeElement("canvas", { "aria-hidden": "true" });
    this.painter = new ExchangePainter(this.setup, unpackTables(model.get("palettes")), canvas);
    this.actions = makeKeyActions(this.player, model, (by) => this.turn(by));
    const runs = model.get("runs");
    this.controls = new StepControls(this.player, runs, (key) => this.actions[key]());
    this.strips = new MessageStrips(this.painter.palettes, (index) => this.choose(index));
    this.table = new StepTable(this.setup);
    const keys = [...runs.map(([key, , does]) => [key, does]), ...(runs.length ? [["g", "gradient or activation"]] : [])];
    this.parts = makeStepParts(canvas, this.controls, this.strips, this.table, [...keys, ...RECORD_KEYS]);
    this.parts.caption.style.setProperty("--lines", String(clamp(this.setup.boxes.length, 2, 3)));
    this.tooltip = new Tooltip(this.parts.stage);
    /** @type {StepFrame | null} */
    this.frame = null;
    this.focus = 0; // the number of the chosen message
    this.moves = false;
    this.progress = 1; // of the frame's motion
    /** @type {number | undefined} */
    this.started = undefined; // when it was painted first
    /** @type {StepPixel | null} */
    this.cursor = null;
    this.look = LIGHT_LOOK;
    this.wide = this.room = this.stageWide = 0;
    this.hasNumbers = false;
    /** @type {StepLayout | null} */
    this.layout = null;
    /** @type {PanelPlaces} */
    this.placed = [];
    this.request = makeFrameLoop(() => this.paint(), signal);
    this.goOn = makeTimer(signal); // from a frame whose motion has ended
    this.rest = makeTimer(signal);
    el.append(this.parts.root);
    listenToKeys(this.parts.root, (event) => this.handleKey(event));
    this.parts.stage.addEventListener("pointermove", (event) => this.hover(event));
    this.parts.stage.addEventListener("pointerleave", () => this.point(null));
    this.parts.stage.addEventListener("click", (event) => this.chooseAt(event));
    const resize = () => this.resize();
    watchSize(this.parts.root, resize, signal);
    watchTheme(resize, signal);
    boundHeight(this.parts.root, model, resize, signal);
    this.controls.showTrouble(model.get("trouble"));
    this.follow(signal);
    this.take();
    if (!this.setup.saved) model.send({ newest: true });
    else if (model.get("meta").number || model.get("unavailable")) model.send({ history: true });
  }

  /** @type {(signal: AbortSignal) => void} */
  follow(signal) {
    const { model } = this;
    followModel(model, {
      "change:meta": () => this.take(),
      "change:focus": () => { if (!this.player.recorded) this.setFocus(model.get("focus")); },
      "change:alt": () => this.tellAlt(),
      "change:trouble": () => this.controls.showTrouble(model.get("trouble")),
      "msg:custom": (content, buffers) => this.receive(content, buffers),
    }, signal);
  }

  take() {
    const meta = this.model.get("meta");
    if (meta.ranks) this.player.take(meta, this.model.get("values"));
    this.plan();
  }

  /** @type {(content: StepperContent, buffers: Bytes[]) => void} */
  receive(content, buffers) {
    if (content.frame) {
      const isFirst = !this.frame;
      this.player.take(content.frame, buffers[0]);
      this.plan();
      if (isFirst && content.frame.number) this.model.send({ history: true });
    }
    if (content.history) this.player.takeHistory(content.history, buffers);
    if (content.refused) {
      this.player.refuse();
      if (this.model.get("unavailable")) this.parts.status.textContent = content.refused;
      else this.controls.showTrouble(content.refused);
    }
    if (content.answered) this.player.answer(content.answered);
  }

  /** After a second without anything new, let the kernel draw the picture that a saved page shows. */
  plan() {
    this.rest(REST_MS, () => this.player.playing ? this.plan() : this.model.send({ rest: true }));
  }

  /** @type {(index: number, moves: boolean) => void} */
  show(index, moves) {
    const frame = this.store.frames[index], still = prefersReducedMotion();
    this.moves = moves && !still;
    this.progress = this.moves ? 0 : 1;
    this.started = undefined;
    this.focus = this.player.recorded ? 0 : this.model.get("focus");
    if (this.focus >= frame.meta.messages.length) this.focus = 0;
    this.cursor = null;
    this.frame = frame;
    this.arrange();
    this.painter.setFrame(frame, this.placed, this.moves);
    this.table.update(frame.meta);
    this.strips.show(frame, this.focus);
    this.parts.caption.replaceChildren(...frame.meta.groups.map((group) => makeCaption(group, this.painter.palettes)));
    this.tellAlt();
    this.point(null);
    this.goOn(0);
    if (!this.moves) this.settle(frame.meta);
    else this.comeIntoSight();
    this.request();
  }

  /** Scroll as little as needed for a motion to be seen, if its button, which may be far above, was pressed here. */
  comeIntoSight() {
    const output = this.parts.root.closest(".jp-OutputArea, .output_area") ?? this.parts.root;
    if (output.contains(document.activeElement)) this.parts.stage.scrollIntoView({ block: "nearest" });
  }

  tellAlt() {
    this.parts.words.textContent = this.player.recorded ? `Recorded. ${this.frame?.meta.title}` : this.model.get("alt");
  }

  /** The motion has ended: tell what has moved, and let the player go on.
   * @type {(meta: FrameMeta) => void} */
  settle({ title, messages, sums }) {
    const moved = messages[this.focus]?.words.slice(0, 2).join(": ");
    this.parts.status.textContent = [title, moved, ...sums.map((sum) => sum.words)].filter(Boolean).join(". ");
    this.goOn(PAUSE_MS / this.player.speed, () => this.player.rest());
  }

  resize() {
    this.measure();
    this.arrange();
    // The page may have been hidden until now.
    if (this.frame && this.layout) this.painter.setFrame(this.frame, this.placed, false);
    this.request();
  }

  /** Measure the room of the ranks. All other parts have a height of their own, whatever a frame has to say. */
  measure() {
    const style = getComputedStyle(this.parts.root);
    this.wide = this.parts.root.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
    this.room = readHeightLimit(this.parts.root) - this.parts.root.scrollHeight + this.parts.scene.offsetHeight;
    this.hasNumbers = getComputedStyle(this.strips.element).display !== "none";
    this.look = readLook(this.parts.root);
  }

  arrange() {
    if (!(this.wide > 0) || !this.frame) return;
    const { setup, room, wide, hasNumbers } = this, most = clamp(room - FRAME_PX, LEAST_PX, MOST_PX);
    // Beside the numbers a row of many stages would be low: it gets the whole width, and the numbers lie below it.
    const beside = hasNumbers ? placeRanks(setup, wide - STRIPS_PX - 24, most) : null;
    let layout = beside;
    if (!layout || layout.high < Math.min(FLAT_PX, 0.75 * most)) {
      const below = hasNumbers ? FLAT_STRIPS_PX : 0;
      const flat = placeRanks(setup, wide - 26, clamp(room - FRAME_PX - below, LEAST_PX, MOST_PX));
      layout = layout && layout.high >= flat.high ? layout : flat;
    }
    const isFlat = layout !== beside;
    this.parts.scene.classList.toggle("mpi4dl-flat", isFlat);
    this.layout = layout;
    this.stageWide = (isFlat ? wide : wide - STRIPS_PX) - 2;
    const strips = isFlat ? 0 : Math.max(this.layout.high + 2, Math.min(STRIPS_HIGH_PX, room));
    this.strips.fit(strips, isFlat ? wide < BESIDE_PX : strips < STRIPS_HIGH_PX);
    for (const sides of [...this.layout.boxes, ...this.layout.cells]) [sides[1], sides[3]] = [sides[1] + 12, sides[3] + 12];
    this.placed = placePanels(this.frame.meta, this.layout.cells);
  }

  paint() {
    if (!this.frame) return;
    if (!this.layout) this.resize();
    if (!this.layout) return;
    if (this.moves) {
      this.started ??= performance.now();
      const lasts = getDuration(this.frame.meta) / this.player.speed;
      this.progress = Math.min(1, (performance.now() - this.started) / lasts);
    }
    fitCanvas(this.parts.canvas, this.stageWide, this.layout.high);
    this.painter.paint(this.layout, this.progress, this.focus, this.look, this.cursor);
    this.controls.update();
    this.controls.paint(this.look);
    if (!this.moves) return;
    this.moves = this.progress < 1;
    if (this.moves) this.request();
    else this.settle(this.frame.meta);
  }

  /** @type {(index: number) => void} */
  choose(index) {
    this.setFocus(index);
    if (!this.player.recorded) this.model.send({ focus: index });
  }

  /** @type {(index: number) => void} */
  setFocus(index) {
    const { frame } = this, message = frame?.meta.messages[index];
    if (!message) return;
    this.focus = index;
    this.strips.show(frame, index);
    this.parts.status.textContent = message.words.slice(0, 2).join(": ");
    this.request();
  }

  /** @type {(event: KeyboardEvent) => boolean} */
  handleKey(event) {
    if (this.table.element.contains(/** @type {Node} */ (event.target))) return false; // its keys scroll it
    return handleStepKey(event, this.actions, (down, across) => this.moveCursor(down, across));
  }

  /** Choose the message `by` after the chosen one.
   * @type {(by: number) => void} */
  turn(by) {
    const count = this.frame?.meta.messages.length;
    if (count) this.choose((this.focus + by + count) % count);
  }

  /** @type {(event: MouseEvent) => void} */
  hover(event) {
    const place = locatePointer(event, this.parts.canvas);
    this.point(findPixel(this.placed, ...place), ...place);
  }

  /** Choose the message whose pixels were clicked on its target, or else on its source.
   * @type {(event: MouseEvent) => void} */
  chooseAt(event) {
    this.parts.stage.focus({ preventScroll: true });
    const found = findPixel(this.placed, ...locatePointer(event, this.parts.canvas));
    if (!found) return;
    /** @type {(side: "source" | "target") => number} */
    const hits = (side) => this.frame?.meta.messages.findIndex(
      (message) => message[side] === found.rank && isInside(message.tile, found.row, found.col)) ?? -1;
    const index = hits("target") < 0 ? hits("source") : hits("target");
    if (index >= 0) this.choose(index);
  }

  /** Move the pixel that is read by keyboard.
   * @type {(down: number, across: number) => void} */
  moveCursor(down, across) {
    const moved = movePixel(this.placed, this.cursor, down, across);
    const place = moved && this.placed[moved.rank];
    if (!place) return;
    const { row, col } = moved;
    this.point(moved, ...findCentre(locateTile(place, [row, col, row + 1, col + 1])), true);
  }

  /** Show the value of a pixel beside (x, y), or nothing; `speaks` if it is read by keyboard.
   * @type {(pixel: StepPixel | null, x?: number, y?: number, speaks?: boolean) => void} */
  point(pixel, x = 0, y = 0, speaks = false) {
    const before = this.cursor, place = pixel && this.placed[pixel.rank];
    const changed = pixel?.rank !== before?.rank || pixel?.row !== before?.row || pixel?.col !== before?.col;
    this.cursor = pixel;
    if (!place || !this.frame) this.tooltip.hide();
    else {
      const lines = describePixel(this.frame, place, pixel);
      this.tooltip.show(lines, x, y + this.parts.canvas.offsetTop);
      if (speaks) this.parts.status.textContent = lines.join(", ");
    }
    if (changed) this.request();
  }
}

export default { render: makeRender((room) => new StepperView(room)) };
