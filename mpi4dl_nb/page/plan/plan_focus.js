// Which block of the picture of a plan is meant: by a point of the scene, or by a key from the block in focus.

import { clamp } from "../shared/numbers.js";

/** @type {(polygon: Polygon, x: number, y: number) => boolean} */
function coversPoint(polygon, x, y) {
  let inside = false;
  for (let here = 0, before = polygon.length - 1; here < polygon.length; before = here, here += 1) {
    const [ax, ay] = polygon[here], [bx, by] = polygon[before];
    if ((ay > y) !== (by > y) && x < ((bx - ax) * (y - ay)) / (by - ay) + ax) inside = !inside;
  }
  return inside;
}

/** Return the index of the block whose faces cover the point (x, y) of the scene, the nearest one; -1 if none does.
 * @type {(boxes: PlanBox[], x: number, y: number) => number} */
export function findBlockAt(boxes, x, y) {
  for (let index = boxes.length - 1; index >= 0; index -= 1) {
    const { front, top, left } = boxes[index].faces;
    if (coversPoint(front, x, y) || coversPoint(top, x, y) || coversPoint(left, x, y)) return index;
  }
  return -1;
}

/** @type {(boxes: PlanBox[], stage: number, row: number, column: number) => number} */
function findNearestBlock(boxes, stage, row, column) {
  let best = -1, least = Infinity;
  boxes.forEach((box, index) => {
    const far = Math.abs(box.row - row) + Math.abs(box.column - column);
    if (box.block.stage === stage && far < least) [best, least] = [index, far];
  });
  return best;
}

/**
 * Return the index of the block that a key leads to from block `index` (-1: none yet), or -1 if the key means nothing.
 * Arrows go to the next tile of the stage; left and right go on to the stage before and behind.
 * @type {(boxes: PlanBox[], index: number, key: string) => number}
 */
export function moveBlockFocus(boxes, index, key) {
  if (!boxes.length) return -1;
  const last = Math.max(...boxes.map((box) => box.block.stage));
  if (key === "Home") return findNearestBlock(boxes, 0, 0, 0);
  if (key === "End") return findNearestBlock(boxes, last, 1e9, 1e9);
  /** @type {Record<string, Pair>} */
  const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  /** @type {Record<string, number>} */
  const jumps = { PageUp: -1, PageDown: 1 };
  if (!(key in steps) && !(key in jumps)) return -1;
  if (index < 0) return findNearestBlock(boxes, 0, 0, 0);
  const { block, row, column } = boxes[index];
  if (key in jumps) return findNearestBlock(boxes, clamp(block.stage + jumps[key], 0, last), row, column);
  const [down, across] = steps[key];
  const there = boxes.findIndex((box) =>
    box.block.stage === block.stage && box.row === row + down && box.column === column + across);
  if (there >= 0) return there;
  const stage = block.stage + across;
  if (!across || stage < 0 || stage > last) return index;
  return findNearestBlock(boxes, stage, row, across > 0 ? 0 : 1e9);
}

/** Return the lines about a block: its rank, stage and tile, then what its load says, or that it is being counted.
 * @type {(block: PlanBlock, stages: PlanStage[], load?: PlanLoad) => string[]} */
export function describeBlock(block, stages, load) {
  const stage = stages[block.stage];
  const tile = stage.spatial ? `, tile ${block.tile}` : stage.shared ? `, share ${block.tile} of the images` : "";
  const axes = block.spans.length / 2, names = ["planes", "rows", "columns"].slice(-axes);
  const spans = names.map((name, axis) => `${name} ${block.spans[axis]} to ${block.spans[axis + axes] - 1}`);
  const pixels = `${spans.join(", ")} of the image`;
  return [
    `rank ${block.rank}: ${stage.name}${tile}`,
    stage.spatial ? pixels : "whole images",
    ...(load ? load.lines : ["weights and messages are being counted"]),
    ...(load && load.level >= 0 ? [] : ["memory is being counted"]),
  ];
}
