import assert from "node:assert/strict";
import test from "node:test";

import {
  drawPointShape, findNearestPoint, findNextPoint, fitAxis, layOutPoints, makeAxisTicks, makeByteTicks, placeOnAxis,
  shortenZeros, traceFront,
} from "../../mpi4dl_nb/page/tuning/tuning_layout.js";

const MB = 2 ** 20;

function makePoint(number, image_s, megabytes, more = {}) {
  const point = { number, image_s, bytes: megabytes * MB, measured_image_s: null, measured_bytes: null, ...more };
  return { ...point, cost: [point.measured_image_s ?? image_s, point.measured_bytes ?? point.bytes] };
}

const POINTS = [
  makePoint(1, 0.002, 120, { on_front: true, measured_image_s: 0.003, measured_bytes: 130 * MB }),
  makePoint(2, 0.004, 90, { on_front: true }), makePoint(3, 0.005, 140), makePoint(4, 0.016, 80, { on_front: true }),
  makePoint(0, 0.001, 900),
];

test("an axis goes by factors where values differ much, and shows all of them", () => {
  const wide = fitAxis([1, 100]), narrow = fitAxis([80, 100]);
  assert.deepEqual([wide.byFactors, narrow.byFactors], [true, false]);
  for (const [axis, values] of [[wide, [1, 10, 100]], [narrow, [80, 90, 100]]]) {
    const places = values.map((value) => placeOnAxis(axis, value));
    assert.ok(places[0] > 0 && places[2] < 1 && Math.abs(places[1] - 0.5) < 0.01);
  }
  assert.ok(fitAxis([5, 5]).low < 5 && fitAxis([5, 5]).high > 5);
});

test("ticks are round and on the axis", () => {
  assert.deepEqual(makeAxisTicks({ low: 78, high: 128, byFactors: false }, 1, 5), [80, 90, 100, 110, 120]);
  assert.deepEqual(makeAxisTicks({ low: 1.5, high: 30, byFactors: true }, 1, 9), [2, 5, 10, 20]);
  assert.deepEqual(["5.00 ms", "20.0 MB", "1.50 s", "100 ms"].map(shortenZeros), ["5 ms", "20 MB", "1.5 s", "100 ms"]);
});

test("ticks of bytes are round in the unit of their texts, also above 1 GB", () => {
  const axis = { low: 950 * MB, high: 1250 * MB, byFactors: false };
  const ticks = makeByteTicks(axis, 6);
  assert.deepEqual(ticks.map(([, text]) => text), ["0.95 GB", "1 GB", "1.05 GB", "1.1 GB", "1.15 GB", "1.2 GB"]);
  for (const [bytes, text] of ticks) assert.ok(Math.abs(bytes / (1024 * MB) - parseFloat(text)) < 1e-9);
  const factors = makeByteTicks({ low: 80 * MB, high: 4200 * MB, byFactors: true }, 9);
  assert.deepEqual(factors.map(([, text]) => text), ["0.1 GB", "0.2 GB", "0.5 GB", "1 GB", "2 GB"]);
  const small = makeByteTicks({ low: 75 * MB, high: 130 * MB, byFactors: false }, 3);
  assert.deepEqual(small.map(([, text]) => text), ["80 MB", "100 MB", "120 MB"]);
});

test("faster plans are lower, larger ones farther right, and those beyond the limit stay at the edge", () => {
  const { inner, places } = layOutPoints(POINTS, 150 * MB, 800, 400);
  const [first, second, , slow, beyond] = places;
  assert.ok(first.measured[1] > second.predicted[1] && second.predicted[1] > slow.predicted[1]);
  assert.ok(first.predicted[0] > second.predicted[0]);
  const [top, left, , right] = inner;
  assert.equal(Math.round(beyond.predicted[0]), right);
  for (const { predicted: [x, y] } of places) assert.ok(x >= left && x <= 800 && y >= top && y <= 400);
});

test("the front goes in steps from the least memory to the fastest", () => {
  const { places } = layOutPoints(POINTS, 150 * MB, 800, 400), front = traceFront(POINTS, places);
  assert.equal(front.length, 5);
  assert.deepEqual(front[0], places[3].predicted);
  assert.deepEqual(front[1], [places[1].predicted[0], places[3].predicted[1]]);
  assert.deepEqual(front[4], places[0].measured);
});

test("the pointer finds the nearest plan, predicted or measured, and none far away", () => {
  const { places } = layOutPoints(POINTS, 150 * MB, 800, 400);
  for (const at of [0, 1, 2, 3]) assert.equal(findNearestPoint(places, ...places[at].predicted, 12), at);
  assert.equal(findNearestPoint(places, places[0].measured[0] + 3, places[0].measured[1], 12), 0);
  assert.equal(findNearestPoint(places, 0, 0, 12), -1);
});

test("arrow keys go by memory and by time, over the plans that fit", () => {
  const go = (from, ...keys) => keys.reduce((at, key) => findNextPoint(POINTS, at, key), from);
  assert.equal(go(3, "ArrowRight"), 1);
  assert.equal(go(3, "ArrowRight", "ArrowRight", "ArrowRight"), 2);
  assert.equal(go(0, "ArrowUp"), 1);
  assert.equal(go(0, "ArrowDown"), 0);
  assert.deepEqual([go(2, "Home"), go(1, "End")], [0, 3]);
});

test("every shape is a path", () => {
  for (const shape of ["circle", "square", "triangle", "diamond", "cross", "star"])
    assert.match(drawPointShape(shape, 6), /^M[-\d. aLHVvhz0-9]+z$/);
});
