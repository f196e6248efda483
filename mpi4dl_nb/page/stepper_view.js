// A debugged step on the page: all ranks, what moves between them, and a record of every instruction that has run.
import { makeElement, makeFrameLoop, prefersReducedMotion, readTheme, Tooltip } from "./elements.js";
import { findPixel, isInside, placePanels, placeRanks } from "./exchange_layout.js";
import { ExchangePainter } from "./exchange_paint.js";
import { MessageStrips } from "./message_strips.js";
import { StepControls } from "./step_controls.js";
import { FrameStore, formatNumber, getDuration, readValues } from "./step_frames.js";
import { StepPlayer } from "./step_player.js";
import { StepTable } from "./step_table.js";

const PAUSE_MS = 260, REST_MS = 1000, MOST_PX = 430;
const MOVES = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

/** The parts of the view, joined: the frames of `model` go to the player, and what it shows to all parts. */
class StepperView {
  constructor(model, el) {
    this.model = model;
    this.setup = model.get("setup");
    const view = model.get("palettes"), palettes = new Uint8Array(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));
    this.store = new FrameStore();
    this.player = new StepPlayer(this.store, {
      show: (index, moves) => this.show(index, moves),
      ask: (key) => model.send({ key }),
      tell: () => this.request(),
    });
    this.painter = new ExchangePainter(this.setup, palettes);
    this.controls = new StepControls(this.player);
    this.strips = new MessageStrips(this.painter.palettes, (index) => this.choose(index));
    this.table = new StepTable(this.setup);
    this.canvas = makeElement("canvas", { "aria-hidden": "true" });
    this.caption = makeElement("div", { class: "mpi4dl-step-caption" });
    this.words = makeElement("div", { class: "mpi4dl-hidden", id: `mpi4dl-${Math.random().toString(36).slice(2)}` });
    this.status = makeElement("div", { class: "mpi4dl-hidden", role: "status", "aria-live": "polite" });
    this.stage = makeElement("div", {
      class: "mpi4dl-stage", tabindex: "0", role: "application", "aria-label": "Ranks of the debugged step",
      "aria-describedby": this.words.id, "data-lm-suppress-shortcuts": "true",
    }, this.canvas);
    this.tooltip = new Tooltip(this.stage);
    this.focus = 0;
    this.progress = 1;
    this.request = makeFrameLoop(() => this.paint());
    const scene = makeElement("div", { class: "mpi4dl-step-scene" }, this.stage, this.strips.element);
    this.root = makeElement("div", { class: "mpi4dl-page mpi4dl-stepper" },
      this.controls.element, this.caption, scene, this.table.element, this.words, this.status);
    el.append(this.root);
    this.root.addEventListener("keydown", (event) => this.handleKey(event));
    this.stage.addEventListener("pointermove", (event) => this.hover(event));
    this.stage.addEventListener("pointerleave", () => this.point(null));
    this.stage.addEventListener("click", (event) => this.chooseAt(event));
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.stage);
    this.connect();
    this.take();
    if (model.get("meta").number) model.send({ history: true });
  }

  connect() {
    const { model } = this;
    this.listeners = [
      ["change:meta", () => this.take()],
      ["change:focus", () => { if (!this.player.recorded) this.setFocus(model.get("focus")); }],
      ["change:alt", () => this.tellAlt()],
      ["msg:custom", (content, buffers) => this.receive(content, buffers)],
    ];
    for (const [name, act] of this.listeners) model.on(name, act);
  }

  close() {
    for (const [name, act] of this.listeners) this.model.off(name, act);
    this.observer.disconnect();
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
    if (content.history) this.player.takeHistory(content.history, buffers);
    if (content.refused) {
      this.player.refuse();
      this.status.textContent = content.refused;
    }
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
    this.focus = this.player.recorded ? 0 : Math.min(this.model.get("focus"), Math.max(0, frame.meta.messages.length - 1));
    this.cursor = null;
    this.frame = frame;
    this.arrange();
    this.painter.setFrame(frame, this.placed ?? [], this.moves);
    this.table.update(frame.meta);
    this.strips.show(frame, this.focus);
    this.caption.replaceChildren(...frame.meta.groups.map(({ title, span, gradient, panels }) => makeElement("span", {},
      makeElement("b", { text: title[0] }), ` ${title.slice(1).join(", ")} `, this.makeScale(span, gradient),
      panels.length < frame.meta.ranks.length ? ` (${panels.length > 1 ? "ranks" : "rank"} ${panels.map((each) => each.rank).join(", ")})` : "")));
    this.tellAlt();
    this.point(null);
    clearTimeout(this.timer);
    if (!this.moves) this.settle();
    this.request();
  }

  makeScale([low, high], gradient) {
    const palette = this.painter.palettes[Number(gradient)];
    const stops = [0, 64, 128, 192, 255].map((at) => `rgb(${palette.slice(4 * at, 4 * at + 3).join(" ")})`);
    const bar = makeElement("span", { class: "mpi4dl-scale", "aria-hidden": "true" });
    bar.style.background = `linear-gradient(90deg, ${stops.join(", ")})`;
    return makeElement("span", { class: "mpi4dl-nowrap" }, formatNumber(low), bar, formatNumber(high));
  }

  tellAlt() {
    this.words.textContent = this.player.recorded ? `Recorded. ${this.frame?.meta.title ?? ""}` : this.model.get("alt");
    this.stage.title = "";
  }

  /** The motion has ended: tell what has moved, and let the player go on. */
  settle() {
    const message = this.frame.meta.messages[this.focus], moved = this.frame.meta.sums.map((sum) => sum.words);
    this.status.textContent = [this.frame.meta.title, message?.words.slice(0, 2).join(": "), ...moved].filter(Boolean).join(". ");
    this.timer = setTimeout(() => this.player.rest(), PAUSE_MS / this.player.speed);
  }

  resize() {
    this.arrange();
    if (this.placed) this.painter.place(this.placed);
    this.request();
  }

  arrange() {
    const wide = this.stage.clientWidth;
    if (!wide || !this.frame) return;
    this.layout = placeRanks(this.setup, wide - 24, MOST_PX);
    for (const each of [...this.layout.boxes, ...this.layout.cells]) each[0] += 12;
    this.placed = placePanels(this.frame.meta, this.layout.cells);
    const [width, height] = [wide, this.layout.high].map((each) => Math.round(each * devicePixelRatio));
    if (this.canvas.width !== width || this.canvas.height !== height) {
      Object.assign(this.canvas, { width, height });
      this.canvas.style.height = `${this.layout.high}px`;
    }
    const theme = (name, fallback) => readTheme(this.root, name, fallback);
    this.look = {
      ink: theme("--ink", "#1f2328"), faint: theme("--faint", "#57606a"), paper: theme("--paper", "#fff"),
      panel: theme("--panel", "#f3f4f6"), line: theme("--line", "#c4c8cc"), brand: theme("--brand", "#1976d2"),
      tint: "rgb(255 255 255 / 32%)", hatch: "rgb(0 0 0 / 60%)",
    };
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
    const context = this.canvas.getContext("2d"), ratio = devicePixelRatio;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    this.painter.paint(context, this.layout, this.progress, this.focus, this.look, this.cursor);
    this.controls.update();
    this.controls.paint(this.look);
    if (this.moves && this.progress < 1) this.request();
    else if (this.moves) {
      this.moves = false;
      this.settle();
    }
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
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "SELECT") return;
    if (this.pressKey(event)) {
      event.preventDefault();
      event.stopPropagation();
    }
  }

  pressKey({ key, shiftKey, target }) {
    const { player } = this, count = this.frame?.meta.messages.length ?? 0;
    if (key === " " && target.tagName === "BUTTON") return false;
    if (shiftKey && MOVES[key]) this.moveCursor(...MOVES[key]);
    else if (key === "ArrowLeft") player.back();
    else if (key === "ArrowRight") { player.pause(); player.step(); }
    else if (key === "Home" || key === "End") { player.pause(); player.seek(key === "Home" ? 0 : this.store.last); }
    else if (key === "PageUp" || key === "PageDown") { player.pause(); player.seek(player.index + (key === "PageUp" ? -10 : 10)); }
    else if (key === " ") player.playing ? player.pause() : player.play();
    else if (key === "[" && count) this.choose((this.focus + count - 1) % count);
    else if (key === "]" && count) this.choose((this.focus + 1) % count);
    else if (this.model.get("accepts").includes(key)) { player.pause(); key === "g" ? this.model.send({ key }) : player.go(key); }
    else return false;
    return true;
  }

  hover(event) {
    const { left, top } = this.stage.getBoundingClientRect();
    if (this.placed) this.point(findPixel(this.placed, event.clientX - left, event.clientY - top), event.clientX - left, event.clientY - top);
  }

  /** Choose the message whose pixels were clicked on its target, or else on its source. */
  chooseAt(event) {
    this.stage.focus();
    const { left, top } = this.stage.getBoundingClientRect(), found = findPixel(this.placed ?? [], event.clientX - left, event.clientY - top);
    if (!found) return;
    const hits = (side) => this.frame.meta.messages.findIndex(
      (message) => message[side] === found.rank && isInside(message.tile, found.row, found.col));
    const index = hits("target") < 0 ? hits("source") : hits("target");
    if (index >= 0) this.choose(index);
  }

  /** Move the pixel that is read by keyboard, from the middle of the first rank on. */
  moveCursor(down, across) {
    const place = this.placed?.[this.cursor?.rank ?? this.placed.findIndex(Boolean)];
    if (!place) return;
    const { held, rank } = place.panel, limit = (value, low, high) => Math.min(Math.max(value, low), high - 1);
    const at = this.cursor ?? { row: (held[0] + held[2]) >> 1, col: (held[1] + held[3]) >> 1 };
    const moved = { rank, row: at.row + down, col: at.col + across };
    // At the edge of what a rank holds, the cursor goes on in the rank that owns the next pixel.
    const next = place.group.panels.find(({ own }) => isInside(own, moved.row, moved.col));
    if (!isInside(held, moved.row, moved.col) && next) moved.rank = next.rank;
    else Object.assign(moved, { row: limit(moved.row, held[0], held[2]), col: limit(moved.col, held[1], held[3]) });
    const { rectangle, scale, panel } = this.placed[moved.rank];
    this.point(moved, rectangle[0] + (moved.col - panel.held[1] + 0.5) * scale[0], rectangle[1] + (moved.row - panel.held[0] + 0.5) * scale[1], true);
  }

  /** Show the value of a pixel beside (x, y), or nothing; `speaks` if it is read by keyboard. */
  point(pixel, x, y, speaks = false) {
    const changed = pixel?.row !== this.cursor?.row || pixel?.col !== this.cursor?.col || pixel?.rank !== this.cursor?.rank;
    this.cursor = pixel;
    if (!pixel) this.tooltip.hide();
    else {
      const lines = this.describePixel(pixel);
      this.tooltip.show(lines, x, y);
      if (speaks) this.status.textContent = lines.join(", ");
    }
    if (changed) this.request();
  }

  describePixel({ rank, row, col }) {
    const { panel, group } = this.placed[rank], values = readValues(this.frame, panel.values);
    const at = values && Math.floor((row - panel.held[0]) / panel.blockPx) * values.wide + Math.floor((col - panel.held[1]) / panel.blockPx);
    const owner = group.panels.find(({ own }) => isInside(own, row, col));
    const inside = group.size.length < 2 || isInside([0, 0, ...group.size], row, col);
    const whose = isInside(panel.own, row, col) ? "own pixel" : !inside ? "beyond the image: padding"
      : owner ? `halo, owned by rank ${owner.rank}` : "halo";
    const lands = this.frame.meta.messages.find((each) => each.target === rank && isInside(each.tile, row, col));
    return [
      `rank ${rank}, row ${row}, column ${col}`,
      `${group.gradient ? "gradient" : "value"} ${values ? formatNumber(values.numbers[at]) : "not kept"}`
        + (panel.blockPx > 1 ? `, mean of ${panel.blockPx} × ${panel.blockPx} px` : ""),
      whose, ...(lands ? [`arrived from rank ${lands.source} now`] : []),
    ];
  }
}

function render({ model, el }) {
  const view = new StepperView(model, el);
  return () => view.close();
}

export default { render };
