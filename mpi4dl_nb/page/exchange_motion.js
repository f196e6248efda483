// How strips travel from rank to rank: a progress from 0 to 1 becomes places, and nothing here draws.

/** Return a progress that starts and ends slowly. */
export function easeBoth(progress) {
  return progress < 0.5 ? 4 * progress ** 3 : 1 - (2 - 2 * progress) ** 3 / 2;
}

/** Return `{ lift, travel, landed, glow }` of message `index` of `count`, each 0 to 1, at a progress of its frame.
 *
 * A strip lifts off its owner, travels, and lands; the glow of its landing fades. Later messages start a little later.
 */
export function computeFlight(progress, index, count) {
  const delay = count > 1 ? (0.16 * index) / (count - 1) : 0;
  const own = Math.min(1, Math.max(0, (progress - delay) / (1 - 0.16)));
  const ramp = (from, to) => Math.min(1, Math.max(0, (own - from) / (to - from)));
  return {
    lift: ramp(0, 0.14) * (1 - ramp(0.72, 0.84)),
    travel: easeBoth(ramp(0.08, 0.8)),
    landed: own >= 0.84,
    glow: own < 0.84 ? 0 : 1 - ramp(0.84, 1),
  };
}

/** Return the rectangle at `travel` between two, on a bow to the right of its way, so that two that swap do not meet. */
export function bendBetween(from, to, travel) {
  const start = findCentre(from), end = findCentre(to);
  const way = [end[0] - start[0], end[1] - start[1]];
  const bow = 0.18 * Math.sin(Math.PI * travel);
  const size = [2, 3].map((side) => from[side] + (to[side] - from[side]) * travel);
  const middle = [start[0] + way[0] * travel - way[1] * bow, start[1] + way[1] * travel + way[0] * bow];
  return [middle[0] - size[0] / 2, middle[1] - size[1] / 2, ...size];
}

/** Return a rectangle grown by `factor` about its middle. */
export function growRectangle([left, top, width, height], factor) {
  return [left - (width * (factor - 1)) / 2, top - (height * (factor - 1)) / 2, width * factor, height * factor];
}

/** Return the centre [x, y] of a rectangle. */
export function findCentre([left, top, width, height]) {
  return [left + width / 2, top + height / 2];
}

/** Return where the term of a sum is, 0 on its rank to 1 at the sum sign, and whether it is the `total` on its way back.
 *
 * A sum that is only begun stays at the sign; one that has arrived comes from there.
 */
export function computeTerm(progress, { starts, waits }) {
  const there = (from, to) => easeBoth(Math.min(1, Math.max(0, (progress - from) / (to - from))));
  if (starts && waits) return progress < 0.5 ? { at: there(0, 0.45), total: false } : { at: 1 - there(0.55, 1), total: true };
  return starts ? { at: there(0, 0.8), total: false } : { at: 1 - there(0.1, 0.9), total: true };
}
