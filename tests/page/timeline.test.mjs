import assert from "node:assert/strict";
import test from "node:test";

import { formatBytes, formatDuration, formatShare } from "../../mpi4dl_nb/page/shared/format.js";
import { makeTicks } from "../../mpi4dl_nb/page/shared/numbers.js";
import { DRAG_PX, listenToDrag } from "../../mpi4dl_nb/page/shared/pointer_drag.js";
import { fillStrip } from "../../mpi4dl_nb/page/timeline/strips.js";
import { pickInk } from "../../mpi4dl_nb/page/shared/textures.js";
import { labelEvent, makeLanes, makeRuns, matchPredicted } from "../../mpi4dl_nb/page/timeline/timeline_data.js";
import { handleTimelineKey, listenToPointer } from "../../mpi4dl_nb/page/timeline/timeline_input.js";
import { describeLeftOut, findPlace, getScrollLimit, makeTimelineLayout, revealRow } from "../../mpi4dl_nb/page/timeline/timeline_layout.js";
import { dragWindow, findHandle, getWindow } from "../../mpi4dl_nb/page/timeline/timeline_overview.js";
import { TimelineScene } from "../../mpi4dl_nb/page/timeline/timeline_scene.js";
import {
  findBarAt, findFirst, findVisible, limitSpan, mergeBars, panSpan, revealSpan, zoomSpan,
} from "../../mpi4dl_nb/page/timeline/timeline_span.js";
import { describeEvent, formatTick, searchEvents } from "../../mpi4dl_nb/page/timeline/timeline_text.js";

const close = (found, wanted) => assert.ok(Math.abs(found - wanted) < 1e-9, `${found}, not ${wanted}`);

/** Two ranks: work, a message that waits, work; and the first work as predicted. */
function makeStep() {
  const words = {
    counts: [4, 1], seconds: [1, 0.8], titles: ["a step", "predicted"], wait: 3, row_looks: [0, 2, 3],
    looks: ["compute, forward", "compute, backward", "halo", "waiting for others"].map((name) => ({ name })),
    names: ["seg1", "win2", "seg3"], layers: ["stem.conv", "block.conv", ""], kinds: ["compute", "halo"],
    work: [true, false], phases: ["forward", "backward"], letters: ["F", "B"],
    rows: [{ rank: 0, roles: "stage 0, tile 0" }, { rank: 3, roles: "" }],
  };
  const names = ["start", "end", "wait", "bytes", "row", "look", "name", "kind", "phase", "microBatch", "place"];
  const rows = [
    [0.0, 0.4, 0, 0, 0, 0, 0, 0, 0, 0, 2], [0.4, 0.6, 0.15, 3072, 0, 2, 1, 1, 0, 0, 0],
    [0.6, 1.0, 0, 0, 0, 1, 2, 0, 1, 1, 3], [0.1, 0.9, 0, 0, 1, 0, 0, 0, 0, 0, 1],
    [0.0, 0.2, 0, 0, 0, 0, 0, 0, 0, 0, 0],
  ];
  const columns = Object.fromEntries(names.map((name, at) => [name, Float64Array.from(rows, (row) => row[at])]));
  return { words, events: new TimelineScene(columns, words).events };
}

function makeScene(width = 1178) {
  const { words, events } = makeStep(), scene = new TimelineScene(events, words);
  scene.resize(width);
  return scene;
}

function makeLane(bars) {
  const latest = [];
  bars.forEach(([, end], at) => latest.push(Math.max(end, latest[at - 1] ?? 0)));
  return {
    start: bars.map(([start]) => start), end: bars.map(([, end]) => end), look: bars.map(([, , look]) => look ?? 0),
    event: bars.map((_, at) => at), latest,
  };
}

test("work, messages and predictions have lanes of their own, and waiting is the end of what waited", () => {
  const { words, events } = makeStep(), lanes = makeLanes(events, words);
  assert.deepEqual([...lanes[0][0].event], [0, 2]);
  assert.deepEqual([...lanes[0][1].event], [1, 1]);
  assert.deepEqual([...lanes[0][1].look], [2, 3]);
  close(lanes[0][1].start[1], 0.45);
  assert.deepEqual([...lanes[0][2].event], [4]);
  assert.equal(lanes[1][1].start.length, 0);
});

test("a run of work on one micro-batch has one label, but not across a longer gap", () => {
  const { words, events } = makeStep();
  assert.equal(labelEvent(events, words, 2), "B1");
  assert.equal(labelEvent(events, words, 1), "halo");
  const same = { ...events, phase: new Int32Array(5), microBatch: new Int32Array(5), kind: new Int32Array(5) };
  const near = makeRuns(makeLane([[0, 0.1], [0.2, 0.3], [0.31, 0.4], [5, 5.1]]), same, words);
  assert.deepEqual(near.start, [0, 5]);
  assert.deepEqual(near.end, [0.4, 5.1]);
});

test("a prediction is that of the same instruction", () => {
  assert.deepEqual([...matchPredicted(makeStep().events)], [4, -1, -1, -1]);
});

test("the time under the pointer stays in place while zooming, and the step is never left", () => {
  const span = zoomSpan({ start: 2, end: 6 }, 250, 1000, 4, 10);
  close(span.start + 0.25 * (span.end - span.start), 3);
  close(span.end - span.start, 1);
  assert.deepEqual(zoomSpan({ start: 2, end: 6 }, 250, 1000, 1e-6, 10), { start: 0, end: 10 });
  const tiny = zoomSpan({ start: 2, end: 6 }, 250, 1000, 1e30, 10);
  assert.ok(tiny.end > tiny.start);
});

test("panning stops at both ends", () => {
  assert.deepEqual(panSpan({ start: 2, end: 4 }, 1e9, 100, 10), { start: 0, end: 2 });
  assert.deepEqual(panSpan({ start: 2, end: 4 }, -1e9, 100, 10), { start: 8, end: 10 });
  close(panSpan({ start: 2, end: 4 }, 50, 100, 10).start, 1);
  assert.deepEqual(limitSpan({ start: -3, end: 40 }, 10), { start: 0, end: 10 });
});

test("a span moves only as far as needed to show an event", () => {
  assert.deepEqual(revealSpan({ start: 0, end: 4 }, 1, 2, 10), { start: 0, end: 4 });
  for (const [from, to] of [[7, 7.5], [0.1, 0.2], [1, 9]]) {
    const span = revealSpan({ start: 4, end: 6 }, from, to, 10);
    assert.ok(span.start <= from && span.end >= to, `${span.start} ${span.end}`);
  }
});

test("visible bars are found by halving, as a look at all of them finds them", () => {
  let seed = 7;
  const random = () => (seed = (seed * 16807) % 2147483647) / 2147483647;
  const starts = Array.from({ length: 300 }, random).sort((a, b) => a - b);
  const bars = starts.map((start) => [start, start + random() * 0.05]);
  const lane = makeLane(bars);
  for (let tried = 0; tried < 50; tried++) {
    const start = random(), span = { start, end: start + random() * 0.1 };
    const [first, last] = findVisible(lane, span);
    const wanted = bars.flatMap(([from, to], at) => (to > span.start && from < span.end ? [at] : []));
    assert.ok(!wanted.length || (first === wanted[0] && last > wanted.at(-1)));
  }
  assert.equal(findFirst([1, 2, 2, 3], 2), 3);
  assert.equal(findFirst([1, 2, 2, 3], 2, true), 1);
});

test("bars thinner than a pixel are merged, and those that are wider are not", () => {
  const lane = makeLane([[0, 0.001, 0], [0.001, 0.004, 1], [0.004, 0.005, 0], [0.5, 0.7, 2]]);
  const boxes = mergeBars(lane, { start: 0, end: 1 }, 100);
  assert.deepEqual(boxes.map((each) => Math.round(each * 1e6) / 1e6), [0, 1, 1, -1, 1, 50, 70, 2, 3, 1]);
  const many = makeLane(Array.from({ length: 50_000 }, (_, at) => [at / 50_000, (at + 1) / 50_000, at % 3]));
  const merged = mergeBars(many, { start: 0, end: 1 }, 800);
  assert.ok(merged.length / 5 <= 801);
  assert.ok(Math.abs(merged.at(-4) - 800) <= 1);
});

test("a merged box is kept if the search found one of its bars", () => {
  const lane = makeLane([[0, 0.001], [0.001, 0.002], [0.1, 0.101]]);
  const boxes = mergeBars(lane, { start: 0, end: 1 }, 100, (bar) => bar === 1);
  assert.deepEqual([boxes[4], boxes[9]], [1, 0]);
});

test("thin boxes are painted as pixels, wide ones are left out", () => {
  const pixels = new Uint32Array(10);
  assert.equal(fillStrip(pixels, [0, 1, 0, -1, 1, 2, 4, 1, 7, 0, 5, 9, 1, 8, 1], 1, 3, [11, 12], [21, 22]), true);
  assert.deepEqual([...pixels], [11, 0, 22, 22, 0, 0, 0, 0, 0, 0]);
  assert.equal(fillStrip(pixels, [5, 9, 1, 8, 1], 1, 3, [11, 12], [21, 22]), false);
});

test("a bar is hit at its time, a thin one also beside it", () => {
  const lane = makeLane([[0, 0.2], [0.2, 0.4], [0.6, 0.600001]]);
  assert.deepEqual([0.1, 0.2, 0.5].map((time) => findBarAt(lane, time)), [0, 1, -1]);
  assert.equal(findBarAt(lane, 0.597, 0.005), 2);
  assert.equal(findBarAt(lane, 0.606, 0.005), -1);
});

test("ticks are round and not more than asked for", () => {
  const { ticks, step } = makeTicks(0.0123, 0.0191, 6);
  close(step, 0.002);
  assert.deepEqual(ticks.map((tick) => formatTick(tick, step, 0.0191)), ["14 ms", "16 ms", "18 ms"]);
  assert.equal(formatTick(0.0002, 0.0002, 0.0014), "0.2 ms");
  assert.equal(formatTick(2.00125, 0.00025, 2.1), "2.0013 s");
});

test("numbers have three digits and a unit", () => {
  assert.deepEqual([0, 12.34, 0.01234, 0.0000051].map(formatDuration), ["0 s", "12.3 s", "12.3 ms", "5.10 µs"]);
  assert.deepEqual([12, 3072, 5 << 20].map(formatBytes), ["12 bytes", "3.0 KB", "5.0 MB"]);
  assert.deepEqual([0, 0.001, 0.304].map(formatShare), ["0%", "under 1%", "30%"]);
});

test("an event is described by its layer, rank, times, waiting, bytes and prediction", () => {
  const { words, events } = makeStep();
  assert.deepEqual(describeEvent(events, words, 1), [
    "block.conv", "win2", "halo, forward · rank 0 (stage 0, tile 0) · micro-batch 0", "starts at 400 ms, lasts 200 ms",
    "own time 50.0 ms, waiting for others 150 ms", "sends 3.0 KB",
  ]);
  assert.equal(describeEvent(events, words, 0, 4).at(-1), "predicted: 200 ms; took 2.0 times as long");
  assert.match(describeEvent(events, words, 4)[2], /^predicted: compute/);
});

test("a search finds layers, kinds, passes, labels and waiting, and all of its words", () => {
  const { words, events } = makeStep();
  const find = (text) => [...searchEvents(events, words, text).found];
  assert.deepEqual(find("BLOCK"), [0, 1, 0, 0, 0]);
  assert.deepEqual(find("b1"), [0, 0, 1, 0, 0]);
  assert.deepEqual(find("waiting"), [0, 1, 0, 0, 0]);
  assert.deepEqual(find("compute, forward"), [1, 0, 0, 1, 1]);
  assert.deepEqual(find("stem halo"), [0, 0, 0, 0, 0]);
  assert.equal(searchEvents(events, words, "stem").count, 2);
  assert.equal(searchEvents(events, words, "  "), null);
});

test("a point is in a row and lane, and a row is scrolled into view", () => {
  const layout = makeTimelineLayout(40, true, 1000);
  assert.ok(makeTimelineLayout(40, true, 1000, 300).height <= 301);
  assert.ok(makeTimelineLayout(40, true, 1000, -50).height > 100, "a row can be seen, however low the window is");
  assert.equal(describeLeftOut(layout), "");
  assert.match(describeLeftOut(makeTimelineLayout(4, true, 700)), /shares of each rank's time:/);
  assert.match(describeLeftOut(makeTimelineLayout(4, true, 320)), /shares of each rank's time, and its stage and tile/);
  assert.equal(findPlace(layout, 0, 500, 3).row, -1);
  const y = layout.ruler + 2 * layout.rowHeight + layout.lanes[1].top + 1;
  assert.deepEqual(findPlace(layout, 0, 500, y), { row: 2, lane: 1, beside: false });
  assert.deepEqual(findPlace(layout, layout.rowHeight, 10, y), { row: 3, lane: 1, beside: true });
  assert.ok(getScrollLimit(layout) > 0);
  const scroll = revealRow(layout, 0, 39);
  assert.ok(39 * layout.rowHeight - scroll >= 0 && 40 * layout.rowHeight - scroll <= layout.height - layout.ruler);
  assert.equal(revealRow(layout, scroll, 38), scroll);
});

test("the overview's window is moved and resized", () => {
  const span = { start: 2, end: 4 };
  assert.deepEqual(getWindow(span, 10, 100), [20, 40]);
  assert.deepEqual([20, 40, 30, 90].map((x) => findHandle(x, span, 10, 100)), ["start", "end", "both", "jump"]);
  assert.deepEqual(dragWindow(span, "both", 30, 40, 10, 100), { start: 3, end: 5 });
  const wider = dragWindow(span, "end", 40, 50, 10, 100);
  close(wider.start, 2);
  close(wider.end, 5);
  close(dragWindow(span, "start", 20, 30, 10, 100).start, 3);
});

test("a drag is of one pointer and of the main button", () => {
  const seen = [], element = Object.assign(new EventTarget(), {
    setPointerCapture: () => {}, getBoundingClientRect: () => ({ left: 0, top: 0 }),
  });
  const tell = (name) => (_x, _y, event) => seen.push(`${name} ${event.pointerId}`);
  listenToDrag(element, { begin: tell("begin"), move: tell("move"), end: tell("end"), hover: tell("hover") });
  const send = (type, pointerId, button = 0) =>
    element.dispatchEvent(Object.assign(new Event(`pointer${type}`), { pointerId, button }));
  send("down", 1, 2);
  send("move", 1);
  send("up", 1, 2);
  assert.deepEqual(seen.splice(0), ["hover 1"]);
  send("down", 1);
  for (const type of ["down", "move", "up"]) send(type, 2);
  for (const type of ["move", "up", "move"]) send(type, 1);
  assert.deepEqual(seen, ["begin 1", "move 1", "end 1", "hover 1"]);
});

test("a move under the limit is a click, also if another finger moves meanwhile", () => {
  const canvas = Object.assign(new EventTarget(), {
    setPointerCapture: () => {}, style: {}, getBoundingClientRect: () => ({ left: 0, top: 0 }),
  });
  const pressed = [], page = {
    scene: { scrollBy: () => {}, pan: () => {} }, show: () => {}, leave: () => {}, hover: () => {},
    press: (...place) => pressed.push(place),
  };
  listenToPointer(canvas, page);
  const send = (type, pointerId, clientX) =>
    canvas.dispatchEvent(Object.assign(new Event(`pointer${type}`), { pointerId, clientX, clientY: 5, button: 0 }));
  send("down", 1, 10);
  send("down", 2, 300);
  send("move", 2, 400);
  send("up", 2, 400);
  send("up", 1, 10 + DRAG_PX / 2);
  assert.deepEqual(pressed, [[10 + DRAG_PX / 2, 5]]);
});

test("keys zoom, move and go from event to event and from rank to rank", () => {
  const scene = makeScene(), press = (key, shiftKey = false) => handleTimelineKey(scene, { key, shiftKey });
  assert.equal(press("ArrowRight").event, 0);
  scene.select(0);
  assert.deepEqual([scene.rank, press("ArrowRight").event, press("End").event], [0, 1, 2]);
  assert.equal(press("ArrowLeft").event, 0);
  scene.select(press("ArrowDown").event);
  assert.deepEqual([scene.selected, scene.rank, press("ArrowDown").event], [3, 3, 3]);
  assert.equal(press("ArrowUp").event, 1);
  const closer = press("w").span;
  assert.ok(closer.end - closer.start < 0.7);
  scene.span = closer;
  assert.ok(press("d").span.start > closer.start && press("ArrowLeft", true).span.start < closer.start);
  assert.deepEqual(press("0").span, { start: 0, end: 1 });
  assert.deepEqual(press("Escape"), { action: "clear" });
  assert.equal(press("x"), null);
});

test("the search goes from match to match in order of time, and round", () => {
  const scene = makeScene();
  scene.search("compute");
  const seen = [];
  for (let count = 0; count < 4; count++) {
    scene.select(scene.findMatch(1));
    seen.push(scene.selected);
  }
  assert.deepEqual(seen, [0, 3, 2, 0]);
  assert.equal(scene.findMatch(-1), 2);
  scene.search("nothing of the kind");
  assert.equal(scene.findMatch(1), -1);
});

test("events are found where they are drawn, and a predicted one selects what it predicts", () => {
  const scene = makeScene(), { layout } = scene, middle = (lane) => layout.lanes[lane].top + 2;
  const at = (time, lane, row = 0) =>
    scene.findEvent(layout.left + time * layout.plot, layout.ruler + row * layout.rowHeight + middle(lane));
  assert.deepEqual([at(0.2, 0), at(0.5, 1), at(0.1, 2), at(0.5, 0), at(0.5, 0, 1)], [0, 1, 4, -1, 3]);
  scene.select(4);
  assert.equal(scene.selected, 0);
  assert.equal(scene.findRank(5, layout.ruler + layout.rowHeight + 5), 3);
});

test("letters are dark on light colours and light on dark ones", () => {
  assert.deepEqual(["#009e73", "#4d4d4d", "#f0e442"].map(pickInk), ["#1a1a1a", "#ffffff", "#1a1a1a"]);
});
