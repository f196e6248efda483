// A training step on all ranks, to zoom into: the view of the widget TimelineView.

import { fitCanvas, getContext } from "../shared/canvas.js";
import {
  Tooltip, listenToKeys, makeElement, makeKeyHelp, prefersReducedMotion, readColours, readHeightLimit, setText,
} from "../shared/elements.js";
import { Textures } from "../shared/textures.js";
import { formatDuration } from "../shared/format.js";
import { unpackTables } from "../shared/tables.js";
import { boundHeight, followModel, makeFrameLoop, makeRender, watchSize, watchTheme } from "../shared/view_life.js";
import { Strips } from "./strips.js";
import { drawTimeline } from "./timeline_draw.js";
import { TIMELINE_KEYS, handleTimelineKey, listenToPointer } from "./timeline_input.js";
import { describeLeftOut } from "./timeline_layout.js";
import { drawMarks } from "./timeline_marks.js";
import { TimelineOverview, getOverviewHeight } from "./timeline_overview.js";
import { describeTimeline, fillLegend, fillShares, makeTimelineParts } from "./timeline_parts.js";
import { TimelineScene } from "./timeline_scene.js";

const GLIDE_MS = 140;
const HINT = "The wheel zooms, dragging moves, a click selects; over the ranks' names the wheel scrolls. Keys: the button ?.";

class TimelinePage {
  /** @param {Room<TimelineValues>} place */
  constructor({ model, el, signal }) {
    this.model = model;
    /** @type {{ from: TimeSpan, to: TimeSpan, since: number } | null} */
    this.glide = null;
    this.isTelling = false;
    this.root = makeElement("div", { class: "mpi4dl-page mpi4dl-timeline" });
    this.theme = readColours(this.root);
    this.scene = this.makeScene();
    this.places = new Int32Array(); // from an event's place in the kernel to its index here
    const all = () => ({ start: 0, end: this.scene.seconds });
    this.parts = makeTimelineParts({
      zoomIn: () => this.show(this.scene.zoom(2), true), zoomOut: () => this.show(this.scene.zoom(1 / 2), true),
      showAll: () => this.show(all(), true), goBack: () => this.choose(this.scene.findMatch(-1)),
      goOn: () => this.choose(this.scene.findMatch(1)),
    });
    const { title, shares, tools, room, leftOut, status, legend, canvas, overview } = this.parts;
    tools.append(makeKeyHelp(room, TIMELINE_KEYS));
    this.root.append(title, shares, tools, room, leftOut, status, legend);
    el.replaceChildren(this.root);
    this.tooltip = new Tooltip(room);
    this.overview = new TimelineOverview(overview);
    this.redraw = makeFrameLoop(() => this.draw(), signal);
    this.remark = makeFrameLoop(() => this.drawMarks(), signal);
    this.showStep();
    const follow = () => this.followKernel(), resize = () => this.resize();
    followModel(model, { "change:serial": () => this.readStep(), "change:selected change:rank": follow }, signal);
    watchSize(room, resize, signal);
    watchTheme(() => this.recolour(), signal);
    boundHeight(this.root, model, resize, signal);
    listenToPointer(canvas, this);
    this.overview.listen(this);
    this.listenToSearch(this.parts.search);
    listenToKeys(canvas, (event) => this.handleKey(event));
  }

  /** Read the step anew from the model: other events, words and shares. */
  readStep() {
    this.glide = null; // its spans are of the step before
    this.scene = this.makeScene();
    this.showStep();
  }

  /** Return the scene of the model's step.
   * @returns {DrawnScene} */
  makeScene() {
    const { model, theme } = this, words = model.get("words");
    const scene = new TimelineScene(unpackTables(model.get("columns")), words);
    const textures = new Textures(words.looks), strips = new Strips();
    return Object.assign(scene, { textures, strips, theme, pixelRatio: 1, fills: /** @type {LookFills} */ ([[], []]) });
  }

  showStep() {
    const { parts, scene: { words } } = this;
    this.places = new Int32Array(this.scene.events.measured);
    this.places.forEach((_, at) => { this.places[this.scene.events.place[at]] = at; });
    parts.canvas.setAttribute("aria-label", describeTimeline(words));
    parts.title.replaceChildren(...words.titles.map((text) => makeElement("span", { text })));
    parts.search.value = "";
    parts.status.textContent = HINT;
    this.search("");
    this.recolour();
    this.followKernel();
    this.resize();
  }

  /** Select what the kernel has selected. */
  followKernel() {
    if (this.isTelling) return;
    const { scene, model } = this, place = model.get("selected"), event = place < 0 ? -1 : this.places[place];
    if (event === scene.selected && model.get("rank") === scene.rank) return;
    scene.select(event);
    scene.rank = model.get("rank");
    if (scene.layout.width) this.show(scene.reveal(), true);
    this.tell(event);
  }

  /** Take over the page's colours, which may be those of another theme now. */
  recolour() {
    this.theme = readColours(this.root);
    fillShares(this.parts.shares, this.scene.words, this.theme);
    this.fillLegend();
    this.overview.forget();
    this.redraw();
  }

  fillLegend() {
    fillLegend(this.parts.legend, this.scene, this.theme, (name) => this.search(this.scene.query === name ? "" : name));
  }

  resize() {
    const { scene, parts } = this, width = parts.room.clientWidth, ratio = devicePixelRatio || 1;
    if (!width) return;
    this.recolour();
    // The rows take what the other parts leave of the height; the line below them depends on the width only. A pixel is
    // their last line's, and one is lost in rounding: else the view would scroll as its rows do.
    scene.resize(width);
    parts.leftOut.textContent = describeLeftOut(scene.layout);
    scene.resize(width, readHeightLimit(this.root) - this.root.scrollHeight + parts.stack.offsetHeight - 2);
    scene.pixelRatio = ratio;
    fitCanvas(this.parts.canvas, width, scene.layout.height);
    fitCanvas(this.parts.marks, width, scene.layout.height);
    fitCanvas(this.parts.overview, scene.layout.plot, getOverviewHeight(scene.lanes.length));
    this.parts.overview.style.marginLeft = `${scene.layout.left}px`;
    this.overview.forget();
    this.draw();
  }

  draw() {
    const { scene, parts } = this;
    if (!scene.layout.width) return;
    if (this.glide) this.advanceGlide(this.glide);
    scene.theme = this.theme;
    drawTimeline(getContext(parts.canvas), scene);
    this.drawMarks();
    this.overview.draw(scene);
    const { start, end } = scene.span;
    parts.shown.textContent = scene.isWhole ? `all ${formatDuration(scene.seconds)}`
      : `${formatDuration(end - start)} from ${formatDuration(start)}`;
  }

  drawMarks() {
    if (this.scene.layout.width) drawMarks(getContext(this.parts.marks), this.scene);
  }

  /** Show a span; `smooth` glides to it, unless the reader wants less motion.
   * @type {(span: TimeSpan, smooth?: boolean) => void} */
  show(span, smooth = false) {
    const glides = smooth && !prefersReducedMotion();
    this.glide = glides ? { from: this.scene.span, to: span, since: performance.now() } : null;
    if (!glides) this.scene.span = span;
    this.redraw();
  }

  /** @type {(glide: { from: TimeSpan, to: TimeSpan, since: number }) => void} */
  advanceGlide({ from, to, since }) {
    const part = Math.min((performance.now() - since) / GLIDE_MS, 1);
    const eased = 1 - (1 - part) ** 3;
    this.scene.span = part === 1 ? to
      : { start: from.start + (to.start - from.start) * eased, end: from.end + (to.end - from.end) * eased };
    if (part === 1) this.glide = null;
    else this.redraw();
  }

  /** Describe what is under the pointer.
   * @type {(x: number, y: number) => void} */
  hover(x, y) {
    const { scene, parts } = this, event = scene.findEvent(x, y);
    scene.cursor = x;
    parts.canvas.style.cursor = event >= 0 || scene.findRank(x, y) >= 0 ? "pointer" : "";
    if (event >= 0) this.tooltip.show(scene.describe(event), x, y + parts.stack.offsetTop);
    else this.tooltip.hide();
    if (event !== scene.hovered) {
      scene.hovered = event;
      this.tell(event >= 0 ? event : scene.selected);
    }
    this.remark();
  }

  leave() {
    this.scene.hovered = this.scene.cursor = -1;
    this.tooltip.hide();
    this.tell(this.scene.selected);
    this.remark();
  }

  /** Select what is at a point: an event, a rank by its name, or nothing.
   * @type {(x: number, y: number) => void} */
  press(x, y) {
    const event = this.scene.findEvent(x, y), rank = this.scene.findRank(x, y);
    this.parts.canvas.focus({ preventScroll: true });
    if (event >= 0) this.choose(event, false);
    else if (rank >= 0) this.clear(rank === this.scene.rank && this.scene.selected < 0 ? -1 : rank);
    else this.clear();
  }

  /** Select an event, also in the kernel; `moves` shows it where it is out of view.
   * @type {(event: number, moves?: boolean) => void} */
  choose(event, moves = true) {
    const { scene } = this;
    if (event < 0) return;
    if (scene.select(event)) this.tellKernel();
    if (moves) this.show(scene.reveal(), true);
    this.tell(scene.selected);
    this.redraw();
  }

  /** @type {(rank?: number) => void} */
  clear(rank = -1) {
    this.scene.selected = -1;
    this.scene.rank = rank;
    this.tellKernel();
    this.tell(-1);
    this.redraw();
  }

  tellKernel() {
    const { selected, rank, events } = this.scene;
    this.isTelling = true; // `set` calls observers at once, while only one of the two values is new
    this.model.set("selected", selected < 0 ? -1 : events.place[selected]);
    this.model.set("rank", rank);
    this.isTelling = false;
    this.model.save_changes();
  }

  /** @type {(event: number) => void} */
  tell(event) {
    setText(this.parts.status, event < 0 ? HINT : this.scene.describe(event).join(" · "));
  }

  /** Search for a text, in the box too.
   * @type {(text: string) => void} */
  search(text) {
    const { scene, parts } = this;
    if (parts.search.value.trim() !== text) parts.search.value = text;
    scene.search(text);
    const [found, of] = [scene.matchCount, scene.events.measured].map((each) => each.toLocaleString("en"));
    parts.count.textContent = scene.found ? `${found} of ${of} events` : "";
    for (const stepper of parts.steppers) stepper.setAttribute("aria-disabled", String(!scene.matchCount));
    this.fillLegend();
    this.redraw();
  }

  /** @type {(event: KeyboardEvent) => boolean} */
  handleKey(event) {
    const act = handleTimelineKey(this.scene, event);
    if (act?.span) this.show(act.span, true);
    else if (act?.action === "search") this.parts.search.focus();
    else if (act?.action === "clear") this.clear();
    else if (act?.event !== undefined) this.choose(act.event);
    return act !== null;
  }

  /** @type {(search: HTMLInputElement) => void} */
  listenToSearch(search) {
    search.addEventListener("input", () => this.search(search.value.trim()));
    search.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (event.key === "Enter") this.choose(this.scene.findMatch(event.shiftKey ? -1 : 1));
      else if (event.key === "Escape") this.search("");
    });
  }
}

export default { render: makeRender((place) => new TimelinePage(place)) };
