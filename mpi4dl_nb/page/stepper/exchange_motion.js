// How strips travel from rank to rank: a progress from 0 to 1 becomes places, and nothing here draws.

import { clamp } from "../shared/numbers.js";
import { centreRectangle, findCentre, measureRectangle } from "../shared/rectangles.js";

/** Return a progress that starts and ends slowly.
 * @type {(progress: number) => number} */
function easeBoth(progress) {
  return progress < 0.5 ? 4 * progress ** 3 : 1 - (2 - 2 * progress) ** 3 / 2;
}

/** Return `{ lift, travel, landed, glow }` of message `index` of `count`, each 0 to 1, at a progress of its frame.
 *
 * A strip lifts off its owner, travels, and lands; the glow of its landing fades. Later messages start a little later.
 * @type {(progress: number, index: number, count: number) => Flight}
 */
export function computeFlight(progress, index, count) {
  const delay = count > 1 ? (0.16 * index) / (count - 1) : 0;
  const own = clamp((progress - delay) / (1 - 0.16), 0, 1);
  /** @type {(from: number, to: number) => number} */
  const ramp = (from, to) => clamp((own - from) / (to - from), 0, 1);
  return {
    lift: ramp(0, 0.14) * (1 - ramp(0.72, 0.84)),
    travel: easeBoth(ramp(0.08, 0.8)),
    landed: own >= 0.84,
    glow: own < 0.84 ? 0 : 1 - ramp(0.84, 1),
  };
}

/** Return the rectangle at `travel` between two, on a bow to the right of its way: two that swap do not meet.
 * @type {(from: Rectangle, to: Rectangle, travel: number) => Rectangle} */
export function bendBetween(from, to, travel) {
  const start = findCentre(from), end = findCentre(to);
  const way = [end[0] - start[0], end[1] - start[1]], long = Math.max(1, Math.hypot(...way));
  const bow = (clamp(0.18 * long, 7, 30) / long) * Math.sin(Math.PI * travel);
  const extent = measureRectangle(from), last = measureRectangle(to);
  return centreRectangle([start[0] + way[0] * travel - way[1] * bow, start[1] + way[1] * travel + way[0] * bow],
    extent.map((side, axis) => side + (last[axis] - side) * travel));
}

/** Return a strip as it is drawn at a `lift` of 0 to 1: off the ground even a strip of one pixel is 10 px thick.
 * @type {(rectangle: Rectangle, lift: number) => Rectangle} */
export function liftRectangle(rectangle, lift) {
  const extent = measureRectangle(rectangle).map((side) => side + lift * (3 + Math.max(0, 10 - side)));
  return centreRectangle(findCentre(rectangle), extent);
}

/** Return where the term of a sum is, 0 on its rank to 1 at the sum sign, and whether it is the `total` coming back.
 *
 * A sum that is only begun stays at the sign; one that has arrived comes from there.
 * @type {(progress: number, sum: Pick<StepSum, "starts" | "waits">) => { at: number, total: boolean }}
 */
export function computeTerm(progress, { starts, waits }) {
  /** @type {(from: number, to: number) => number} */
  const there = (from, to) => easeBoth(clamp((progress - from) / (to - from), 0, 1));
  if (starts && waits && progress < 0.5) return { at: there(0, 0.45), total: false };
  if (starts && waits) return { at: 1 - there(0.55, 1), total: true };
  return starts ? { at: there(0, 0.8), total: false } : { at: 1 - there(0.1, 0.9), total: true };
}
