// A debugged step on the page: all ranks, what moves between them, and a record of every instruction that has run.
import { fitCanvas } from "../shared/canvas.js";
import {
  boundHeight, makeFrameLoop, prefersReducedMotion, readHeightLimit, Tooltip, watchTheme,
} from "../shared/elements.js";
import { findPixel, locateTile, placePanels, placeRanks } from "./exchange_layout.js";
import { ExchangePainter } from "./exchange_paint.js";
import { MessageStrips } from "./message_strips.js";
import { clamp, copyBytes } from "../shared/numbers.js";
import { isInside } from "../shared/rectangles.js";
import { makeCaption, readLook } from "./step_caption.js";
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
  constructor(model, el) {
    this.model = model;
    this.setup = model.get("setup");
    this.store = new FrameStore();
    this.player = new StepPlayer(this.store, {
      show: (index, moves) => this.show(index, moves),
      ask: (key, asked) => model.send({ key, asked }),
      tell: () => this.request(),
    });
    this.painter = new ExchangePainter(this.setup, new Uint8Array(copyBytes(model.get("palettes"))));
    this.actions = makeKeyActions(this.player, model, (by) => this.turn(by));
    const runs = model.get("runs");
    this.controls = new StepControls(this.player, runs, (key) => this.actions[key]());
    this.strips = new MessageStrips(this.painter.palettes, (index) => this.choose(index));
    this.table = new StepTable(this.setup);
    const keys = [...runs.map(([key, , does]) => [key, does]), ...(runs.length ? [["g", "gradient or activation"]] : [])];
    Object.assign(this, makeStepParts(this.controls, this.strips, this.table, [...keys, ...RECORD_KEYS]));
    this.caption.style.setProperty("--lines", clamp(this.setup.boxes.length, 2, 3));
    this.tooltip = new Tooltip(this.stage);
    Object.assign(this, { focus: 0, progress: 1 });
    this.request = makeFrameLoop(() => this.paint());
    el.append(this.root);
    this.root.addEventListener("keydown", (event) => this.handleKey(event));
    this.stage.addEventListener("pointermove", (event) => this.hover(event));
    this.stage.addEventListener("pointerleave", () => this.point(null));
    this.stage.addEventListener("click", (event) => this.chooseAt(event));
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.root);
    this.stops = [watchTheme(() => this.resize()), boundHeight(this.root, model, () => this.resize())];
    this.controls.showTrouble(model.get("trouble"));
    this.connect();
    this.take();
    if (!this.setup.saved) model.send({ newest: true });
    else if (model.get("meta").number || model.get("unavailable")) model.send({ history: true });
  }

  connect() {
    const { model } = this;
    this.listeners = [
      ["change:meta", () => this.take()],
      ["change:focus", () => { if (!this.player.recorded) this.setFocus(model.get("focus")); }],
      ["change:alt", () => this.tellAlt()],
      ["change:trouble", () => this.controls.showTrouble(model.get("trouble"))],
      ["msg:custom", (content, buffers) => this.receive(content, buffers)],
    ];
    this.listeners.forEach(([name, act]) => model.on(name, act));
  }

  close() {
    this.listeners.forEach(([name, act]) => this.model.off(name, act));
    this.observer.disconnect();
    for (const stop of this.stops) stop();
    this.request.cancel();
    clearTimeout(this.timer);
    clearTimeout(this.resting);
    this.player.playing = false;
  }

  take() {
    if (this.model.get("meta").ranks) this.player.take(this.model.get("meta"), this.model.get("values"));
    this.plan();
  }

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
      if (this.model.get("unavailable")) this.status.textContent = content.refused;
      else this.controls.showTrouble(content.refused);
    }
    if (content.answered) this.player.answer(content.answered);
  }

  /** After a second without anything new, let the kernel draw the picture that a saved page shows. */
  plan() {
    clearTimeout(this.resting);
    this.resting = setTimeout(() => this.player.playing ? this.plan() : this.model.send({ rest: true }), REST_MS);
  }

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
    this.painter.setFrame(frame, this.placed ?? [], this.moves);
    this.table.update(frame.meta);
    this.strips.show(frame, this.focus);
    this.caption.replaceChildren(...frame.meta.groups.map((group) => makeCaption(group, this.painter.palettes)));
    this.tellAlt();
    this.point(null);
    clearTimeout(this.timer);
    if (!this.moves) this.settle();
    else this.comeIntoSight();
    this.request();
  }

  /** Scroll as little as needed for a motion to be seen, if its button, which may be far above, was pressed here. */
  comeIntoSight() {
    const output = this.root.closest(".jp-OutputArea, .output_area") ?? this.root;
    if (output.contains(document.activeElement)) this.stage.scrollIntoView({ block: "nearest" });
  }

  tellAlt() {
    this.words.textContent = this.player.recorded ? `Recorded. ${this.frame.meta.title}` : this.model.get("alt");
  }

  /** The motion has ended: tell what has moved, and let the player go on. */
  settle() {
    const { title, messages, sums } = this.frame.meta, moved = messages[this.focus]?.words.slice(0, 2).join(": ");
    this.status.textContent = [title, moved, ...sums.map((sum) => sum.words)].filter(Boolean).join(". ");
    this.timer = setTimeout(() => this.player.rest(), PAUSE_MS / this.player.speed);
  }

  resize() {
    this.measure();
    this.arrange();
    if (this.placed) this.painter.setFrame(this.frame, this.placed, false);  // the page may have been hidden until now
    this.request();
  }

  /** Measure the room of the ranks. All other parts have a height of their own, whatever a frame has to say. */
  measure() {
    const style = getComputedStyle(this.root);
    this.wide = this.root.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
    this.room = readHeightLimit(this.root) - this.root.scrollHeight + this.scene.offsetHeight;
    this.hasNumbers = getComputedStyle(this.strips.element).display !== "none";
    this.look = readLook(this.root);
  }

  arrange() {
    if (!(this.wide > 0) || !this.frame) return;
    const { setup, room, wide, hasNumbers } = this, most = clamp(room - FRAME_PX, LEAST_PX, MOST_PX);
    // Beside the numbers a row of many stages would be low: it gets the whole width, and the numbers lie below it.
    const beside = hasNumbers ? placeRanks(setup, wide - STRIPS_PX - 24, most) : null;
    const isFlat = !beside || beside.high < Math.min(FLAT_PX, 0.75 * most), below = hasNumbers ? FLAT_STRIPS_PX : 0;
    this.scene.classList.toggle("mpi4dl-flat", isFlat);
    this.layout = isFlat ? placeRanks(setup, wide - 26, clamp(room - FRAME_PX - below, LEAST_PX, MOST_PX)) : beside;
    this.stageWide = (isFlat ? wide : wide - STRIPS_PX) - 2;
    const strips = isFlat ? 0 : Math.max(this.layout.high + 2, Math.min(STRIPS_HIGH_PX, room));
    this.strips.fit(strips, isFlat ? wide < BESIDE_PX : strips < STRIPS_HIGH_PX);
    for (const each of [...this.layout.boxes, ...this.layout.cells]) each[0] += 12;
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
    const context = fitCanvas(this.canvas, this.stageWide, this.layout.high);
    context.clearRect(0, 0, this.stageWide, this.layout.high);
    this.painter.paint(context, this.layout, this.progress, this.focus, this.look, this.cursor);
    this.controls.update();
    this.controls.paint(this.look);
    if (!this.moves) return;
    this.moves = this.progress < 1;
    if (this.moves) this.request();
    else this.settle();
  }

  choose(index) {
    this.setFocus(index);
    if (!this.player.recorded) this.model.send({ focus: index });
  }

  setFocus(index) {
    const message = this.frame?.meta.messages[index];
    if (!message) return;
    this.focus = index;
    this.strips.show(this.frame, index);
    this.status.textContent = message.words.slice(0, 2).join(": ");
    this.request();
  }

  handleKey(event) {
    if (this.table.element.contains(event.target)) return; // its keys scroll it
    handleStepKey(event, this.actions, (down, across) => this.moveCursor(down, across));
  }

  /** Choose the message `by` after the chosen one. */
  turn(by) {
    const count = this.frame?.meta.messages.length;
    if (count) this.choose((this.focus + by + count) % count);
  }

  hover(event) {
    const place = this.locate(event);
    this.point(findPixel(this.placed ?? [], ...place), ...place);
  }

  /** Return the place [x, y] of an event in the picture. */
  locate(event) {
    const { left, top } = this.canvas.getBoundingClientRect();
    return [event.clientX - left, event.clientY - top];
  }

  /** Choose the message whose pixels were clicked on its target, or else on its source. */
  chooseAt(event) {
    this.stage.focus({ preventScroll: true });
    const found = findPixel(this.placed ?? [], ...this.locate(event));
    if (!found) return;
    const hits = (side) => this.frame.meta.messages.findIndex(
      (message) => message[side] === found.rank && isInside(message.tile, found.row, found.col));
    const index = hits("target") < 0 ? hits("source") : hits("target");
    if (index >= 0) this.choose(index);
  }

  /** Move the pixel that is read by keyboard. */
  moveCursor(down, across) {
    const moved = movePixel(this.placed ?? [], this.cursor, down, across);
    if (!moved) return;
    const { rank, row, col } = moved;
    const [left, top, width, height] = locateTile(this.placed[rank], [row, col, row + 1, col + 1]);
    this.point(moved, left + width / 2, top + height / 2, true);
  }

  /** Show the value of a pixel beside (x, y), or nothing; `speaks` if it is read by keyboard. */
  point(pixel, x, y, speaks = false) {
    const changed = ["rank", "row", "col"].some((name) => pixel?.[name] !== this.cursor?.[name]);
    this.cursor = pixel;
    if (!pixel) this.tooltip.hide();
    else {
      const lines = describePixel(this.frame, this.placed[pixel.rank], pixel);
      this.tooltip.show(lines, x, y + this.canvas.offsetTop);
      if (speaks) this.status.textContent = lines.join(", ");
    }
    if (changed) this.request();
  }
}

function render({ model, el }) {
  const view = new StepperView(model, el);
  return () => view.close();
}

export default { render };
