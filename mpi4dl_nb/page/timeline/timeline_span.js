// The visible part of a step, { start, end } in seconds, and what lies in it. x = 0 is its start, x = width its end.

import { clamp } from "../shared/numbers.js";

const LEAST_S = 1e-7; // no clock of a rank tells shorter times apart

/** Return the span moved and shortened as needed to lie within a step of `seconds`.
 * @type {(span: TimeSpan, seconds: number) => TimeSpan} */
export function limitSpan({ start, end }, seconds) {
  const length = clamp(end - start, Math.min(LEAST_S, seconds), seconds);
  const from = clamp(end - start === length ? start : (start + end - length) / 2, 0, seconds - length);
  return { start: from, end: from + length };
}

/** Return the span with a length divided by `factor`; the time at `x` of `width` stays in place.
 * @type {(span: TimeSpan, x: number, width: number, factor: number, seconds: number) => TimeSpan} */
export function zoomSpan({ start, end }, x, width, factor, seconds) {
  const length = clamp((end - start) / factor, Math.min(LEAST_S, seconds), seconds);
  const at = start + (x / width) * (end - start);
  const from = at - (x / width) * length;
  return limitSpan({ start: from, end: from + length }, seconds);
}

/** Return the span moved by `dx` screen px to earlier times.
 * @type {(span: TimeSpan, dx: number, width: number, seconds: number) => TimeSpan} */
export function panSpan({ start, end }, dx, width, seconds) {
  const by = (-dx * (end - start)) / width;
  return limitSpan({ start: start + by, end: end + by }, seconds);
}

/** Return the span moved, and widened if needed, so that [from, to] is well visible.
 * @type {(span: TimeSpan, from: number, to: number, seconds: number) => TimeSpan} */
export function revealSpan(span, from, to, seconds) {
  const length = Math.max(span.end - span.start, (to - from) * 1.2);
  const margin = length * 0.05;
  if (from >= span.start && to <= span.end) return span;
  const start = to - from > span.end - span.start ? from - (length - (to - from)) / 2
    : from < span.start ? from - margin : to + margin - length;
  return limitSpan({ start, end: start + length }, seconds);
}

/** Return the first index from which the sorted `values` are greater than `value` (or equal to it, with `orEqual`).
 * @type {(values: ArrayLike<number>, value: number, orEqual?: boolean) => number} */
export function findFirst(values, value, orEqual = false) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > value || (orEqual && values[middle] === value)) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** Return [first, after last] of the bars of a lane of which a part may be visible.
 * @type {(lane: Spans, span: TimeSpan) => Pair} */
export function findVisible(lane, span) {
  return [findFirst(lane.latest, span.start), findFirst(lane.start, span.end, true)];
}

/**
 * Return the boxes of the visible bars of a lane: [left, right, look, bar, kept] five numbers each, left to right.
 *
 * Bars thinner than a pixel are merged with those in the same pixel. A merged box has the look that takes most of its
 * time, and neighbours of one look are one box of bar -1. `kept(bar)` tells whether a search has found a bar: in a
 * merged box it is enough that one was found.
 * @type {(lane: Lane, span: TimeSpan, width: number, kept?: (bar: number) => unknown) => LaneBoxes}
 */
export function mergeBars(lane, span, width, kept = () => true) {
  /** @type {LaneBoxes} */
  const boxes = [];
  /** @type {number[]} */
  const seen = []; // looks in the pixel
  const scale = width / (span.end - span.start), times = new Float64Array(256);
  const [first, last] = findVisible(lane, span);
  let pixel = -1, found = false;
  const flush = () => {
    if (pixel < 0) return;
    const look = seen.reduce((most, each) => (times[each] > times[most] ? each : most), seen[0]);
    for (const each of seen) times[each] = 0;
    seen.length = 0;
    const before = boxes.length - 5;
    if (before >= 0 && boxes[before + 3] === -1 && boxes[before + 1] >= pixel && boxes[before + 2] === look
      && boxes[before + 4] === Number(found)) boxes[before + 1] = pixel + 1;
    else boxes.push(pixel, pixel + 1, look, -1, Number(found));
    pixel = -1;
  };
  for (let bar = first; bar < last; bar++) {
    if (lane.latest[bar] > lane.end[bar] && lane.end[bar] < span.start) continue; // over, but within an overlap
    const left = Math.max((lane.start[bar] - span.start) * scale, -8);
    const right = Math.min((lane.end[bar] - span.start) * scale, width + 8);
    if (right - left >= 1) {
      flush();
      boxes.push(left, right, lane.look[bar], bar, Number(kept(bar)));
      continue;
    }
    const here = Math.max(Math.floor(left), 0);
    if (here !== pixel) {
      flush();
      pixel = here;
      found = false;
    }
    const look = lane.look[bar];
    if (!times[look]) seen.push(look);
    times[look] += Math.max(right - left, 1e-9);
    found ||= Boolean(kept(bar));
  }
  flush();
  return boxes;
}

/** Return the bar of a lane at a time; if none is there, the nearest within `reach` seconds, or -1.
 * @type {(lane: Spans, time: number, reach?: number) => number} */
export function findBarAt(lane, time, reach = 0) {
  let best = -1, least = reach;
  for (let bar = findFirst(lane.start, time + reach) - 1; bar >= 0 && lane.latest[bar] >= time - reach; bar--) {
    if (lane.start[bar] <= time && lane.end[bar] > time) return bar;
    const away = Math.max(lane.start[bar] - time, time - lane.end[bar], 0);
    if (away <= least) [best, least] = [bar, away];
    if (best >= 0 && away > least) break;
  }
  return best;
}
