// The ranks in words: where each is in the schedule, what it did last and what it does next.
import { makeElement } from "./elements.js";

const HATCHES = { "": "plain", "//": "striped", "++": "crossed", "...": "dotted", "\\\\": "back", xx: "checked" };

/** A table with a row per rank; `update(meta)` shows a frame. */
export class StepTable {
  constructor(setup) {
    this.setup = setup;
    this.rows = setup.ranks.map((rank, index) => this.makeRow(rank, index));
    const used = new Set(setup.schedule.lanes.flat().map((slot) => slot[3]));
    const legend = setup.looks.flatMap((look, index) => used.has(index) ? [makeElement("span", { class: "mpi4dl-look" },
      makeSwatch(look), makeElement("span", { text: look.name }))] : []);
    const heads = ["rank", `schedule ${setup.schedule.name}`, "did last", "does next", "memory: values | process"];
    const head = makeElement("tr", {}, ...heads.map((text) => makeElement("th", { scope: "col", text })));
    head.children[1].append(...legend);
    this.element = makeElement("div", { class: "mpi4dl-step-table", tabindex: "0", role: "region", "aria-label": "All ranks" },
      makeElement("table", {}, makeElement("thead", {}, head), makeElement("tbody", {}, ...this.rows.map((row) => row.row))));
  }

  makeRow(rank, index) {
    const { lanes, length } = this.setup.schedule;
    const slots = lanes[index].map(([start, stop, text, look]) => {
      const slot = makeElement("span", { class: "mpi4dl-slot" }, makeElement("span", { text }));
      paintLook(slot, this.setup.looks[look]);
      slot.style.left = `${(100 * start) / length}%`;
      slot.style.width = `${(100 * (stop - start)) / length}%`;
      return slot;
    });
    const marker = makeElement("span", { class: "mpi4dl-slot-marker" });
    const lane = makeElement("div", { class: "mpi4dl-lane", role: "img" }, ...slots, marker);
    const [did, next, memory] = [0, 1, 2].map(() => makeElement("td", {}));
    const name = makeElement("th", { scope: "row" }, makeElement("b", { text: index }), ` ${rank.role}`);
    return { row: makeElement("tr", {}, name, makeElement("td", {}, lane), did, next, memory), lane, marker, did, next, memory };
  }

  update(meta) {
    const { length } = this.setup.schedule;
    meta.ranks.forEach((rank, index) => {
      const { row, lane, marker, did, next, memory } = this.rows[index];
      row.classList.toggle("mpi4dl-moved", rank.moved);
      marker.style.left = `${(100 * rank.time) / length}%`;
      lane.setAttribute("aria-label", `${rank.done} of ${this.setup.ends[index]} instructions done, at ${rank.time.toFixed(1)} of ${length}`);
      for (const [cell, text, words] of [[did, rank.did, rank.didWords], [next, rank.next, rank.nextWords]]) {
        cell.textContent = text;
        cell.title = words;
      }
      memory.textContent = rank.memory;
    });
  }
}

function makeSwatch(look) {
  const swatch = makeElement("span", { class: "mpi4dl-swatch" });
  paintLook(swatch, look);
  return swatch;
}

function paintLook(element, { colour, hatch }) {
  element.classList.add(`mpi4dl-hatch-${HATCHES[hatch]}`);
  element.style.backgroundColor = colour;
}
