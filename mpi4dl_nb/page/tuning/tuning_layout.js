// Where plans lie in a chart of time against memory, and which is next to which; pure numbers.

import { chooseByteUnit } from "../shared/format.js";
import { clamp, makeTicks } from "../shared/numbers.js";
import { measureRectangle } from "../shared/rectangles.js";

/** Return the part of an axis that shows all `values`: [least, most], by factors if they differ much.
 * @type {(values: number[], most?: number) => Axis} */
export function fitAxis(values, most = Infinity) {
  const low = Math.min(...values), high = Math.max(...values);
  const byFactors = high / low > 6;
  if (byFactors) return { low: low / 1.25, high: Math.min(high * 1.25, most), byFactors };
  const margin = Math.max(high - low, high * 0.1) * 0.12;
  return { low: Math.max(low - margin, 0), high: Math.min(high + margin, most), byFactors };
}

/** Return the fraction of an axis, 0 to 1, at which a value lies.
 * @type {(axis: Axis, value: number) => number} */
export function placeOnAxis({ low, high, byFactors }, value) {
  return byFactors ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low);
}

/** Return round values of an axis in units of `unit`, about `most` of them.
 * @type {(axis: Axis, unit: number, most: number) => number[]} */
export function makeAxisTicks({ low, high, byFactors }, unit, most) {
  if (!byFactors) return makeTicks(low / unit, high / unit, most).ticks.map((tick) => tick * unit);
  /** @type {number[]} */
  const ticks = [], digits = Math.log10(high / low) * 3 > most ? [1] : [1, 2, 5];
  for (let power = Math.floor(Math.log10(low / unit)); 10 ** power * unit <= high; power++)
    for (const digit of digits) ticks.push(digit * 10 ** power * unit);
  return ticks.filter((tick) => tick >= low && tick <= high);
}

/** Return [bytes, text] of about `most` round values of an axis of bytes, all in one unit: a GB is no 1000 MB.
 * @type {(axis: Axis, most: number) => [number, string][]} */
export function makeByteTicks(axis, most) {
  const [name, unit] = chooseByteUnit(axis.high);
  return makeAxisTicks(axis, unit, most).map((bytes) => [bytes, `${Number((bytes / unit).toPrecision(3))} ${name}`]);
}

/** Return the layout of a chart of points on `width` x `height` px: both axes, and each point's places in px.
 * @type {(points: TuningPoint[], rankBytes: number | null, width: number, height: number) => TuningLayout} */
export function layOutPoints(points, rankBytes, width, height) {
  /** @type {Rectangle} */
  const inner = [26, 74, height - 48, width - 18], [high, wide] = measureRectangle(inner);
  /** @type {(key: "image_s" | "bytes") => number[]} */
  const all = (key) => points.flatMap((each) => [each[key], each[`measured_${key}`] ?? 0]).filter((each) => each > 0);
  // Plans that need many times what fits are shown at the edge: else all others would share a corner.
  const fitting = points.filter((each) => each.number > 0);
  const edge = rankBytes ? Math.max(rankBytes * 1.6, ...fitting.map((each) => each.bytes * 1.1)) : Infinity;
  const across = fitAxis([...all("bytes").filter((each) => each <= edge), ...(rankBytes && rankBytes < 4 *
    Math.max(...fitting.map((each) => each.bytes)) ? [rankBytes] : [])], edge);
  const slowest = Math.max(...fitting.map((each) => each.cost[0])) * 4;
  const down = fitAxis(all("image_s").filter((each) => each <= slowest));
  /** @type {(seconds: number, bytes: number) => Pair} */
  const place = (seconds, bytes) => [
    inner[1] + clamp(placeOnAxis(across, bytes), 0, 1) * wide,
    inner[0] + (1 - clamp(placeOnAxis(down, seconds), 0, 1)) * high,
  ];
  const places = points.map((each) => ({
    predicted: place(each.image_s, each.bytes),
    measured: each.measured_image_s ? place(each.measured_image_s, each.measured_bytes ?? each.bytes) : null,
  }));
  return { inner, across, down, places, place };
}

/** Return a number with its unit without zeros after the point: `5.00 ms` is `5 ms`.
 * @type {(text: string) => string} */
export function shortenZeros(text) {
  return text.replace(/\.0+ /, " ").replace(/(\.\d*[1-9])0+ /, "$1 ");
}

/** Return the corners of the Pareto front in px from the least memory on: steps, since nothing is between plans.
 * @type {(points: TuningPoint[], places: PointPlace[]) => Pair[]} */
export function traceFront(points, places) {
  const front = points.map((each, at) => ({ each, at })).filter(({ each }) => each.on_front)
    .map(({ at }) => places[at].measured ?? places[at].predicted).sort((a, b) => a[0] - b[0] || b[1] - a[1]);
  return front.flatMap(([x, y], at) => (at ? [[x, front[at - 1][1]], [x, y]] : [[x, y]]));
}

/** Return the point nearest to (x, y) within `reach` px, or -1.
 * @type {(places: PointPlace[], x: number, y: number, reach: number) => number} */
export function findNearestPoint(places, x, y, reach) {
  let best = -1, least = reach;
  places.forEach(({ predicted, measured }, at) => {
    for (const [px, py] of measured ? [measured, predicted] : [predicted]) {
      const away = Math.hypot(px - x, py - y);
      if (away <= least) [best, least] = [at, away];
    }
  });
  return best;
}

/** Return the fitting point next to `from` by memory (ArrowLeft, ArrowRight) or time (ArrowUp: slower), or `from`.
 * @type {(points: TuningPoint[], from: number, key: string) => number} */
export function findNextPoint(points, from, key) {
  const axis = key === "ArrowLeft" || key === "ArrowRight" ? 1 : 0;
  const order = points.map((_, at) => at).filter((at) => points[at].number > 0)
    .sort((a, b) => points[a].cost[axis] - points[b].cost[axis] || a - b);
  if (key === "Home") return order[0];
  if (key === "End") return order[order.length - 1];
  const by = key === "ArrowRight" || key === "ArrowUp" ? 1 : -1;
  return order[clamp(order.indexOf(from) + by, 0, order.length - 1)];
}

/** @type {Record<string, (r: number) => string>} */
const SHAPES_OF_POINTS = {
  circle: (r) => `M${-r} 0a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0z`,
  square: (r) => `M${-r * 0.9} ${-r * 0.9}h${r * 1.8}v${r * 1.8}h${-r * 1.8}z`,
  triangle: (r) => `M0 ${-r * 1.15}L${r * 1.1} ${r * 0.85}H${-r * 1.1}z`,
  diamond: (r) => `M0 ${-r * 1.25}L${r * 1.05} 0L0 ${r * 1.25}L${-r * 1.05} 0z`,
  cross: (r) => {
    const [a, b] = [r * 0.4, r * 1.1];
    return `M${-a} ${-b}H${a}V${-a}H${b}V${a}H${a}V${b}H${-a}V${a}H${-b}V${-a}H${-a}z`;
  },
  star: (r) => `M${Array.from({ length: 10 }, (_, at) => {
    const [size, turn] = [at % 2 ? r * 0.55 : r * 1.3, (at * Math.PI) / 5];
    return `${(size * Math.sin(turn)).toFixed(2)} ${(-size * Math.cos(turn)).toFixed(2)}`;
  }).join("L")}z`,
};

/** Return the SVG path of a point's shape of radius r around (0, 0).
 * @type {(shape: string, r: number) => string} */
export function drawPointShape(shape, r) {
  return SHAPES_OF_POINTS[shape](r);
}
