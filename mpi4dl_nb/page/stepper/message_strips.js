// The values of one message in numbers: what was there before, what arrived, and what is there after.
import { keepFocus, makeElement, makeSignButton } from "../shared/elements.js";
import { clamp } from "../shared/numbers.js";
import { NO_FRAME, formatNumber, readValues } from "./step_frames.js";

const LONG = 5, MOST_TERMS = 8;

/** Return the cells of a strip that are shown: `{ along, first, count, rows }`, the longer side along, from `start` on.
 *
 * A strip that is higher than wide is turned, so that its cells lie beside each other. `rows` are arrays of numbers, at
 * most as many as `most`.
 * @type {(values: FrameValues, tile: Rectangle, start?: number, most?: number) => StripCells}
 */
export function cutStrip({ numbers, high, wide }, tile, start, most = 2) {
  const upright = tile[2] - tile[0] > tile[3] - tile[1], count = upright ? high : wide, deep = upright ? wide : high;
  const from = clampStart(start, count);
  const rows = Array.from({ length: Math.min(most, deep) }, (_, line) =>
    Array.from({ length: Math.min(LONG, count) }, (_, at) =>
      numbers[upright ? (from + at) * wide + line : line * wide + from + at]));
  return { along: upright ? "row" : "column", first: tile[upright ? 0 : 1] + from, from, count, rows };
}

/** Return the first shown cell of `count`: as asked, but so that the strip is filled; the middle if none is asked.
 * @type {(start: number | undefined, count: number) => number} */
export function clampStart(start, count) {
  const most = Math.max(0, count - LONG);
  return start === undefined ? Math.floor(most / 2) : clamp(start, 0, most);
}

/** Shows one message of a frame; `choose(index)` is called with another one that the reader wants. */
export class MessageStrips {
  /** @param {Uint8Array[]} palettes
   * @param {(index: number) => void} choose */
  constructor(palettes, choose) {
    this.palettes = palettes;
    this.choose = choose;
    this.most = 2; // rows of a strip
    this.frame = NO_FRAME;
    this.focus = 0;
    this.key = ""; // of the message that is shown
    /** @type {number | undefined} */
    this.start = undefined; // the first cell that is shown, if the reader has moved there
    this.element = makeElement("section", {
      class: "mpi4dl-strips", "aria-label": "Message in numbers", tabindex: "-1", "data-lm-suppress-shortcuts": "true",
    });
  }

  /** Take `height` px, or as many as the style sheet says if it is 0. Where it is `tight`, one row of a strip is shown.
   * @type {(height: number, tight: boolean) => void} */
  fit(height, tight) {
    this.element.style.height = height ? `${height}px` : "";
    this.element.classList.toggle("mpi4dl-tight", tight);
    if (this.most === (tight ? 1 : 2)) return;
    this.most = tight ? 1 : 2;
    if (this.key) this.show(this.frame, this.focus);
  }

  /** Show message `focus` of a frame; without messages, its sums, or that nothing moved.
   * @type {(frame: StepFrame, focus: number) => void} */
  show(frame, focus) {
    const key = `${frame.meta.step} ${frame.meta.number} ${focus}`;
    if (key !== this.key) this.start = undefined;
    [this.frame, this.focus, this.key] = [frame, focus, key];
    keepFocus(this.element, () => this.element.replaceChildren(...this.makeParts(frame, focus)));
  }

  /** @type {(frame: StepFrame, focus: number) => Element[]} */
  makeParts(frame, focus) {
    const { messages, sums } = frame.meta;
    if (!messages.length) {
      const title = makeElement("h4", { text: sums.length ? "Sums over ranks" : "No message" });
      if (sums.length) return [makeElement("div", { class: "mpi4dl-sums" }, title, ...sums.flatMap((sum) => this.makeSum(frame, sum)))];
      return [makeElement("div", {}, title, makeElement("p", { text: "This instruction moved no pixels between ranks." }))];
    }
    const message = messages[focus], [what, way, size] = message.words;
    const head = makeElement("div", { class: "mpi4dl-strips-head" },
      makeSignButton("‹", "Previous message ([)", () => this.choose((focus + messages.length - 1) % messages.length)),
      makeElement("h4", { text: `message ${focus + 1} of ${messages.length}` }),
      makeSignButton("›", "Next message (])", () => this.choose((focus + 1) % messages.length)));
    const told = makeElement("div", {}, head,
      makeElement("p", { text: `${what}: ${way}`, title: size }), makeElement("p", { class: "mpi4dl-faint mpi4dl-strips-size", text: size }));
    return [told, ...this.makeTables(frame, message)];
  }

  /** Return the parts about a sum: its words, and what each rank held before and after.
   * @type {(frame: StepFrame, sum: StepSum) => Element[]} */
  makeSum(frame, { words, group, count, terms }) {
    const told = makeElement("p", { text: `Σ ${words}` });
    if (!terms.length) return [told, makeElement("p", { class: "mpi4dl-faint", text: "Its values are not kept here." })];
    /** @type {["before" | "after", string][]} */
    const sides = [["before", "the rank's own"], ["after", "the sum"]];
    const held = terms.flatMap((term) => sides.map(([side]) => readValues(frame, term[side])?.wide ?? 0));
    const numbers = Math.min(count, Math.max(...held));
    const heads = sides.map(([side, meaning]) =>
      makeElement("th", { scope: "colgroup", colspan: numbers, text: `${side}: ${meaning}` }));
    const rows = terms.slice(0, MOST_TERMS).map((term) => makeElement("tr", {},
      makeElement("th", { scope: "row", text: `rank ${term.rank}` }),
      ...sides.flatMap(([side]) => this.listNumbers(frame, term[side], numbers)
        .map((text, at) => makeElement("td", { text, class: at ? undefined : "mpi4dl-first" })))));
    const more = terms.length > MOST_TERMS ? `; of ${MOST_TERMS} of ${group.length} ranks` : "";
    const caption = count > numbers ? `the first ${numbers} of ${count.toLocaleString("en")} numbers${more}` : `all numbers${more}`;
    return [told, makeElement("table", { class: "mpi4dl-sum" }, makeElement("caption", { text: caption }),
      makeElement("thead", {}, makeElement("tr", {}, makeElement("td", {}), ...heads)), makeElement("tbody", {}, ...rows))];
  }

  /** @type {(frame: StepFrame, place: ValuesPlace, count: number) => string[]} */
  listNumbers(frame, place, count) {
    const values = readValues(frame, place)?.numbers;
    return Array.from({ length: count }, (_, at) => (values ? formatNumber(values[at]) : "–"));
  }

  /** @type {(frame: StepFrame, message: StepMessage) => Element[]} */
  makeTables(frame, message) {
    const values = [message.before, message.arrived, message.after].map((place) => readValues(frame, place));
    const known = values.filter((each) => each !== null);
    if (!known.length) return [makeElement("p", { text: "Its values are not kept here." })];
    // One scale: a gradient that is added to another changes its colour visibly.
    /** @type {Pair} */
    const span = [Infinity, -Infinity];
    for (const { numbers } of known) {
      for (const number of numbers) [span[0], span[1]] = [Math.min(span[0], number), Math.max(span[1], number)];
    }
    const cut = cutStrip(known[0], message.tile, this.start, this.most), signs = values[0] ? ["", "+", "="] : ["", "", ""];
    const tables = message.names.map((name, at) => {
      const held = values[at], cells = held && cutStrip(held, message.tile, this.start, this.most);
      return this.makeTable(name, signs[at], cells, cut, span, message.back);
    });
    if (cut.count <= LONG) return tables;
    /** @type {(by: number) => void} */
    const move = (by) => {
      this.start = cut.from + by;
      this.show(frame, this.focus);
    };
    const shown = `${cut.along}s ${cut.first} to ${cut.first + LONG - 1}`;
    const bar = makeElement("div", { class: "mpi4dl-strips-move" },
      makeSignButton("←", "Cells before", () => move(-1)), makeElement("span", { text: shown }),
      makeSignButton("→", "Cells after", () => move(1)));
    return [bar, ...tables];
  }

  /** @type {(name: string, sign: string, cells: StripCells | null, shape: StripCells, span: Pair, back: boolean) =>
   * Element} */
  makeTable(name, sign, cells, shape, span, back) {
    /** @type {(number: number) => Element} */
    const make = (number) => cells ? this.makeCell(number, span, back)
      : makeElement("td", { class: "mpi4dl-none", text: "–" });
    const body = (cells ?? shape).rows.map((row, at) =>
      makeElement("tr", {}, makeElement("td", { text: at ? "" : sign }), ...row.map(make)));
    const indices = shape.rows[0].map((_, at) => makeElement("th", { scope: "col", text: shape.first + at }));
    const head = makeElement("tr", { class: "mpi4dl-strip-indices" }, makeElement("td", {}), ...indices);
    return makeElement("table", {}, makeElement("caption", { text: name }), makeElement("tbody", {}, ...body, head));
  }

  /** @type {(number: number, span: Pair, back: boolean) => Element} */
  makeCell(number, [low, high], back) {
    const palette = this.palettes[Number(back)], share = high > low ? (number - low) / (high - low) : 0;
    const at = Math.round(share * 255);
    const [red, green, blue] = palette.slice(4 * at, 4 * at + 3);
    const style = `background: rgb(${red} ${green} ${blue})`;
    return makeElement("td", { style }, makeElement("span", { text: formatNumber(number) }));
  }
}
