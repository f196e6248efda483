// What a timeline shows and what is chosen in it, and what can be done with it; without any element of the page.

import { clamp } from "../shared/numbers.js";
import { makeLanes, makeRuns, matchPredicted } from "./timeline_data.js";
import { findPlace, getScrollLimit, makeTimelineLayout, revealRow } from "./timeline_layout.js";
import { findBarAt, findFirst, limitSpan, panSpan, revealSpan, zoomSpan } from "./timeline_span.js";
import { describeEvent, searchEvents } from "./timeline_text.js";

const REACH_PX = 3; // how near to a thin bar a pointer has to be

/** The state of a timeline. Events are meant by their index in the columns, -1 for none. */
export class TimelineScene {
  /** @param {EventColumns} columns
   * @param {TimelineWords} words */
  constructor(columns, words) {
    const events = this.events = { ...columns, count: columns.start.length, measured: words.counts[0] };
    this.words = words;
    this.selected = this.hovered = this.rank = this.cursor = -1;
    this.scroll = 0;
    /** @type {Uint8Array | null} */
    this.found = null; // a flag for each event, while there is a search
    /** @type {Int32Array | null} */
    this.byTime = null; // the measured events in order of their starts
    this.lanes = makeLanes(events, words);
    this.runs = this.lanes.map(([work]) => makeRuns(work, events, words));
    this.matches = matchPredicted(events);
    this.seconds = Math.max(...words.seconds);
    this.span = { start: 0, end: this.seconds };
    this.query = "";
    this.matchCount = 0;
    this.layout = makeTimelineLayout(this.lanes.length, words.counts.length > 1, 0);
  }

  /** Lay out for a canvas of `width` px, at most `most` px high.
   * @type {(width: number, most?: number) => void} */
  resize(width, most) {
    this.layout = makeTimelineLayout(this.lanes.length, this.words.counts.length > 1, width, most);
    this.scroll = Math.min(this.scroll, getScrollLimit(this.layout));
  }

  get isWhole() {
    return this.span.end - this.span.start >= this.seconds * (1 - 1e-9);
  }

  /** Return the span after zooming by a factor at x px of the canvas: the selected event, or the middle.
   * @type {(factor: number, x?: number) => TimeSpan} */
  zoom(factor, x = this.getAnchor()) {
    const at = clamp(x - this.layout.left, 0, this.layout.plot);
    return zoomSpan(this.span, at, this.layout.plot, factor, this.seconds);
  }

  getAnchor() {
    const { span, layout, selected, events } = this, middle = layout.left + layout.plot / 2;
    if (selected < 0) return middle;
    const time = (events.start[selected] + events.end[selected]) / 2;
    if (time < span.start || time > span.end) return middle;
    return layout.left + ((time - span.start) / (span.end - span.start)) * layout.plot;
  }

  /** Return the span moved by dx px.
   * @type {(dx: number) => TimeSpan} */
  pan(dx) {
    return panSpan(this.span, dx, this.layout.plot, this.seconds);
  }

  /** @type {(dy: number) => void} */
  scrollBy(dy) {
    this.scroll = clamp(this.scroll + dy, 0, getScrollLimit(this.layout));
  }

  /** Return the event under a point of the canvas, or -1.
   * @type {(x: number, y: number) => number} */
  findEvent(x, y) {
    const place = findPlace(this.layout, this.scroll, x, y);
    if (place.lane < 0 || place.beside) return -1;
    const lane = this.lanes[place.row][place.lane];
    const perPx = (this.span.end - this.span.start) / this.layout.plot;
    const bar = findBarAt(lane, this.span.start + (x - this.layout.left) * perPx, REACH_PX * perPx);
    return bar < 0 ? -1 : lane.event[bar];
  }

  /** Return the rank whose name is under a point of the canvas, or -1.
   * @type {(x: number, y: number) => number} */
  findRank(x, y) {
    const { row, beside } = findPlace(this.layout, this.scroll, x, y);
    return row >= 0 && beside && x < this.layout.left ? this.words.rows[row].rank : -1;
  }

  /** Select a measured event; of a predicted one, the event that it predicts. Return whether anything changed.
   * @type {(event: number) => boolean} */
  select(event) {
    const chosen = event >= this.events.measured ? this.matches.indexOf(event) : event;
    const rank = chosen < 0 ? this.rank : this.words.rows[this.events.row[chosen]].rank;
    const changed = chosen !== this.selected || rank !== this.rank;
    this.selected = chosen;
    this.rank = rank;
    return changed;
  }

  /** Return the span in which the selected event is seen, and scroll to its row. */
  reveal() {
    if (this.selected < 0) return this.span;
    this.scroll = revealRow(this.layout, this.scroll, this.events.row[this.selected]);
    return revealSpan(this.span, this.events.start[this.selected], this.events.end[this.selected], this.seconds);
  }

  /** Return the span that the selected event nearly fills. */
  focusSelected() {
    if (this.selected < 0) return this.span;
    const [start, end] = [this.events.start[this.selected], this.events.end[this.selected]];
    const margin = Math.max(end - start, 1e-7);
    return limitSpan({ start: start - margin, end: end + margin }, this.seconds);
  }

  /** Return the measured event `by` places after the selected one on its rank, or the first visible one.
   * @type {(by: number) => number} */
  findNeighbour(by) {
    if (this.selected < 0) return this.findNear(this.getChosenRow(), this.span.start);
    const [first, last] = this.getRowRange(this.events.row[this.selected]);
    return clamp(this.selected + by, first, last - 1);
  }

  /** Return the event at the time of the selected one, `by` rows below it.
   * @type {(by: number) => number} */
  findInRow(by) {
    if (this.selected < 0) return this.findNear(this.getChosenRow(), this.span.start);
    const row = clamp(this.events.row[this.selected] + by, 0, this.lanes.length - 1);
    if (row === this.events.row[this.selected]) return this.selected;
    return this.findNear(row, (this.events.start[this.selected] + this.events.end[this.selected]) / 2);
  }

  getChosenRow() {
    return Math.max(this.words.rows.findIndex(({ rank }) => rank === this.rank), 0);
  }

  /** @type {(row: number) => Pair} */
  getRowRange(row) {
    const rows = this.events.row.subarray(0, this.events.measured);
    return [findFirst(rows, row, true), findFirst(rows, row)];
  }

  /** @type {(row: number, time: number) => number} */
  findNear(row, time) {
    const [first, last] = this.getRowRange(row);
    if (first === last) return -1;
    const started = first + findFirst(this.events.start.subarray(first, last), time) - 1;
    const isOver = started >= first && this.events.end[started] <= time && started + 1 < last;
    return Math.max(isOver ? started + 1 : started, first);
  }

  /** Search for events whose layer, kind or pass has the words of `text`; an empty text ends it.
   * @type {(text: string) => void} */
  search(text) {
    const result = searchEvents(this.events, this.words, text);
    this.query = text.trim();
    this.found = result?.found ?? null;
    this.matchCount = result?.count ?? 0;
  }

  /** Return the next (or with by = -1 the previous) event that the search has found, by time; -1 without one.
   * @type {(by: number) => number} */
  findMatch(by) {
    const { found } = this;
    if (!this.matchCount || !found) return -1;
    const byTime = this.byTime ??= Int32Array.from({ length: this.events.measured }, (_, at) => at)
      .sort((a, b) => this.events.start[a] - this.events.start[b] || a - b);
    const count = byTime.length;
    let at = this.selected < 0 ? (by > 0 ? -1 : 0) : byTime.indexOf(this.selected);
    for (let tried = 0; tried < count; tried++) {
      at = (at + by + count) % count;
      if (found[byTime[at]]) return byTime[at];
    }
    return -1;
  }

  /** Return the lines that describe an event.
   * @type {(event: number) => string[]} */
  describe(event) {
    return describeEvent(this.events, this.words, event, event < this.events.measured ? this.matches[event] : -1);
  }
}
