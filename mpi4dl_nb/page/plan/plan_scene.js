// The picture of a plan as geometry: the image and its stages stand one behind another in isometric projection, each
// cut into the blocks of its ranks. Nothing here knows a page.
//
//          v: rows, downwards         The stages follow each other along `d`, towards the reader. A block shows its
//          |  / u: columns            front (columns and rows), its top and its left side.
//          | /
//          |/
//           \
//            \ d: the stages in order

import { clamp } from "../shared/numbers.js";
import { findCentre, findMiddle, readRectangle, scaleRectangle } from "../shared/rectangles.js";

const ALONG = [Math.cos(Math.PI / 6), 0.5];
const MOST_FLOWS = 80;
const DEPTH = 0.1, SEAM = 0.022, WHOLE = 0.62, GAP = 1.16;
const WORDS_PX = 84; // from a sheet to the next one where words have room below their names

/** Return the blocks of the ranks of one copy of the model.
 * @type {(columns: BlockColumns, copy: number) => PlanBlock[]} */
export function readBlocks(columns, copy) {
  const { stage, tile, rank, spans, sides } = columns, count = spans.length / stage.length;
  const places = Array.from(columns.copy.keys()).filter((at) => columns.copy[at] === copy);
  return places.map((at) => ({
    stage: stage[at], tile: tile[at], rank: rank[at],
    spans: [...spans.subarray(count * at, count * (at + 1))], sides: readRectangle(sides, at),
  }));
}

/** @type {(d: number, u: number, v: number) => Pair} */
function projectPoint(d, u, v) {
  return [(d + u) * ALONG[0], (d - u) * ALONG[1] + v];
}

/** @type {(points: [number, number, number][]) => Polygon} */
function projectPoints(points) {
  return points.map(([d, u, v]) => projectPoint(d, u, v));
}

/** @type {(d: number, front: number, u0: number, u1: number, v0: number, v1: number) => BlockFaces} */
function makeFaces(d, front, u0, u1, v0, v1) {
  return {
    left: projectPoints([[d, u0, v0], [front, u0, v0], [front, u0, v1], [d, u0, v1]]),
    top: projectPoints([[d, u0, v0], [d, u1, v0], [front, u1, v0], [front, u0, v0]]),
    front: projectPoints([[front, u0, v0], [front, u1, v0], [front, u1, v1], [front, u0, v1]]),
  };
}

/** Return where a stage places a block, in units of the longer side of a picture of [rows, cols].
 * @type {(block: PlanBlock, stage: PlanStage, size: Pair) => Rectangle} */
export function placeBlock(block, stage, size) {
  const most = Math.max(...size);
  const [high, wide] = [size[0] / most, size[1] / most];
  if (stage.spatial) return scaleRectangle(block.sides, 1 / most, 1 / most);
  // A stage of whole images is a smaller sheet around the same middle; ranks that share images stand side by side.
  const scale = WHOLE, u = wide * (1 - scale) / 2, v = high * (1 - scale) / 2, part = wide * scale / stage.cols;
  const column = stage.shared ? block.tile : 0;
  return [v, u + column * part, v + high * scale, u + (column + 1) * part];
}

/** Return the scene of one copy of the model in units of an image's longer side, its blocks in drawing order.
 * @type {(stages: PlanStage[], blocks: PlanBlock[], size: Pair) => PlanScene} */
export function buildPlanScene(stages, blocks, size) {
  const most = Math.max(...size), wide = size[1] / most, high = size[0] / most;
  const gap = clamp(7 / (stages.length + 1), 0.42, GAP);
  const sheets = stages.map((stage, number) => {
    const d = (number + 1) * gap, edge = stage.spatial ? 0 : (1 - WHOLE) / 2;
    return { number, d, foot: projectPoint(d, wide * edge, high * (1 - edge)) };
  });
  // The stages and the blocks may come one after the other: blocks of another plan are left out until both are there.
  const boxes = blocks.filter((block) => block.stage < stages.length).map((block) => {
    const stage = stages[block.stage], { d } = sheets[block.stage];
    const place = placeBlock(block, stage, size), [v0, u0, v1, u1] = place;
    const seam = Math.min(SEAM, (u1 - u0) * 0.12, (v1 - v0) * 0.12);
    const front = d + Math.min(DEPTH, 0.45 * (u1 - u0), 0.45 * (v1 - v0));
    const faces = makeFaces(d, front, u0 + seam, u1 - seam, v0 + seam, v1 - seam);
    const [u, v] = findCentre(place);
    /** @type {PlanBox} */
    const box = {
      block, faces, span: [u1 - u0, v1 - v0],
      into: projectPoint(d, u, v), out: projectPoint(front, u, v),
      row: stage.shared ? 0 : Math.floor(block.tile / stage.cols), column: block.tile % stage.cols,
    };
    return box;
  });
  // The far ones first: by stage, then from the right to the left and from the bottom to the top of a sheet, since a
  // block's left side and top may lie over its neighbours.
  boxes.sort((a, b) => a.block.stage - b.block.stage || b.column - a.column || b.row - a.row);
  const first = boxes.filter((box) => box.block.stage === 0);
  const image = projectPoints([[0, 0, 0], [0, wide, 0], [0, wide, high], [0, 0, high]]);
  const cuts = first.map((box) => {
    const [v0, u0, v1, u1] = placeBlock(box.block, { ...stages[0], spatial: true }, size);
    return projectPoints([[0, u0, v0], [0, u1, v0], [0, u1, v1], [0, u0, v1]]);
  });
  const flows = findFlows(boxes, cuts, stages.length);
  return { boxes, sheets, image, cuts, foot: projectPoint(0, 0, high), flows, gap };
}

/** Return the lines along which pixels flow, by the stage that they lead to; one line stands for very many.
 * @type {(boxes: PlanBox[], cuts: Polygon[], stages: number) => [Pair, Pair][][]} */
function findFlows(boxes, cuts, stages) {
  let from = cuts.map(findMiddle);
  /** @type {[Pair, Pair][][]} */
  const flows = [];
  for (let stage = 0; stage < stages; stage += 1) {
    const here = boxes.filter((box) => box.block.stage === stage);
    const into = here.map((box) => box.into);
    const alike = from.length === into.length, count = alike ? from.length : from.length * into.length;
    if (count > MOST_FLOWS) flows.push([[findMiddle(from), findMiddle(into)]]);
    else if (alike) flows.push(from.map((point, at) => [point, into[at]]));
    else flows.push(from.flatMap((point) => into.map((to) => [point, to])));
    from = here.map((box) => box.out);
  }
  return flows;
}

/** Return the scale and offset of a scene in `view` [width, height], and whether its sheets are wide enough for words
 * below their names. Where they are not, the scene takes the height of these words, so that its numbers can be read.
 * @type {(scene: PlanScene, view: Pair) => [Transform, boolean]} */
export function placePlanScene(scene, view) {
  const low = fitPlanScene(scene, view, [14, 14, 28, 36]), hasWords = low.scale * scene.gap >= WORDS_PX;
  return [hasWords ? fitPlanScene(scene, view, [14, 14, 58, 36]) : low, hasWords];
}

/**
 * Return the scale and offset that fit a scene into `view` [width, height], with `margins` [top, left, bottom, right].
 * Room that is left over is mostly on the right, where the card about a rank is.
 * @type {(scene: PlanScene, view: Pair, margins: Rectangle) => Transform}
 */
export function fitPlanScene(scene, view, margins) {
  // One by one: a call takes fewer arguments than the blocks of a plan have corners.
  let [left, right, top, bottom] = [Infinity, -Infinity, Infinity, -Infinity];
  /** @type {(points: Polygon) => void} */
  const cover = (points) => {
    for (const [x, y] of points) {
      [left, right, top, bottom] = [Math.min(left, x), Math.max(right, x), Math.min(top, y), Math.max(bottom, y)];
    }
  };
  cover(scene.image);
  for (const { faces } of scene.boxes) Object.values(faces).forEach(cover);
  const [width, height] = [view[0] - margins[3] - margins[1], view[1] - margins[0] - margins[2]];
  const scale = Math.max(1, Math.min(width / (right - left), height / (bottom - top)));
  return {
    scale,
    x: margins[1] - left * scale + (width - (right - left) * scale) * 0.3,
    y: margins[0] - top * scale + (height - (bottom - top) * scale) / 2,
  };
}
