// Numbers and their limits.

/** Return a value, or the limit that it exceeds; `high` where the limits cross.
 * @type {(value: number, low: number, high: number) => number} */
export function clamp(value, low, high) {
  return Math.min(Math.max(value, low), high);
}

/** Return the index of the value that is nearest to a number.
 * @type {(values: number[], wanted: number) => number} */
export function findNearest(values, wanted) {
  let best = 0;
  values.forEach((value, at) => { if (Math.abs(value - wanted) < Math.abs(values[best] - wanted)) best = at; });
  return best;
}

/** Return multiples of a step of 1, 2 or 5 (times ten, ...), at most `most` from `low` to `high`, and that step.
 * @type {(low: number, high: number, most: number) => { ticks: number[], step: number }} */
export function makeTicks(low, high, most) {
  const rough = (high - low) / Math.max(most, 1), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5].map((digit) => digit * power).find((each) => each >= rough * (1 - 1e-9)) ?? 10 * power;
  const ticks = [];
  for (let number = Math.ceil(low / step - 1e-9); number * step <= high * (1 + 1e-12); number++) ticks.push(number * step);
  return { ticks, step };
}
