// Draws a timeline on a canvas: ruler, rows with their ranks and shares, bars, labels, and marks of what is chosen.

import { FONT, setLetters, strokeRectangle } from "../shared/canvas.js";
import { formatShare } from "../shared/format.js";
import { makeTicks } from "../shared/numbers.js";
import { isPaper, pickInk } from "../shared/textures.js";
import { labelEvent } from "./timeline_data.js";
import { getScrollLimit } from "./timeline_layout.js";
import { findVisible, mergeBars } from "./timeline_span.js";
import { formatTick, nameEvent } from "./timeline_text.js";

const FADED = 0.16;
const WIDE_PX = 3; // narrower bars have no texture
const GAP_PX = 6; // narrower bars have no gap
const SHORTENED_PX = 84; // wider bars have the beginning of a long label
const COLUMNS = [0, 0.3, 0.7]; // of a rank's three shares, in their room
const LEAST_SHARE = 0.01; // smaller waits are not labelled

/** Draw a scene: its events, layout, span, scroll, theme and what is chosen. The context's unit is a px of the page.
 * @type {(context: Context, scene: DrawnScene) => void} */
export function drawTimeline(context, scene) {
  const { layout, theme } = scene;
  context.clearRect(0, 0, layout.width, layout.height);
  const scale = layout.plot / (scene.span.end - scene.span.start);
  const shift = -((scene.span.start * scale) % 8);
  scene.fills = scene.textures.prepare(context, theme, scene.pixelRatio, layout.left + shift);
  const { ticks, step } = makeTicks(scene.span.start, scene.span.end, layout.plot / 110);
  const rows = findVisibleRows(scene);
  mergeRows(scene, rows);
  context.save();
  context.beginPath();
  context.rect(0, layout.ruler, layout.width, layout.height - layout.ruler);
  context.clip();
  for (const { row, top } of rows) drawRowFrame(context, scene, row, top);
  context.beginPath();
  context.rect(layout.left, layout.ruler, layout.plot, layout.height - layout.ruler);
  context.clip();
  drawGrid(context, scene, ticks, scale);
  for (const { row, top, lanes } of rows) {
    for (const lane of lanes) drawLane(context, scene, lane, top + lane.top);
    if (!layout.small) drawLabels(context, scene, row, top, scale);
  }
  context.restore();
  drawScroll(context, scene);
  drawRuler(context, scene, ticks, step, scale);
}

/** @type {(context: Context, scene: DrawnScene, row: number, top: number) => void} */
function drawRowFrame(context, { layout, theme, words, rank, fills }, row, top) {
  const { roles, shares, ...own } = words.rows[row], chosen = own.rank === rank;
  context.fillStyle = theme.panel;
  if (row % 2) context.fillRect(layout.left, top, layout.plot, layout.rowHeight);
  if (chosen) {
    context.fillRect(0, top, layout.left, layout.rowHeight);
    context.fillStyle = theme.brand;
    context.fillRect(0, top, 4, layout.rowHeight);
  }
  const middle = top + layout.rowHeight / 2, two = !layout.small && roles && layout.left > 100;
  setLetters(context, `${chosen ? 700 : 600} ${layout.small ? 11 : 13}px ${FONT}`, theme.ink);
  context.fillText(layout.left > 100 ? `rank ${own.rank}` : String(own.rank), 10, two ? middle - 8 : middle);
  if (two || (layout.small && roles && layout.left > 100)) {
    setLetters(context, `${layout.small ? 10.5 : 11.5}px ${FONT}`, theme.faint);
    const [x, y, room] = two ? [10, middle + 9, layout.left - 16] : [62, middle, layout.left - 66];
    context.fillText(shortenText(context, roles, room), x, y);
  }
  if (layout.right) drawShares(context, layout, theme, words, fills, shares, middle);
  context.fillStyle = theme.line;
  context.fillRect(0, Math.round(top + layout.rowHeight) - 1, layout.width, 1);
}

// The rank's own time: work, messages and waiting, as a bar and in numbers.
/** @type {(context: Context, layout: TimelineLayout, theme: Theme, words: TimelineWords, fills: LookFills, shares:
 * number[], middle: number) => void} */
function drawShares(context, layout, theme, words, fills, shares, middle) {
  const left = layout.left + layout.plot + 12, width = layout.right - 20, height = layout.small ? 6 : 9;
  const top = layout.small ? middle - 9 : middle - 12;
  let x = left;
  words.row_looks.forEach((look, at) => {
    context.fillStyle = fills[0][look];
    context.fillRect(x, top, shares[at] * width, height);
    x += shares[at] * width;
  });
  strokeRectangle(context, [top + 0.5, left + 0.5, top + height - 0.5, left + width - 0.5], theme.faint, 1);
  setLetters(context, `${layout.small ? 10 : 11.5}px ${FONT}`, theme.ink);
  shares.forEach((share, at) => context.fillText(`${Math.round(share * 100)}%`, left + COLUMNS[at] * width,
    top + height + (layout.small ? 7 : 11)));
}

/** @type {(context: Context, scene: DrawnScene, ticks: number[], scale: number) => void} */
function drawGrid(context, { layout, theme, span }, ticks, scale) {
  context.fillStyle = theme.line;
  context.globalAlpha = 0.5;
  for (const tick of ticks)
    context.fillRect(Math.round(layout.left + (tick - span.start) * scale), layout.ruler, 1, layout.height);
  context.globalAlpha = 1;
}

/** @type {(scene: DrawnScene) => DrawnRow[]} */
function findVisibleRows({ layout, scroll }) {
  return Array.from({ length: layout.rows }, (_, row) => ({ row, lanes: [], top: layout.ruler + row * layout.rowHeight - scroll }))
    .filter(({ top }) => top < layout.height && top + layout.rowHeight > layout.ruler);
}

// Find the boxes of all lanes that are visible, and paint the thin ones as strips.
/** @type {(scene: DrawnScene, rows: DrawnRow[]) => void} */
function mergeRows(scene, rows) {
  const { found, layout, strips } = scene;
  strips.prepare(layout.plot, rows.length * layout.lanes.length, scene.pixelRatio, scene.fills[1], FADED);
  rows.forEach((each, at) => {
    each.lanes = layout.lanes.filter(({ height }) => height).map(({ top, height }, number) => {
      const lane = scene.lanes[each.row][number], strip = at * layout.lanes.length + number;
      const boxes = mergeBars(lane, scene.span, layout.plot, found ? (bar) => found[lane.event[bar]] : undefined);
      return { top, height, boxes, strip: strips.fill(strip, boxes, WIDE_PX) ? strip : -1 };
    });
  });
  strips.finish();
}

/** @type {(context: Context, scene: DrawnScene, lane: DrawnLane, top: number) => void} */
function drawLane(context, { layout, strips, fills }, { boxes, strip, height }, top) {
  if (strip >= 0) strips.draw(context, strip, layout.left, top, layout.plot, height);
  for (let box = 0; box < boxes.length; box += 5) {
    const wide = boxes[box + 1] - boxes[box];
    if (wide < WIDE_PX || boxes[box + 3] < 0) continue;
    context.globalAlpha = boxes[box + 4] ? 1 : FADED;
    context.fillStyle = fills[0][boxes[box + 2]];
    context.fillRect(layout.left + boxes[box], top, wide >= GAP_PX ? wide - 1 : wide, height);
  }
  context.globalAlpha = 1;
}

/** Write labels into the bars of a row: of its work, either each bar's or that of a run; and how much waiting costs.
 * @type {(context: Context, scene: DrawnScene, row: number, top: number, scale: number) => void} */
function drawLabels(context, scene, row, top, scale) {
  const { layout, words, events, span } = scene, [work, messages] = layout.lanes;
  const runs = scene.runs[row], [first, last] = findVisible(runs, span);
  const [workLane, messageLane] = scene.lanes[row];
  /** @type {(start: number, end: number) => Pair} */
  const place = (start, end) => [
    Math.max(layout.left + (start - span.start) * scale, layout.left),
    Math.min(layout.left + (end - span.start) * scale, layout.left + layout.plot),
  ];
  for (let run = first; run < last; run++) {
    const [from, to] = place(runs.start[run], runs.end[run]);
    if (to - from < 18) continue;
    const bars = findVisible(workLane, { start: runs.start[run], end: runs.end[run] });
    if ((runs.end[run] - runs.start[run]) * scale / (bars[1] - bars[0]) < 46)
      writeLabel(context, scene, [runs.label[run]], from, to, top + work.top, work.height, workLane, bars[0]);
  }
  /** @type {(lane: Lane, boxes: { top: number, height: number }, name: (lane: Lane, bar: number) => string[]) => void} */
  const label = (lane, boxes, name) => {
    const [begin, stop] = findVisible(lane, span);
    for (let bar = begin; bar < stop; bar++) {
      if ((lane.end[bar] - lane.start[bar]) * scale < 26) continue;
      writeLabel(context, scene, name(lane, bar), ...place(lane.start[bar], lane.end[bar]), top + boxes.top,
        boxes.height, lane, bar);
    }
  };
  /** @type {(lane: Lane, bar: number) => string[]} */
  const nameWork = (lane, bar) => {
    const short = labelEvent(events, words, lane.event[bar]);
    return (lane.end[bar] - lane.start[bar]) * scale < 46 ? []
      : [`${short} · ${nameEvent(events, words, lane.event[bar])}`, short];
  };
  /** @type {(lane: Lane, bar: number) => string[]} */
  const nameMessage = (lane, bar) => {
    const share = (lane.end[bar] - lane.start[bar]) / words.seconds[0];
    if (lane.look[bar] === words.wait) return share < LEAST_SHARE ? [] : shareForms(share);
    const kind = words.kinds[events.kind[lane.event[bar]]];
    return [`${kind} · ${nameEvent(events, words, lane.event[bar])}`, kind];
  };
  label(workLane, work, nameWork);
  label(messageLane, messages, nameMessage);
}

/** @type {(share: number) => string[]} */
function shareForms(share) {
  const text = formatShare(share);
  return [`waits ${text} of the step`, `waits ${text}`, text];
}

// The first form that fits, on a plate of the bar's colour, so that no texture runs through the letters.
/** @type {(context: Context, scene: DrawnScene, forms: string[], from: number, to: number, top: number, height:
 * number, lane: Lane, bar: number) => void} */
function writeLabel(context, scene, forms, from, to, top, height, lane, bar) {
  const size = height > 18 ? 12 : 11, look = scene.words.looks[lane.look[bar]];
  if (scene.found && !scene.found[lane.event[bar]]) return;
  context.font = `${size}px ${FONT}`;
  for (const long of forms) {
    const shortens = to - from > SHORTENED_PX && long.includes(" · ");
    const form = shortens ? shortenText(context, long, to - from - 10) : long;
    const width = measureLabel(context, form), x = (from + to) / 2;
    if (width + 10 > to - from) continue;
    context.fillStyle = scene.fills[1][lane.look[bar]];
    context.fillRect(x - width / 2 - 3, top + 1, width + 6, height - 2);
    context.fillStyle = isPaper(look.colour) ? scene.theme.ink : pickInk(look.colour);
    context.textAlign = "center";
    context.fillText(form, x, top + height / 2 + 0.5);
    return;
  }
}

/** @type {Map<string, number>} */
const widths = new Map(); // of texts, in px, by font: measuring a text takes longer than drawing it

/** @type {(context: Context, text: string) => number} */
function measureLabel(context, text) {
  const key = context.font + text;
  const known = widths.get(key);
  if (known !== undefined) return known;
  if (widths.size > 5000) widths.clear();
  const { width } = context.measureText(text);
  widths.set(key, width);
  return width;
}

/** @type {(context: Context, text: string, room: number) => string} */
function shortenText(context, text, room) {
  if (measureLabel(context, text) <= room) return text;
  let length = text.length;
  while (length > 1 && measureLabel(context, `${text.slice(0, length)}…`) > room) length--;
  return `${text.slice(0, length)}…`;
}

/** @type {(context: Context, scene: DrawnScene) => void} */
function drawScroll(context, { layout, scroll, theme }) {
  const room = layout.height - layout.ruler;
  if (!getScrollLimit(layout)) return;
  context.fillStyle = theme.faint;
  context.fillRect(layout.left - 6, layout.ruler + (scroll / layout.content) * room, 4, (room / layout.content) * room);
}

/** @type {(context: Context, scene: DrawnScene, ticks: number[], step: number, scale: number) => void} */
function drawRuler(context, { layout, theme, span }, ticks, step, scale) {
  setLetters(context, `11.5px ${FONT}`, theme.faint);
  for (const tick of ticks) {
    const x = Math.round(layout.left + (tick - span.start) * scale), text = formatTick(tick, step, span.end);
    context.fillRect(x, layout.ruler - 7, 1, 7);
    if (x + 4 + measureLabel(context, text) < layout.left + layout.plot)
      context.fillText(text, x + 4, layout.ruler - 12);
  }
  if (layout.right)
    ["work", "messages", "waiting"].forEach((word, at) =>
      context.fillText(word, layout.left + layout.plot + 12 + COLUMNS[at] * (layout.right - 20), layout.ruler - 12));
  context.fillStyle = theme.line;
  context.fillRect(0, layout.ruler - 1, layout.width, 1);
  context.fillRect(layout.left - 1, layout.ruler, 1, layout.height - layout.ruler);
  if (layout.right) context.fillRect(layout.left + layout.plot, layout.ruler, 1, layout.height - layout.ruler);
}
