import assert from "node:assert/strict";
import test from "node:test";

import {
  SIGN_PX, cutHalo, findPixel, getCellHead, locateMessage, locateTile, placePanels, placeRanks, placeSumSign, splitHalo,
} from "../../mpi4dl_nb/page/stepper/exchange_layout.js";
import { bendBetween, computeFlight, computeTerm, liftRectangle } from "../../mpi4dl_nb/page/stepper/exchange_motion.js";
import { clampStart, cutStrip } from "../../mpi4dl_nb/page/stepper/message_strips.js";
import {
  countPixels, findCentre, findMiddle, growRectangle, intersectRectangles, isInside, measureRectangle,
} from "../../mpi4dl_nb/page/shared/rectangles.js";
import { RankPainter } from "../../mpi4dl_nb/page/stepper/rank_paint.js";
import { findFrame, getFrameWidth } from "../../mpi4dl_nb/page/stepper/step_controls.js";
import { FrameStore, formatNumber, readValues, summariseFrame } from "../../mpi4dl_nb/page/stepper/step_frames.js";
import { handleStepKey } from "../../mpi4dl_nb/page/stepper/step_keys.js";
import { describePixel, movePixel } from "../../mpi4dl_nb/page/stepper/step_pixels.js";
import { StepPlayer } from "../../mpi4dl_nb/page/stepper/step_player.js";

// Four tiles of 2 x 2 in stage 0, and one rank in stage 1; an image of 40 x 60 px.
const SETUP = {
  size: [40, 60],
  boxes: [{ rows: 2, cols: 2, replica: 0 }, { rows: 1, cols: 1, replica: 0 }],
  ranks: [[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1], [1, 0, 0]].map(([box, row, col]) => ({ box, row, col })),
};
const OWN = [[0, 0, 20, 30], [0, 30, 20, 60], [20, 0, 40, 30], [20, 30, 40, 60]];
const HELD = [[0, 0, 21, 31], [0, 29, 21, 60], [19, 0, 40, 31], [19, 29, 40, 60]];

function makeMeta() {
  const panels = OWN.map((own, rank) => (
    { rank, own, held: HELD[rank], square: true, blockPx: [1, 1], values: rank }));
  return { groups: [{ panels, size: [40, 60], gradient: false, span: [0, 1] }], messages: [], sums: [], ranks: [] };
}

test("cells of a stage lie as in the image and nothing overlaps or leaves the view", () => {
  for (const [wide, most] of [[900, 430], [400, 430], [1900, 600]]) {
    const { cells, boxes, high } = placeRanks(SETUP, wide, most);
    assert.ok(cells[0][1] < cells[1][1] && cells[0][0] === cells[1][0] && cells[2][0] > cells[0][0]);
    for (const [top, left, bottom, right] of [...cells, ...boxes]) {
      assert.ok(left >= -0.5 && top >= 0 && right <= wide + 0.5 && bottom <= high, `${wide}`);
    }
    assert.ok(cells[4][1] >= cells[1][3] || cells[4][0] >= cells[2][2]);
  }
});

test("where a row is too short for all, each replica has its own, and many ranks still have room", () => {
  const boxes = [0, 0, 1, 1].map((replica) => ({ rows: 8, cols: 8, replica }));
  const ranks = boxes.flatMap((_, box) => Array.from({ length: 64 }, (_, at) => ({ box, row: at >> 3, col: at & 7 })));
  const { cells } = placeRanks({ size: [64, 64], boxes, ranks }, 700, 600);
  assert.equal(cells[0][0], cells[64][0]);
  assert.ok(cells[128][0] > cells[63][0]);
  assert.ok(cells.every((cell) => Math.min(...measureRectangle(cell)) > 5));
});

test("a pipeline of stages is one row", () => {
  const boxes = [0, 1, 2, 3].map(() => ({ rows: 1, cols: 1, replica: 0 }));
  const ranks = boxes.map((_, box) => ({ box, row: 0, col: 0 }));
  const { cells } = placeRanks({ size: [128, 160], boxes, ranks }, 880, 430);
  assert.equal(new Set(cells.map((cell) => cell[0])).size, 1);
});

test("tiles of a value have one scale, and what a rank borrows lies where its owner has it", () => {
  const { cells } = placeRanks(SETUP, 900, 430), placed = placePanels(makeMeta(), cells);
  assert.equal(new Set(placed.slice(0, 4).map((place) => place.scale[0])).size, 1);
  assert.equal(placed[4], undefined);
  const edge = [0, 29, 20, 30];  // the last own column of rank 0, the halo of rank 1
  const [home, lent] = [0, 1].map((rank) => locateTile(placed[rank], edge));
  assert.ok(Math.abs(measureRectangle(home)[1] - placed[0].scale[0]) < 1e-9);
  assert.deepEqual(lent.slice(0, 2), placed[1].rectangle.slice(0, 2));
  measureRectangle(home).forEach((side, at) => assert.ok(Math.abs(side - measureRectangle(lent)[at]) < 1e-9));
});

test("beside values without a halo there is room for the messages from there", () => {
  const { cells } = placeRanks(SETUP, 900, 430), meta = makeMeta();
  for (const panel of meta.groups[0].panels) panel.held = panel.own;
  meta.messages = OWN.map((own, target) => ({ source: 3 - target, target, tile: [14, 24, 26, 36], own }));
  const placed = placePanels(meta, cells);
  for (const { source, tile } of meta.messages) {
    const place = locateTile(placed[source], tile);
    assert.deepEqual(intersectRectangles(place, cells[source]), place);
  }
  meta.messages = meta.messages.map((message) => ({ ...message, tile: [30, 50, 50, 70] }));  // of another value
  const widest = placePanels({ ...meta, messages: [] }, cells).map((place) => place.rectangle);
  assert.deepEqual(placePanels(meta, cells).map((place) => place.rectangle), widest);
});

test("a message of a rank that shows another value starts in the middle of its cell", () => {
  const { cells } = placeRanks(SETUP, 900, 430), place = locateMessage(undefined, cells[4], [0, 0, 20, 30]);
  const [x, y] = findCentre(place);
  assert.ok(isInside(cells[4], y, x));
});

test("the pixel under the pointer is found, in halos too", () => {
  const { cells } = placeRanks(SETUP, 900, 430), placed = placePanels(makeMeta(), cells);
  for (const [rank, row, col] of [[0, 0, 0], [1, 5, 29], [3, 39, 59]]) {
    const [x, y] = findCentre(locateTile(placed[rank], [row, col, row + 1, col + 1]));
    assert.deepEqual(findPixel(placed, x, y), { rank, row, col });
  }
  assert.equal(findPixel(placed, -5, -5), null);
});

test("a halo is what is held around the own tile, each pixel once", () => {
  const tiles = cutHalo([0, 0, 10, 10], [2, 3, 8, 10]), count = (holds) => {
    let found = 0;
    for (let row = 0; row < 10; row++) for (let col = 0; col < 10; col++) found += holds(row, col);
    return found;
  };
  assert.equal(count((row, col) => tiles.filter((tile) => isInside(tile, row, col)).length), 100 - 6 * 7);
  const both = (row, col) => isInside([2, 3, 8, 10], row, col) && tiles.some((tile) => isInside(tile, row, col));
  assert.equal(count(both), 0);
  assert.deepEqual(cutHalo([0, 0, 4, 4], [0, 0, 4, 4]), []);
});

test("what is borrowed is told from padding: each pixel beside the own ones is one of both", () => {
  const panel = { held: [-2, -1, 12, 11], own: [0, 0, 10, 8] }, size = [10, 12];
  const { borrowed, padding } = splitHalo(panel, size), hits = (tiles, row, col) =>
    tiles.filter((tile) => isInside(tile, row, col)).length;
  for (let row = -2; row < 12; row++) {
    for (let col = -1; col < 11; col++) {
      const isOwn = isInside(panel.own, row, col), isInImage = isInside([0, 0, ...size], row, col);
      assert.deepEqual([hits(borrowed, row, col), hits(padding, row, col)],
        isOwn ? [0, 0] : isInImage ? [1, 0] : [0, 1], `${row} ${col}`);
    }
  }
  assert.deepEqual(splitHalo({ held: [0, 0, 4, 6], own: [0, 0, 4, 3] }, []), { borrowed: [[0, 3, 4, 6]], padding: [] });
});

test("the sign of a sum lies on no rank's name", () => {
  for (const [wide, most] of [[900, 430], [420, 300], [700, 260]]) {
    const { cells } = placeRanks(SETUP, wide, most);
    for (const ranks of [[0, 1, 2, 3], [0, 1], [0, 2], [4]]) {
      for (const aside of [-23, 0, 23]) {
        const [x, y] = placeSumSign(cells, ranks, aside);
        for (const cell of cells) {
          const [top, left, , right] = cell, name = [top, left, top + getCellHead(cell), right];
          const hidden = countPixels(intersectRectangles(name, growRectangle([y, x, y, x], SIGN_PX)));
          assert.equal(hidden, 0, `${wide} ${ranks} ${aside}`);
        }
      }
    }
  }
});

test("strips start at their owner and end at their target, all within the motion", () => {
  for (const count of [1, 4, 12]) {
    for (let index = 0; index < count; index++) {
      assert.deepEqual([computeFlight(0, index, count).travel, computeFlight(0, index, count).landed], [0, false]);
      assert.deepEqual([computeFlight(1, index, count).travel, computeFlight(1, index, count).landed], [1, true]);
      let before = 0;
      for (let at = 0; at <= 1; at += 0.05) {
        const { travel, lift, glow } = computeFlight(at, index, count);
        assert.ok(travel >= before && lift >= 0 && lift <= 1 && glow >= 0 && glow <= 1);
        before = travel;
      }
    }
  }
});

test("two strips that swap do not meet", () => {
  const [one, other] = [[0, 0, 100, 10], [0, 50, 100, 60]];
  assert.deepEqual(bendBetween(one, other, 0), one);
  bendBetween(one, other, 1).forEach((each, at) => assert.ok(Math.abs(each - other[at]) < 1e-9));
  const [there, back] = [findCentre(bendBetween(one, other, 0.5)), findCentre(bendBetween(other, one, 0.5))];
  assert.ok(Math.abs(there[1] - back[1]) > 10);
});

test("off the ground a strip of one pixel can be seen, on the ground it is one pixel", () => {
  assert.deepEqual(liftRectangle([5, 5, 85, 7], 0), [5, 5, 85, 7]);
  const lifted = liftRectangle([5, 5, 85, 7], 1);
  assert.ok(measureRectangle(lifted)[1] > 10 && Math.abs(findCentre(lifted)[0] - 6) < 1e-9);
});

test("terms go to the sum, totals come back; a sum that is only begun stays there", () => {
  const whole = { starts: true, waits: true };
  assert.deepEqual([computeTerm(0, whole).at, computeTerm(0.47, whole).at, computeTerm(1, whole).at], [0, 1, 0]);
  assert.equal(computeTerm(0.9, whole).total, true);
  assert.equal(computeTerm(1, { starts: true, waits: false }).at, 1);
  assert.deepEqual(computeTerm(0, { starts: false, waits: true }), { at: 1, total: true });
  assert.deepEqual(findMiddle([[0, 5], [30, 15]]), [15, 10]);
});

const EMPTY = { step: "a", ranks: [], groups: [], messages: [], sums: [] };
const makeFrame = (number, extra = {}) => ({ ...EMPTY, number, ...extra });
const BYTES = new DataView(new BigUint64Array([8n, 0x2020202020205d5bn]).buffer); // an empty list

test("frames are kept in order, replaced by number, and forgotten when told or with a new step", () => {
  const store = new FrameStore();
  [0, 1, 3, 2].forEach((number) => store.add(makeFrame(number), BYTES));
  assert.deepEqual(store.frames.map((each) => each.meta.number), [0, 1, 2, 3]);
  assert.equal(store.add(makeFrame(3, { dropped: [1], note: "1 dropped" }), BYTES), 2);
  assert.deepEqual(store.frames.map((each) => each.meta.number), [0, 2, 3]);
  assert.equal(store.note, "1 dropped");
  store.add(makeFrame(0, { step: "b" }), BYTES);
  assert.equal(store.last, 0);
});

test("values of a frame are those of a place, the first one too, or not kept", () => {
  const values = [{ numbers: [3, 4, 5, 6], high: 2, wide: 2 }];
  assert.deepEqual([readValues({ values }, 0), readValues({ values }, null)], [values[0], null]);
});

test("numbers are short and keep their sign", () => {
  assert.deepEqual([0, 0.01234, -1234.5, 1e-7, 23456, Infinity, -Infinity, NaN].map(formatNumber),
    ["0", "0.0123", "−1230", "1.0e−7", "2.3e4", "∞", "−∞", "NaN"]);
});

test("a frame in which ranks did several things is named by the message", () => {
  const ranks = [["compute", "forward"], ["halo", "backward"], ["update", "update", false]].map(
    ([kind, phase, moved = true]) => ({ kind, phase, moved }));
  assert.deepEqual(summariseFrame({ ranks }), { kind: "halo", phase: "backward" });
  assert.deepEqual(summariseFrame({ ranks: [] }), { kind: "", phase: "" });
});

test("the scrubber finds the frame under the pointer, however many there are", () => {
  assert.equal(findFrame(-3, 1000, 5), 0);
  assert.equal(findFrame(41, 1000, 5), 2);
  assert.equal(findFrame(5000, 1000, 5), 4);
  for (const count of [1, 50, 4000]) {
    const step = getFrameWidth(1000, count);
    for (const index of [0, count >> 1, count - 1]) assert.equal(findFrame((index + 0.5) * step, 1000, count), index);
  }
});

function makePlayer() {
  const calls = [], store = new FrameStore();
  const player = new StepPlayer(store, {
    show: (index, moves) => calls.push([index, moves]), ask: (key) => calls.push(key), tell: () => {},
  });
  player.take(makeFrame(0), BYTES);
  return { player, calls, store };
}

test("forward goes through the record only, and never asks the ranks", () => {
  const { player, calls } = makePlayer();
  player.go("n");
  player.take(makeFrame(1), BYTES);
  calls.length = 0;
  player.forward();
  assert.deepEqual(calls, []);
  player.back();
  player.forward();
  assert.deepEqual(calls, [[0, false], [1, true]]);
});

test("a step at the newest frame asks the ranks, and back asks nobody", () => {
  const { player, calls } = makePlayer();
  player.step();
  player.step();  // the ranks are still running
  player.take(makeFrame(1), BYTES);
  player.back();
  assert.equal(player.recorded, true);
  player.step();
  assert.deepEqual(calls, [[0, false], "n", [1, true], [0, false], [1, true]]);
});

test("playing shows what is recorded, then lets the ranks go on to the end of the step", () => {
  const { player, calls } = makePlayer();
  player.step();
  player.take(makeFrame(1), BYTES);
  player.back();
  player.play();
  player.rest();
  assert.equal(calls.at(-1), "n");
  player.take(makeFrame(2, { done: true }), BYTES);
  player.rest();
  assert.equal(player.playing, false);
  assert.equal(player.ended, true);
});

test("what the ranks refuse stops the player", () => {
  const { player } = makePlayer();
  player.play();
  player.refuse();
  assert.deepEqual([player.playing, player.waiting], [false, false]);
});

test("an answer without a frame ends the wait, and one after its frame changes nothing", () => {
  const { player } = makePlayer();
  player.go("f");
  player.answer(player.asked);
  assert.equal(player.waiting, false);
  player.play();
  const first = player.asked;
  player.take(makeFrame(1), BYTES);
  player.answer(first);
  assert.deepEqual([player.playing, player.waiting], [true, false]);
  player.rest();
  player.answer(first);  // not what is waited for
  assert.deepEqual([player.playing, player.waiting], [true, true]);
});

test("a frame from a cell does not take the reader away from an older one", () => {
  const { player } = makePlayer();
  player.step();
  player.take(makeFrame(1), BYTES);
  player.back();
  player.take(makeFrame(2), BYTES);
  assert.equal(player.index, 0);
  player.seek(99);
  player.take(makeFrame(3), BYTES);
  assert.equal(player.index, 3);
  player.takeHistory([makeFrame(2), makeFrame(1)], [BYTES, BYTES]);
  assert.equal(player.store.frames[player.index].meta.number, 3);
});

test("a key is an action, with Shift a move of the pixel, or left to the browser", () => {
  const done = [], actions = { n: () => done.push("n"), " ": () => done.push("space"), ArrowUp: () => done.push("up") };
  const press = (key, more = {}, tagName = "DIV") => {
    return handleStepKey({ key, target: { tagName }, ...more }, actions, (...way) => done.push(way));
  };
  assert.ok(press("n") && press(" ") && press("ArrowUp", { shiftKey: true }));
  assert.deepEqual(done.splice(0), ["n", "space", [-1, 0]]);
  const left = [press("x"), press(" ", {}, "BUTTON"), press("n", {}, "SELECT")];
  assert.deepEqual([left, done], [[false, false, false], []]);
});

test("of a strip the asked cells are shown, an upright one is turned", () => {
  const numbers = Float32Array.from({ length: 16 }, (_, at) => at);
  const upright = cutStrip({ numbers, high: 8, wide: 2 }, [10, 4, 18, 6], undefined);
  assert.deepEqual([upright.along, upright.first], ["row", 11]);
  assert.deepEqual(upright.rows, [[2, 4, 6, 8, 10], [3, 5, 7, 9, 11]]);
  assert.equal(cutStrip({ numbers, high: 2, wide: 8 }, [4, 10, 6, 18], 99).first, 13);
  assert.equal(clampStart(undefined, 3), 0);
});

test("a pixel is told with its owner, and the way by keyboard goes on in the next rank", () => {
  const { cells } = placeRanks(SETUP, 900, 430), meta = makeMeta(), placed = placePanels(meta, cells);
  const frame = { meta, values: OWN.map(() => ({ numbers: new Float32Array(651).fill(0.5), high: 21, wide: 31 })) };
  assert.deepEqual(describePixel(frame, placed[1], { rank: 1, row: 3, col: 29 }),
    ["rank 1, row 3, column 29", "value 0.5", "halo, owned by rank 0"]);
  assert.equal(describePixel(frame, placed[1], { rank: 1, row: 3, col: 30 })[2], "own pixel");
  assert.deepEqual(movePixel(placed, { rank: 0, row: 3, col: 30 }, 0, 1), { rank: 1, row: 3, col: 31 });
  assert.deepEqual(movePixel(placed, { rank: 0, row: 0, col: 0 }, -1, 0), { rank: 0, row: 0, col: 0 });
  assert.equal(movePixel([], null, 0, 1), null);
});

test("the words in an empty cell stand in the middle of its frame, and are left out where they have no room", () => {
  const written = [];
  const context = { measureText: (text) => ({ width: 7 * text.length }), fillText: (_text, _x, y) => written.push(y) };
  const write = (room) => RankPainter.prototype.writeInside.call(
    { context, look: {} }, "nothing has come to it yet", room);
  write([100, 0, 150, 84]);
  assert.deepEqual(written, [109, 125, 141]);
  write([100, 0, 146, 84]);
  assert.equal(written.length, 3);
});
