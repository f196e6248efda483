import assert from "node:assert/strict";
import test from "node:test";

import { fillFront } from "../../mpi4dl_nb/page/plan/plan_drawing.js";
import { describeBlock, findBlockAt, moveBlockFocus } from "../../mpi4dl_nb/page/plan/plan_focus.js";
import { fillTexture, getTexture } from "../../mpi4dl_nb/page/plan/plan_paint.js";
import {
  buildPlanScene, fitPlanScene, placeBlock, placePlanScene, readBlocks,
} from "../../mpi4dl_nb/page/plan/plan_scene.js";

const STAGES = [
  { name: "stage 0", words: "2 × 3 tiles of 32 × 32 px", cols: 3, spatial: true, shared: false },
  { name: "stage 1", words: "2 ranks share the images", cols: 2, spatial: false, shared: true },
];
const SIZE = [64, 96];
const tiles = [0, 1, 2, 3, 4, 5].map((tile) => {
  const [top, left] = [Math.floor(tile / 3) * 32, (tile % 3) * 32];
  const spans = [top, left, top + 32, left + 32];
  return [0, 0, tile, tile, spans, spans];
});
const whole = [[0, 0, 64, 96], [0, 0, 64, 96]];
const ROWS = [...tiles, [0, 1, 0, 6, ...whole], [0, 1, 1, 7, ...whole], [1, 0, 0, 9, ...whole]];
const COLUMNS = Object.fromEntries(["copy", "stage", "tile", "rank", "spans", "sides"].map((name, at) => [
  name, (name === "sides" ? Float64Array : Int32Array).from(ROWS.flatMap((row) => row[at]))]));
const BLOCKS = readBlocks(COLUMNS, 0);
const SCENE = buildPlanScene(STAGES, BLOCKS, SIZE);
const middle = (polygon) => [0, 1].map((axis) => polygon.reduce((sum, each) => sum + each[axis], 0) / polygon.length);
const find = (rank) => SCENE.boxes.findIndex((box) => box.block.rank === rank);
const press = (from, ...keys) => keys.reduce((index, key) => moveBlockFocus(SCENE.boxes, index, key), from);

test("the blocks are those of one copy, each with its rank and its part of the image", () => {
  assert.equal(BLOCKS.length, 8);
  assert.deepEqual(BLOCKS[4], { stage: 0, tile: 4, rank: 4, spans: [32, 32, 64, 64], sides: [32, 32, 64, 64] });
  assert.deepEqual(readBlocks(COLUMNS, 1).map((block) => block.rank), [9]);
});

test("tiles lie where the image is cut, and shares of a batch side by side in the middle", () => {
  assert.deepEqual(placeBlock(BLOCKS[4], STAGES[0], SIZE), [32 / 96, 32 / 96, 64 / 96, 64 / 96]);
  const [one, other] = [6, 7].map((at) => placeBlock(BLOCKS[at], STAGES[1], SIZE));
  assert.ok(Math.abs(one[3] - other[1]) < 1e-12 && Math.abs(one[1] - (1 - other[3])) < 1e-12);
});

test("the front of every block is found under its middle", () => {
  SCENE.boxes.forEach((box, index) => assert.equal(findBlockAt(SCENE.boxes, ...middle(box.faces.front)), index));
  assert.equal(findBlockAt(SCENE.boxes, -5, -5), -1);
});

test("blocks of a plan whose stages have not come yet are left out", () => {
  assert.equal(buildPlanScene(STAGES.slice(0, 1), BLOCKS, SIZE).boxes.length, 6);
  assert.equal(buildPlanScene([], BLOCKS, SIZE).boxes.length, 0);
});

test("the whole scene lies within the view, whatever its form", () => {
  for (const view of [[700, 500], [340, 520], [1500, 300]]) {
    const { scale, x, y } = fitPlanScene(SCENE, view, [10, 40, 30, 20]);
    for (const point of SCENE.boxes.flatMap((box) => Object.values(box.faces).flat())) {
      const [across, down] = [point[0] * scale + x, point[1] * scale + y];
      assert.ok(across > 39.9 && across < view[0] - 19.9 && down > 9.9 && down < view[1] - 29.9, `${across} ${down}`);
    }
  }
});

test("very many flows are one line", () => {
  const sides = [0, 0, 9, 9];
  const many = Array.from({ length: 100 }, (_, tile) => ({ stage: 0, tile, rank: tile, sides }));
  const last = { stage: 1, tile: 0, rank: 100, sides };
  const stages = [{ cols: 10, spatial: true }, { cols: 1 }];
  const { flows } = buildPlanScene(stages, [...many, last], [100, 100]);
  assert.deepEqual(flows.map((pairs) => pairs.length), [1, 1]);
  assert.deepEqual(SCENE.flows.map((pairs) => pairs.length), [6, 12]);
});

test("the most blocks that are drawn are laid out and fitted", () => {
  const stages = [{ cols: 128, spatial: true }, { cols: 64, spatial: true }], counts = [96 * 128, 64 * 64];
  const blocks = counts.flatMap((count, stage) => Array.from({ length: count }, (_, tile) => {
    const [top, left] = [Math.floor(tile / stages[stage].cols), tile % stages[stage].cols];
    return { stage, tile, rank: tile, sides: [top, left, top + 1, left + 1] };
  }));
  assert.equal(blocks.length, 16384);
  const scene = buildPlanScene(stages, blocks, [128, 128]);
  assert.deepEqual(scene.flows.map((pairs) => pairs.length), [1, 1]);
  assert.ok(fitPlanScene(scene, [700, 500], [10, 20, 30, 40]).scale > 1);
});

test("the texture of a level is drawn once for all blocks", () => {
  let drawn = 0;
  const pen = new Proxy({}, { get: () => () => {}, set: () => true });
  globalThis.OffscreenCanvas = class { getContext() { drawn += 1; return pen; } };
  const context = { createPattern: (cell) => cell, fill: () => {} };
  const fills = [1, 1, 2, 1].map((level) => { fillTexture(context, level); return context.fillStyle; });
  delete globalThis.OffscreenCanvas;
  assert.equal(drawn, 2);
  assert.ok(fills[0] === fills[3] && fills[0] !== fills[2]);
});

test("arrow keys go to the next tile, then to the next stage", () => {
  assert.equal(press(-1, "ArrowDown"), find(0));
  assert.equal(press(find(0), "ArrowRight", "ArrowDown"), find(4));
  assert.equal(press(find(4), "ArrowRight", "ArrowRight"), find(6));
  assert.equal(press(find(6), "ArrowRight", "ArrowRight"), find(7));
  assert.equal(press(find(6), "ArrowLeft"), find(2));
  assert.equal(press(find(0), "ArrowUp"), find(0));
  assert.equal(press(find(0), "PageDown"), find(6));
  assert.equal(press(find(1), "End", "PageUp", "Home"), find(0));
  assert.equal(press(find(1), "a"), -1);
  assert.equal(moveBlockFocus([], -1, "Home"), -1);
});

test("a block is described in words, with what is not known yet", () => {
  const load = { level: 0, lines: ["weights 3 MB"] };
  assert.deepEqual(describeBlock(BLOCKS[4], STAGES, load), [
    "rank 4: stage 0, tile 4", "rows 32 to 63, columns 32 to 63 of the image", "weights 3 MB"]);
  assert.deepEqual(describeBlock(BLOCKS[7], STAGES, undefined), [
    "rank 7: stage 1, share 1 of the images", "whole images", "weights and messages are being counted",
    "memory is being counted"]);
});

test("a block of a volume or a signal is described along each of its axes", () => {
  /** @type {(spans: number[]) => string} */
  const describe = (spans) => describeBlock({ ...BLOCKS[4], spans }, STAGES, undefined)[1];
  assert.equal(describe([0, 8, 16, 4, 16, 24]), "planes 0 to 3, rows 8 to 15, columns 16 to 23 of the image");
  assert.equal(describe([100, 200]), "columns 100 to 199 of the image");
});

test("a block is filled from below, and each level has a texture of its own", () => {
  const front = [[0, 0], [4, 0], [4, 8], [0, 8]];
  assert.deepEqual(fillFront(front, 0.25), [[0, 6], [4, 6], [4, 8], [0, 8]]);
  const textures = [0, 1, 2, 3].map((level) => JSON.stringify(getTexture(level)));
  assert.equal(new Set(textures).size, 4);
});

test("a narrow view has no words below its sheets, and larger blocks for it", () => {
  const [narrow, hasWords] = placePlanScene(SCENE, [300, 150]);
  assert.equal(hasWords, false);
  assert.ok(narrow.scale > 1.2 * fitPlanScene(SCENE, [300, 150], [14, 14, 58, 36]).scale);
  assert.equal(placePlanScene(SCENE, [700, 400])[1], true);
});
