// The ranks in words: where each is in the schedule, what it did last and what it does next.
import { DARK, WHITE } from "../shared/canvas.js";
import { makeElement, setText } from "../shared/elements.js";
import { makeSwatch } from "../shared/textures.js";

/** A table with a row per rank; `update(meta)` shows a frame. */
export class StepTable {
  /** @param {StepSetup} setup */
  constructor(setup) {
    this.setup = setup;
    this.backgrounds = setup.looks.map((look) => makeSwatch(look, WHITE, DARK));
    this.rows = setup.ranks.map((rank, index) => this.makeRow(rank, index));
    const used = new Set(setup.schedule.lanes.flat().map((slot) => slot[3]));
    const legend = [...used].sort((a, b) => a - b).map((look) => {
      const swatch = makeElement("span", { class: "mpi4dl-swatch", style: `background: ${this.backgrounds[look]}` });
      return makeElement("span", { class: "mpi4dl-look" }, swatch, setup.looks[look].name);
    });
    const heads = ["rank", "schedule", "did last", "does next", "memory: values | process"];
    const head = makeElement("tr", {}, ...heads.map((text) => makeElement("th", { scope: "col", text, title: text })));
    const body = makeElement("tbody", {}, ...this.rows.map((row) => row.row));
    const told = {
      class: "mpi4dl-step-table", tabindex: "0", role: "region", "aria-label": "All ranks",
      "data-lm-suppress-shortcuts": "true",
    };
    const words = `schedule ${setup.schedule.name}, the upright bar is where a rank is:`;
    const line = makeElement("div", { class: "mpi4dl-lane-legend" }, words, ...legend);
    this.element = makeElement("div", told, line, makeElement("table", {}, makeElement("thead", {}, head), body));
  }

  /** @type {(rank: StepSetup["ranks"][0], index: number) => RankRow} */
  makeRow(rank, index) {
    const { lanes, length } = this.setup.schedule;
    const slots = lanes[index].map(([start, stop, text, look]) => {
      const place = `left: ${(100 * start) / length}%; width: ${(100 * (stop - start)) / length}%`;
      const style = `${place}; background: ${this.backgrounds[look]}`;
      return makeElement("span", { class: "mpi4dl-slot", style }, makeElement("span", { text }));
    });
    const marker = makeElement("span", { class: "mpi4dl-slot-marker" });
    const lane = makeElement("div", { class: "mpi4dl-lane", role: "img" }, ...slots, marker);
    const [did, next, memory] = [0, 1, 2].map(() => makeElement("td", {}));
    const name = makeElement("th", { scope: "row" }, makeElement("b", { text: index }), ` ${rank.role}`);
    const row = makeElement("tr", {}, name, makeElement("td", {}, lane), did, next, memory);
    return { row, lane, marker, did, next, memory };
  }

  /** @type {(meta: FrameMeta) => void} */
  update(meta) {
    const { length } = this.setup.schedule;
    meta.ranks.forEach((rank, index) => {
      const { row, lane, marker, did, next, memory } = this.rows[index];
      row.classList.toggle("mpi4dl-moved", rank.moved);
      marker.style.left = `${(100 * rank.time) / length}%`;
      lane.setAttribute("aria-label", `${rank.done} of ${this.setup.ends[index]} instructions done`);
      setText(did, rank.did);
      setText(next, rank.next);
      [did.title, next.title] = [rank.didWords, rank.nextWords];
      setText(memory, rank.memory);
      memory.title = rank.memory;
    });
  }
}
