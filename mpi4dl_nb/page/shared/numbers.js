// Numbers and their limits.

/** Return a value, or the limit that it exceeds; `high` where the limits cross.
 * @type {(value: number, low: number, high: number) => number} */
export function clamp(value, low, high) {
  return Math.min(Math.max(value, low), high);
}
