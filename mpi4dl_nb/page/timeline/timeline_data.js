// The events of a step as columns of numbers, and the bars that are drawn of them: one list per row and lane.

const LANES = ["work", "messages", "predicted"];

/** Return the bars of each row: for each lane the starts, ends, looks and events of its bars, ordered by start.
 * @type {(events: TimelineEvents, words: Pick<TimelineWords, "rows" | "work" | "wait">) => Lane[][]} */
export function makeLanes(events, words) {
  /** @type {OpenLane[][]} */
  const rows = words.rows.map(() => LANES.map(() => ({ start: [], end: [], look: [], event: [] })));
  /** @type {(lane: OpenLane, start: number, end: number, look: number, event: number) => void} */
  const add = (lane, start, end, look, event) => {
    lane.start.push(start);
    lane.end.push(end);
    lane.look.push(look);
    lane.event.push(event);
  };
  for (let event = 0; event < events.count; event++) {
    const lanes = rows[events.row[event]];
    const lane = lanes[event >= events.measured ? 2 : words.work[events.kind[event]] ? 0 : 1];
    const stop = events.end[event] - events.wait[event];
    // A message is its own time, followed by the time for which it waited.
    add(lane, events.start[event], stop, events.look[event], event);
    if (events.wait[event] > 0) add(lane, stop, events.end[event], words.wait, event);
  }
  return rows.map((lanes) => lanes.map(finishLane));
}

/** @type {(lane: OpenLane) => Lane} */
function finishLane({ start, end, look, event }) {
  const lane = {
    start: Float64Array.from(start), end: Float64Array.from(end), look: Uint8Array.from(look),
    event: Int32Array.from(event), latest: Float64Array.from(end),
  };
  // The latest end so far rises, also where bars overlap, so that the first visible bar is found by halving.
  for (let at = 1; at < lane.latest.length; at++) lane.latest[at] = Math.max(lane.latest[at], lane.latest[at - 1]);
  return lane;
}

/** Return the runs of bars of one lane with one label: consecutive work on one micro-batch in one pass (F0, B0, W0).
 * @type {(lane: Lane, events: TimelineEvents, words: TimelineWords) => Runs} */
export function makeRuns(lane, events, words) {
  /** @type {Runs} */
  const runs = { start: [], end: [], latest: [], label: [] };
  let busy = 0;
  for (let at = 0; at < lane.start.length; at++) {
    const label = labelEvent(events, words, lane.event[at]);
    const last = runs.label.length - 1, length = lane.end[at] - lane.start[at];
    // After a longer gap than the work around it, the work has a label of its own.
    const goesOn = last >= 0 && runs.label[last] === label && lane.start[at] - runs.end[last] <= busy + length;
    busy = goesOn ? busy + length : length;
    if (goesOn) runs.end[last] = runs.latest[last] = lane.end[at];
    else {
      runs.start.push(lane.start[at]);
      runs.end.push(lane.end[at]);
      runs.latest.push(lane.end[at]);
      runs.label.push(label);
    }
  }
  return runs;
}

/** Return the pass and micro-batch of an event, such as `F0`; of what is no pass, its kind.
 * @type {(events: TimelineEvents, words: TimelineWords, event: number) => string} */
export function labelEvent(events, words, event) {
  const kind = words.kinds[events.kind[event]];
  return kind === "compute" ? words.letters[events.phase[event]] + events.microBatch[event] : kind;
}

/** Return the predicted event of each measured one by index, or -1: that of the same row, name, phase, micro-batch.
 * @type {(events: TimelineEvents) => Int32Array} */
export function matchPredicted(events) {
  /** @type {(at: number) => string} */
  const key = (at) => `${events.row[at]} ${events.name[at]} ${events.phase[at]} ${events.microBatch[at]}`;
  /** @type {Map<string, number[]>} */
  const known = new Map();
  for (let at = events.measured; at < events.count; at++) {
    known.set(key(at), [...(known.get(key(at)) ?? []), at]);
  }
  // A gradient sum occurs twice, where it starts and where it is waited for: the first belongs to the first.
  /** @type {Map<string, number>} */
  const used = new Map();
  return Int32Array.from({ length: events.measured }, (_, at) => {
    const name = known.size ? key(at) : "";
    const count = used.get(name) ?? 0;
    used.set(name, count + 1);
    return known.get(name)?.[count] ?? -1;
  });
}
