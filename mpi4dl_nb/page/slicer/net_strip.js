// A strip of the whole net, to scrub through its layers: heights are resolutions, widths are channels.

import { listenToKeys, makeElement, makeSvg } from "../shared/elements.js";
import { clamp, findNearest } from "../shared/numbers.js";
import { listenToDrag } from "../shared/pointer_drag.js";
import { watchSize } from "../shared/view_life.js";

const HEIGHT = 64;
const BASE = 50; // of the bars; below are the marks of halos
const LETTER = 7; // px of the screen: about the width of a letter of a name, which is left out where it does not fit
const NAMED_HEIGHT = 18; // px of the screen: bars that are lower have no room for a name

/** Return { x, width, height } of each layer's bar in a strip of this width: a pure drawing of the net's sizes.
 * @type {(net: NetLayer[], width: number) => NetBar[]} */
function layOutNet(net, width) {
  /** @type {(values: number[]) => number} */
  const most = (values) => Math.max(1, ...values.map((value) => Math.log2(value + 1)));
  const tallest = most(net.map((layer) => Math.max(...layer.sizes)));
  const widest = most(net.map((layer) => layer.channels));
  const slot = width / Math.max(1, net.length);
  return net.map((layer, index) => {
    const wide = Math.max(1.5, slot * (0.25 + 0.6 * (Math.log2(layer.channels + 1) / widest)));
    const high = Math.max(4, (BASE - 8) * (Math.log2(Math.max(...layer.sizes) + 1) / tallest));
    return { x: slot * (index + 0.5) - wide / 2, middle: slot * (index + 0.5), slot, width: wide, height: high };
  });
}

/** Return the place of the mark of each point (a layer that borrows), left to right; layers share their slot evenly.
 * @type {(net: NetLayer[], bars: NetBar[]) => number[]} */
function placePoints(net, bars) {
  /** @type {number[]} */
  const places = [];
  net.forEach((layer, index) => layer.points.forEach((point, number) => {
    places[point] = bars[index].middle + bars[index].slot * 0.8 * ((number + 0.5) / layer.points.length - 0.5);
  }));
  return places;
}

/** A slider over the points of a net. `choose(point)` is called while it is dragged, and for each key. */
export class NetStrip {
  /** @param {HTMLElement} host
   * @param {(point: number) => void} choose
   * @param {AbortSignal} signal */
  constructor(host, choose, signal) {
    this.choose = choose;
    this.point = 0;
    this.count = 0;
    /** @type {NetLayer[]} */
    this.net = [];
    /** @type {number[]} */
    this.places = []; // of the marks, in px
    /** @type {SVGElement[]} */
    this.marks = [];
    /** @type {(point: number) => string} */
    this.describe = () => "";
    this.box = makeElement("div", {
      class: "mpi4dl-strip", role: "slider", tabindex: 0, "aria-label": "layer", "aria-orientation": "horizontal",
      "data-lm-suppress-shortcuts": "true",
    });
    this.svg = makeSvg("svg", { height: HEIGHT, width: "100%", "aria-hidden": "true" });
    this.box.append(this.svg);
    host.append(this.box);
    watchSize(this.box, () => this.draw(), signal);
    /** @type {(x: number) => void} */
    const scrub = (x) => { if (this.places.length) this.select(findNearest(this.places, x)); };
    this.svg.style.touchAction = "none";
    listenToDrag(this.box, { begin: scrub, move: scrub });
    listenToKeys(this.box, (event) => this.handleKey(event));
  }

  /** Show a net and the chosen point; `describe(point)` is what a screen reader says of one.
   * @type {(net: NetLayer[], count: number, point: number, describe: (point: number) => string) => void} */
  show(net, count, point, describe) {
    const isDrawn = net === this.net && this.places.length > 0; // while it is dragged, only the mark moves
    Object.assign(this, { net, count, point, describe });
    if (isDrawn) this.mark();
    else this.draw();
  }

  /** @type {(point: number) => void} */
  select(point) {
    const within = clamp(point, 0, this.count - 1);
    if (within === this.point) return;
    this.point = within;
    this.mark();
    this.choose(within);
  }

  /** @type {(event: KeyboardEvent) => boolean} */
  handleKey({ key }) {
    /** @type {Record<string, number>} */
    const steps = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageUp: 5, PageDown: -5 };
    if (key in steps) this.select(this.point + steps[key]);
    else if (key === "Home") this.select(0);
    else if (key === "End") this.select(this.count - 1);
    else return false;
    return true;
  }

  draw() {
    const width = this.box.clientWidth;
    this.places = [];
    this.svg.replaceChildren();
    if (!width || !this.net.length) return;
    const bars = layOutNet(this.net, width);
    this.places = placePoints(this.net, bars);
    this.net.forEach((layer, index) => {
      this.svg.append(this.makeBar(layer, bars[index]));
      const before = this.net[index - 1];
      if (before && (before.tiles !== layer.tiles || before.stage !== layer.stage)) {
        const left = bars[index].middle - bars[index].slot / 2;
        this.svg.append(makeSvg("line", { x1: left, x2: left, y1: 0, y2: BASE, class: "border" }));
        const text = before.tiles > 1 && layer.tiles === 1 ? "joined" : `stage ${layer.stage}`;
        this.svg.append(makeSvg("text", { x: left + 3, y: 9, text }));
      }
    });
    this.marks = this.places.map((place, point) => {
      const mark = makeSvg("circle", { cx: place, cy: BASE + 8, r: 3, class: "point" });
      mark.append(makeSvg("title", { text: this.describe(point) }));
      this.svg.append(mark);
      return mark;
    });
    this.mark();
  }

  /** Return a layer's bar, with its name on it if there is room, and under the pointer anywhere in its slot.
   * @type {(layer: NetLayer, bar: NetBar) => SVGElement} */
  makeBar(layer, { x, middle, slot, width, height }) {
    const title = `${layer.name}: ${layer.channels} channels of ${layer.sizes.join(" × ")} px, stage ${layer.stage}, `
      + (layer.tiles > 1 ? `in ${layer.tiles} tiles` : "whole on each of its ranks");
    const bar = makeSvg("g", {}, makeSvg("title", { text: title }),
      makeSvg("rect", { x: middle - slot / 2, y: 0, width: slot, height: BASE, class: "slot" }),
      makeSvg("rect", { x, y: BASE - height, width, height, class: layer.tiles > 1 ? "tiled" : "joined" }));
    if (height >= NAMED_HEIGHT && layer.name.length * LETTER < width) {
      bar.append(makeSvg("text", { x: x + width / 2, y: BASE - 6, class: "name", text: layer.name }));
    }
    return bar;
  }

  /** Mark the chosen point. */
  mark() {
    this.marks.forEach((mark, point) => {
      mark.setAttribute("r", point === this.point ? "5.5" : "3");
      mark.setAttribute("class", point === this.point ? "point chosen" : "point");
    });
    const values = { valuemin: 0, valuemax: Math.max(0, this.count - 1), valuenow: this.point };
    for (const [name, value] of Object.entries(values)) this.box.setAttribute(`aria-${name}`, String(value));
    this.box.setAttribute("aria-valuetext", this.describe(this.point));
  }
}
