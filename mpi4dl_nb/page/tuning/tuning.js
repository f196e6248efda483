// Plans in a chart of time against memory, to choose one of and to measure it: the view of the widget TuningView.

import { Tooltip, listenToKeys, makeButton, makeElement, makeSvg, readHeightLimit, setText } from "../shared/elements.js";
import { formatBytes, formatDuration } from "../shared/format.js";
import { clamp } from "../shared/numbers.js";
import { locatePointer } from "../shared/pointer_drag.js";
import { boundHeight, followModel, makeRender, watchSize } from "../shared/view_life.js";
import {
  drawPointShape, findNearestPoint, findNextPoint, layOutPoints, makeAxisTicks, makeByteTicks, shortenZeros,
  traceFront,
} from "./tuning_layout.js";

const REACH_PX = 16, LEGEND_PX = 70, SIDE_PX = 240;
const KEYS_HINT = "← → go to the next plan by memory, ↑ ↓ by time, Home and End to the first and last; m measures.";
const MOVES = ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"];
const CHOSEN = "the chosen plan", UNFIT = "a plan that does not fit";

class TuningPage {
  /** @param {Room<TuningValues>} room */
  constructor({ model, el, signal }) {
    this.model = model;
    this.marked = -1;
    /** @type {TuningLayout | null} */
    this.layout = null;
    this.root = makeElement("div", { class: "mpi4dl-page mpi4dl-tuning" });
    this.ring = makeSvg("g");
    this.chart = makeSvg("svg", {
      class: "mpi4dl-tuning-chart", tabindex: 0, role: "application", "aria-roledescription": "chart of plans",
      "data-lm-suppress-shortcuts": "true",
    });
    this.room = makeElement("div", { class: "mpi4dl-tuning-room" }, this.chart);
    this.name = makeElement("h3", {});
    this.facts = makeElement("dl", {});
    this.status = makeElement("div", { class: "mpi4dl-hidden", role: "status", "aria-live": "polite" });
    this.unavailable = model.get("unavailable"); // of a saved page: why nothing can be measured
    this.measure = makeButton("Measure this plan", this.unavailable, () => this.askToMeasure());
    this.legend = makeElement("div", { class: "mpi4dl-tuning-legend" });
    this.side = makeElement("section", { class: "mpi4dl-tuning-side", "aria-label": CHOSEN },
      this.name, this.facts, this.measure);
    this.root.append(makeElement("div", { class: "mpi4dl-tuning-main" },
      makeElement("div", {}, this.room, this.legend), this.side), this.status);
    el.replaceChildren(this.root);
    this.tooltip = new Tooltip(this.room);
    const draw = () => this.drawChart(), follow = () => this.mark(this.chosen);
    followModel(model, { "change:words": draw, "change:chosen change:busy": follow }, signal);
    watchSize(this.room, draw, signal);
    this.listen();
    boundHeight(this.root, model, draw, signal);
  }

  get points() {
    return this.model.get("words").points ?? [];
  }

  /** The place of the chosen plan among the points, which changes when they are sorted anew. */
  get chosen() {
    return this.points.findIndex((each) => each.plan === this.model.get("chosen"));
  }

  drawChart() {
    const words = this.model.get("words"), width = this.room.clientWidth;
    if (!words.points || !words.points.length || !width) return;
    const isBelow = this.side.offsetTop > this.room.offsetTop; // in a narrow cell, the chosen plan: both are to be seen
    const room = readHeightLimit(this.root) - LEGEND_PX - (isBelow ? SIDE_PX : 0);
    const height = clamp(width * 0.56, 200, clamp(room, 200, 430));
    const layout = this.layout = layOutPoints(words.points, words.rank_bytes, width, height);
    Object.entries({ width, height, viewBox: `0 0 ${width} ${height}` }).forEach(([name, value]) =>
      this.chart.setAttribute(name, String(value)));
    this.chart.setAttribute("aria-label", `${this.points.length} plans by memory of the fullest rank and time for an ` +
      `image; ${this.points.filter((each) => each.on_front).length} of them are on the front. ${KEYS_HINT}`);
    this.ring = makeSvg("g", { class: "mpi4dl-tuning-mark" });
    this.chart.replaceChildren(...this.drawAxes(words, layout), ...this.drawFront(layout), this.ring,
      ...this.drawPoints(words, layout));
    this.drawLegend(words);
    this.mark(this.chosen);
  }

  /** @type {(words: TuningWords, layout: TuningLayout) => Element[]} */
  drawAxes({ rank_bytes: limit }, { inner, across, down, place }) {
    const [top, left, bottom, right] = inner;
    /** @type {Element[]} */
    const parts = [];
    /** @type {(words: string, x: number, y: number, anchor: string, more?: Attributes) => Element} */
    const text = (words, x, y, anchor, more = {}) => makeSvg("text", { x, y, "text-anchor": anchor, ...more }, words);
    for (const [bytes, label] of makeByteTicks(across, (right - left) / 90)) {
      const [x] = place(down.low, bytes);
      parts.push(makeSvg("path", { class: "mpi4dl-tuning-grid", d: `M${x} ${top}V${bottom}` }),
        text(label, x, bottom + 17, "middle"));
    }
    for (const seconds of makeAxisTicks(down, 1e-3, (bottom - top) / 44)) {
      const [, y] = place(seconds, across.low);
      parts.push(makeSvg("path", { class: "mpi4dl-tuning-grid", d: `M${left} ${y}H${right}` }),
        text(shortenZeros(formatDuration(seconds)), left - 8, y + 4, "end"));
    }
    parts.push(text("memory of the fullest rank", (left + right) / 2, bottom + 38, "middle"),
      text("time for an image: lower is faster", 6, 14, "start"));
    const isExceeded = limit !== null && this.points.some((each) => each.bytes > limit);
    if (limit && limit <= across.high) {
      const [x] = place(down.low, limit);
      const inside = right - x > 150, beyond = { x, y: top, width: right - x, height: bottom - top };
      parts.push(makeSvg("rect", { class: "mpi4dl-tuning-beyond", ...beyond }),
        makeSvg("path", { class: `mpi4dl-tuning-limit${isExceeded ? " exceeded" : ""}`, d: `M${x} ${top}V${bottom}` }),
        text(`a rank may hold ${formatBytes(limit)}`, inside ? x + 6 : x - 6, top + 14, inside ? "start" : "end",
          { class: `mpi4dl-tuning-limit-text${isExceeded ? " exceeded" : ""}` }));
    }
    return parts;
  }

  /** @type {(layout: TuningLayout) => Element[]} */
  drawFront({ places }) {
    const corners = traceFront(this.points, places);
    const way = `M${corners.map((each) => each.join(" ")).join("L")}`;
    return corners.length ? [makeSvg("path", { class: "mpi4dl-tuning-front", d: way })] : [];
  }

  /** @type {(words: TuningWords, layout: TuningLayout) => Element[]} */
  drawPoints({ points, kinds }, { places }) {
    const order = points.map((_, at) => at).sort((a, b) => this.rankOf(points[a]) - this.rankOf(points[b]));
    return order.map((at) => {
      const { kind, number, failure } = points[at], { predicted, measured } = places[at];
      const { colour, shape } = kinds[kind], end = measured ?? predicted;
      const group = makeSvg("g", { class: `mpi4dl-tuning-point${number ? "" : " too-large"}`, style: `--kind: ${colour}` });
      if (measured) {
        group.append(makeSvg("path", { class: "way", d: `M${predicted.join(" ")}L${measured.join(" ")}` }),
          makeSvg("path", { class: "was", d: drawPointShape(shape, 4), transform: `translate(${predicted})` }));
      }
      /** @type {(name: string, d: string) => void} */
      const add = (name, d) => group.append(makeSvg("path", { class: name, d, transform: `translate(${end})` }));
      add(measured ? "measured" : "predicted", drawPointShape(shape, measured ? 7.5 : 6));
      if (failure) add("fault", "M-6-6L6 6M6-6L-6 6");
      return group;
    });
  }

  // What is drawn later lies on top: the front above others, measured plans above all.
  /** @type {(point: TuningPoint) => number} */
  rankOf(point) {
    return (point.number ? 1 : 0) + (point.on_front ? 1 : 0) + (point.measured_image_s ? 2 : 0);
  }

  /** @type {(words: TuningWords) => void} */
  drawLegend({ kinds, points }) {
    /** @type {(d: string, name: string, colour: string, kind?: string) => Element} */
    const entry = (d, name, colour, kind = "predicted") => {
      const box = { width: 20, height: 18, viewBox: "-10 -9 20 18", "aria-hidden": "true" };
      const mark = makeSvg("g", { class: "mpi4dl-tuning-point" }, makeSvg("path", { class: kind, d }));
      return makeElement("span", {}, makeSvg("svg", { ...box, style: `--kind: ${colour}` }, mark), name);
    };
    const shown = Object.values(kinds).map(({ name, colour, shape }) => entry(drawPointShape(shape, 6), name, colour));
    shown.push(entry("M-9-4H0V4H9", "front: none is better in both", "var(--ink)", "mpi4dl-tuning-front"));
    if (points.some((each) => each.measured_image_s))
      shown.push(entry(drawPointShape("circle", 7), "filled: measured, by its prediction", "var(--faint)", "measured"));
    if (points.some((each) => !each.number))
      shown.push(entry(drawPointShape("circle", 6), "dashed: does not fit", "var(--faint)", "predicted dashed"));
    this.legend.replaceChildren(...shown);
  }

  /** Mark a plan and describe it beside the chart.
   * @type {(at: number) => void} */
  mark(at) {
    const point = this.points[at];
    if (!point || !this.layout) return;
    this.marked = at;
    const { predicted, measured } = this.layout.places[at], [x, y] = measured ?? predicted;
    /** @type {(name: string) => Element} */
    const ring = (name) => makeSvg("circle", { class: name, cx: x, cy: y, r: 13 });
    this.ring.replaceChildren(ring("edge"), ring("ring"));
    this.describe(point);
  }

  /** Mark a plan, and let the kernel know that it is chosen; one that does not fit is only described.
   * @type {(at: number) => void} */
  choose(at) {
    this.mark(at);
    const point = this.points[at];
    if (!point?.number) return;
    this.model.set("chosen", point.plan);
    this.model.save_changes();
    this.model.send({ choose: point.plan }); // at once: the model's state waits until the kernel has the one before
  }

  /** @type {(point: TuningPoint) => void} */
  describe(point) {
    this.name.textContent = point.number ? `${point.number}. ${point.name}` : point.name;
    this.side.setAttribute("aria-label", point.number ? CHOSEN : UNFIT);
    this.facts.replaceChildren(...point.facts.map(([name, text]) =>
      makeElement("div", {}, makeElement("dt", { text: name }), makeElement("dd", { text }))));
    this.measure.setAttribute("aria-disabled",
      String(!point.number || this.model.get("busy") || Boolean(this.unavailable)));
    setText(this.status, this.tell(point).join(". "));
  }

  /** @type {(point: TuningPoint) => string[]} */
  tell(point) {
    const name = point.number ? `Plan ${point.number}: ${point.name}` : `${point.name}, ${UNFIT}`;
    return [name, ...point.facts.map((fact) => fact.join(": "))];
  }

  /** Let the kernel measure the plan that is marked. The message names it, since the traits may lag behind. */
  askToMeasure() {
    const point = this.points[this.marked];
    if (!point || this.model.get("busy")) return;
    if (this.unavailable) this.status.textContent = this.unavailable;
    else if (point.number) this.model.send({ measure: point.plan });
    else this.status.textContent = `${point.name} cannot be measured: it does not fit.`;
  }

  listen() {
    /** @type {(event: MouseEvent) => [number, number, number]} */
    const find = (event) => {
      const [x, y] = locatePointer(event, this.chart);
      return [this.layout ? findNearestPoint(this.layout.places, x, y, REACH_PX) : -1, x, y];
    };
    this.chart.addEventListener("pointermove", (event) => {
      const [at, x, y] = find(event);
      this.chart.style.cursor = at < 0 ? "" : "pointer";
      if (at < 0) this.tooltip.hide();
      else this.tooltip.show(this.tell(this.points[at]).slice(0, 4), x, y);
    });
    this.chart.addEventListener("pointerleave", () => this.tooltip.hide());
    this.chart.addEventListener("click", (event) => this.choose(find(event)[0]));
    listenToKeys(this.chart, ({ key }) => {
      if (MOVES.includes(key)) this.choose(findNextPoint(this.points, this.chosen, key));
      else if (key === "m" || key === "Enter") this.askToMeasure();
      else return false;
      return true;
    });
  }
}

export default { render: makeRender((room) => new TuningPage(room)) };
