// Where the parts of a timeline are, in px of its canvas: the ruler, a row per rank, and the lanes of a row.

import { clamp } from "../shared/numbers.js";

const TALL = { work: 22, messages: 16, predicted: 8, gap: 7 };
const LOW = { work: 12, messages: 8, predicted: 4, gap: 4 };
const MANY = 12; // ranks; more have lower rows, as in the figure
const MOST_PX = 620, LEAST_PX = 120;

/**
 * Return the layout of `rows` rows on a canvas of `width` px, at most `most` px high. `lanes` are the top and height of
 * a row's lanes.
 * @type {(rows: number, hasPredicted: boolean, width: number, most?: number) => TimelineLayout}
 */
export function makeTimelineLayout(rows, hasPredicted, width, most = MOST_PX) {
  const size = rows <= MANY ? TALL : LOW;
  const left = width < 640 ? 64 : 148, right = width < 760 ? 0 : 178, ruler = 26;
  const lanes = [{ top: size.gap, height: size.work }];
  lanes.push({ top: size.gap + size.work + 1, height: size.messages });
  const bottom = lanes[1].top + size.messages;
  lanes.push({ top: bottom + 2, height: hasPredicted ? size.predicted : 0 });
  const rowHeight = bottom + (hasPredicted ? 2 + size.predicted : 0) + size.gap;
  const content = rows * rowHeight;
  return {
    rows, left, right, ruler, lanes, rowHeight, content, width, small: size === LOW,
    plot: Math.max(width - left - right, 40), height: Math.min(ruler + content, clamp(most, LEAST_PX, MOST_PX)) + 1,
  };
}

/** Return the most by which the rows can be scrolled up.
 * @type {(layout: TimelineLayout) => number} */
export function getScrollLimit(layout) {
  return Math.max(layout.ruler + layout.content - (layout.height - 1), 0);
}

/** Return what is at a point of the canvas: row and lane (-1 between them), and whether it is beside the bars.
 * @type {(layout: TimelineLayout, scroll: number, x: number, y: number) => { row: number, lane: number, beside:
 * boolean }} */
export function findPlace(layout, scroll, x, y) {
  const down = y - layout.ruler + scroll;
  const row = Math.floor(down / layout.rowHeight);
  if (y < layout.ruler || row < 0 || row >= layout.rows) return { row: -1, lane: -1, beside: x < layout.left };
  const inRow = down - row * layout.rowHeight;
  const lane = layout.lanes.findIndex(({ top, height }) => inRow >= top && inRow <= top + height);
  return { row, lane, beside: x < layout.left || x > layout.left + layout.plot };
}

/** Return the scroll that shows all of a row, as near to the current one as possible.
 * @type {(layout: TimelineLayout, scroll: number, row: number) => number} */
export function revealRow(layout, scroll, row) {
  const room = layout.height - layout.ruler - 1;
  const least = (row + 1) * layout.rowHeight - room, most = row * layout.rowHeight;
  return clamp(scroll, Math.max(least, 0), Math.min(most, getScrollLimit(layout)));
}

/** Return what a timeline leaves out on a canvas as narrow as this; nothing if it shows all.
 * @type {(layout: TimelineLayout) => string} */
export function describeLeftOut({ left, right }) {
  if (right) return "";
  const roles = left < 100 ? ", and its stage and tile" : "";
  return `This view is too narrow for the shares of each rank's time${roles}: point at an event, or make it wider.`;
}
