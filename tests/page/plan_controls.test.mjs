import assert from "node:assert/strict";
import test from "node:test";

import { listSteps } from "../../mpi4dl_nb/page/plan/plan_controls.js";
import { findNearest } from "../../mpi4dl_nb/page/shared/numbers.js";
import { describeChange, scaleGauge } from "../../mpi4dl_nb/page/plan/plan_gauges.js";
import { SettingSender } from "../../mpi4dl_nb/page/plan/plan_view.js";

test("a slider stands at the nearest of its steps", () => {
  assert.equal(findNearest([64, 96, 128], 100), 1);
  assert.equal(findNearest([64, 96, 128], 9999), 2);
  assert.deepEqual(listSteps({ low: 0, high: 3 }), [0, 1, 2, 3]);
  assert.deepEqual(listSteps({ steps: [1, 2, 4] }), [1, 2, 4]);
});

test("a gauge's bar is as long as the greatest of its value, the one before, and the limit", () => {
  assert.deepEqual(scaleGauge({ value: 4, limit: 16 }, { value: 8 }), { value: 0.25, before: 0.5, limit: 1 });
  assert.deepEqual(scaleGauge({ value: 32, limit: 16 }, undefined), { value: 1, before: null, limit: 0.5 });
  assert.deepEqual(scaleGauge(undefined, undefined), { value: null, before: null, limit: null });
});

test("a change is told in words", () => {
  assert.equal(describeChange({ value: 11 }, { value: 10 }), "10 % more than the plan before");
  assert.equal(describeChange({ value: 9 }, { value: 10 }), "10 % less than the plan before");
  assert.equal(describeChange({ value: 40 }, { value: 10 }), "4.0 times the plan before");
  assert.equal(describeChange({ value: 1001 }, { value: 1000 }), "under 1 % more than the plan before");
  assert.equal(describeChange({ value: 10 }, { value: 10 }), "");
  assert.equal(describeChange({ value: null }, { value: 10 }), "");
});

test("one message is under way at a time, and the latest values follow it", () => {
  const sent = [];
  const sender = new SettingSender((content) => sent.push(content));
  for (const split of ["2", "3", "4"]) sender.set({ split_size: split });
  sender.set({ parts: "2" });
  assert.deepEqual(sent.map((each) => each.set), [{ split_size: "2" }]);
  assert.ok(!sender.isQuiet);
  sender.answer(sent[0].asked);
  assert.deepEqual(sent[1].set, { split_size: "4", parts: "2" });
  sender.answer(sent[1].asked);
  assert.equal(sent.length, 2);
  assert.ok(sender.isQuiet);
});

test("of two views of one model, which both hear all answers, each waits for its own", () => {
  const sent = [], [first, second] = ["first", "second"].map((view) =>
    new SettingSender(({ asked }) => sent.push([view, asked])));
  const answer = (asked) => [first, second].forEach((view) => view.answer(asked));
  first.set({ parts: 1 });
  second.set({ parts: 2 });
  first.set({ parts: 3 });
  answer(sent[1][1]);
  assert.ok(!first.isQuiet && second.isQuiet);
  answer(sent[0][1]);
  assert.deepEqual(sent.map(([view]) => view), ["first", "second", "first"]);
  answer(sent[0][1]); // once more: it is no answer to what was sent since
  assert.ok(!first.isQuiet);
  answer(sent[2][1]);
  assert.ok(first.isQuiet);
});
