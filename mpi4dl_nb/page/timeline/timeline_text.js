// Words about events: durations, sizes, what a pointer or a screen reader is told, and which events a search finds.

import { TIME_UNITS, formatBytes, formatDuration } from "../shared/format.js";
import { labelEvent } from "./timeline_data.js";

/** Return the label of a tick at `seconds` among ticks `step` apart up to `end`: in one unit, with as many digits.
 * @type {(seconds: number, step: number, end: number) => string} */
export function formatTick(seconds, step, end) {
  const [unit, size] = TIME_UNITS.find(([, each]) => end >= each) ?? TIME_UNITS[2];
  const digits = Math.max(0, -Math.floor(Math.log10(step / size) + 1e-9));
  return `${(seconds / size).toFixed(digits)} ${unit}`;
}

/** Return the layer of an event, or its own name.
 * @type {(events: TimelineEvents, words: TimelineWords, event: number) => string} */
export function nameEvent(events, words, event) {
  return words.layers[events.name[event]] || words.names[events.name[event]];
}

/** Return what is known of an event, by line: layer; kind, pass, rank; times; waiting; bytes; prediction.
 * @type {(events: TimelineEvents, words: TimelineWords, event: number, match?: number) => string[]} */
export function describeEvent(events, words, event, match = -1) {
  const [start, end, wait] = [events.start[event], events.end[event], events.wait[event]];
  const kind = words.kinds[events.kind[event]], phase = words.phases[events.phase[event]];
  const own = words.names[events.name[event]], row = words.rows[events.row[event]];
  const layer = words.layers[events.name[event]];
  const title = layer && layer !== own ? [layer, own] : [own];
  const lines = [
    ...title,
    `${event >= events.measured ? "predicted: " : ""}${[...new Set([kind, phase])].join(", ")} · ` +
      `rank ${row.rank}${row.roles ? ` (${row.roles})` : ""} · micro-batch ${events.microBatch[event]}`,
    `starts at ${formatDuration(start)}, lasts ${formatDuration(end - start)}`,
  ];
  const alone = formatDuration(end - start - wait);
  if (wait > 0) lines.push(`own time ${alone}, waiting for others ${formatDuration(wait)}`);
  if (events.bytes[event] > 0) lines.push(`sends ${formatBytes(events.bytes[event])}`);
  if (match >= 0) lines.push(comparePrediction(end - start, events.end[match] - events.start[match]));
  return lines;
}

/** @type {(seconds: number, predicted: number) => string} */
function comparePrediction(seconds, predicted) {
  const ratio = seconds / predicted;
  const words = !Number.isFinite(ratio) ? "" : Math.abs(ratio - 1) < 0.05 ? ", as measured"
    : ratio > 1 ? `; took ${formatRatio(ratio)} times as long` : `; took ${(100 * ratio).toFixed(0)}% of that`;
  return `predicted: ${formatDuration(predicted)}${words}`;
}

/** @type {(ratio: number) => string} */
function formatRatio(ratio) {
  return ratio.toFixed(ratio < 10 ? 1 : 0);
}

/**
 * Return a flag (0 or 1) for each event that a search finds, and their number; null for an empty search.
 *
 * Every word of the text must be part of the event's layer, name, kind, pass or style, or be its label (`F0`).
 * @type {(events: TimelineEvents, words: TimelineWords, text: string) => { found: Uint8Array, count: number } | null}
 */
export function searchEvents(events, words, text) {
  const asked = text.toLowerCase().split(/\s+/).filter(Boolean);
  if (!asked.length) return null;
  /** @type {(list: string[], word: string) => Uint8Array} */
  const has = (list, word) => Uint8Array.from(list, (each) => Number(each.toLowerCase().includes(word)));
  const tables = asked.map((word) => ({
    name: has(words.names.map((name, at) => `${name} ${words.layers[at]}`), word),
    kind: has(words.kinds, word), phase: has(words.phases, word),
    look: has(words.looks.map((each) => each.name), word), word,
    waits: words.looks[words.wait].name.includes(word),
  }));
  const found = new Uint8Array(events.count);
  let count = 0;
  for (let event = 0; event < events.count; event++) {
    /** @type {(table: typeof tables[0]) => unknown} */
    const meets = (table) => table.name[events.name[event]] || table.kind[events.kind[event]] ||
      table.phase[events.phase[event]] || table.look[events.look[event]] ||
      (table.waits && events.wait[event] > 0) ||
      (table.word.length < 6 && labelEvent(events, words, event).toLowerCase() === table.word);
    if (tables.every(meets)) {
      found[event] = 1;
      if (event < events.measured) count++;
    }
  }
  return { found, count };
}
