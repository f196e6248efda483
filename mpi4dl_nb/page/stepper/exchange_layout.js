// Where the ranks of a step, and the values that they hold, are drawn.

import { clamp } from "../shared/numbers.js";
import {
  centreRectangle, countPixels, findCentre, findMiddle, growRectangle, intersectRectangles, isInside, joinRectangles,
  measureRectangle,
} from "../shared/rectangles.js";

/** The radius of the sign of a sum. */
export const SIGN_PX = 18;

const BOX_GAP = 44, BOX_HEAD = 24, CELL_HEAD = 18, RIM = 13, MORE = 1.4;

/** Return `{ high, boxes, cells }`: a box for each stage, and in it a cell for each rank, arranged as in the image.
 *
 * `setup` is what the kernel tells of the step. The boxes fill `wide` px of width, or `most` px of height if these are
 * less, and cells are as wide as the tiles in them, so that the tiles of a stage read as one picture.
 * @type {(setup: Pick<StepSetup, "boxes" | "ranks" | "size">, wide: number, most: number) => StepLayout}
 */
export function placeRanks(setup, wide, most) {
  const count = setup.boxes.length, stages = count / (1 + Math.max(...setup.boxes.map((box) => box.replica)));
  // A row of stages reads as a pipeline: it is broken only if the tiles get much larger by that.
  let best = { high: -1, across: 1, lines: setup.boxes.map((box) => [box]) };
  for (let across = count; across > 0; across--) {
    if (across % stages && stages % across) continue;  // a row has whole replicas, or a part of one
    const rows = Math.ceil(count / across), limit = most / rows - BOX_HEAD;
    const lines = Array.from({ length: rows }, (_, row) => setup.boxes.slice(row * across, (row + 1) * across));
    /** @type {(high: number) => boolean} */
    const fits = (high) => lines.every((line) => measureLine(line, setup.size, high) <= wide);
    let [low, high] = fits(limit) ? [limit, limit] : [0, limit];
    while (high - low > 0.5) [low, high] = fits((low + high) / 2) ? [(low + high) / 2, high] : [low, (low + high) / 2];
    if (low > MORE * best.high) best = { high: low, across, lines };
  }
  const high = Math.max(60, best.high), { across, lines } = best;
  const boxes = lines.flatMap((line, row) => {
    const top = row * (high + BOX_HEAD) + BOX_HEAD;
    let left = (wide - measureLine(line, setup.size, high)) / 2;
    return line.map((box) => {
      /** @type {Rectangle} */
      const place = [top, left, top + high, left + measureBox(box, setup.size, high)];
      left = place[3] + BOX_GAP;
      return place;
    });
  });
  /** @type {Rectangle[]} */
  const cells = setup.ranks.map(({ box: index, row, col }) => {
    const [top, left] = boxes[index], { rows, cols } = setup.boxes[index], [height, width] = measureRectangle(boxes[index]);
    const [down, right] = [height / rows, width / cols];
    return [top + down * row, left + right * col, top + down * (row + 1), left + right * (col + 1)];
  });
  return { high: Math.ceil(count / across) * (high + BOX_HEAD) + 14, boxes, cells };
}

/** Return the width of a box `high` px high: the pixels of its tiles are squares, beside their names and gaps.
 * @type {(box: StepBox, size: Pair, high: number) => number} */
function measureBox({ rows, cols }, size, high) {
  const aspect = clamp((size[1] / cols) / (size[0] / rows), 0.3, 4);
  const side = high / rows, [height, width] = measureRectangle(getRoom([0, 0, side, side]));
  return cols * (height * aspect + side - width);
}

/** @type {(line: StepBox[], size: Pair, high: number) => number} */
function measureLine(line, size, high) {
  return line.reduce((sum, box) => sum + measureBox(box, size, high) + BOX_GAP, -BOX_GAP);
}

/** Return the height of the line above a cell's values that names its rank; 0 where the cell is too small for it.
 * @type {(cell: Rectangle) => number} */
export function getCellHead(cell) {
  return cell[2] - cell[0] > 46 ? CELL_HEAD : 0;
}

/** Return for each rank that shows values `{ rectangle, scale: [down, across], group, panel }`; other ranks are undefined.
 *
 * The panels of a group have one scale, so that their tiles read as one picture. There is room beside the values for
 * messages from or to there.
 * @type {(meta: FrameMeta, cells: Rectangle[]) => PanelPlaces}
 */
export function placePanels(meta, cells) {
  /** @type {PanelPlaces} */
  const placed = [];
  /** @type {PanelGroup[]} */
  const groups = [];
  for (const group of meta.groups) for (const { rank } of group.panels) groups[rank] = group;
  for (const group of meta.groups) {
    const rooms = group.panels.map((panel) => getRoom(cells[panel.rank]));
    const reaches = group.panels.map((panel) => findReach(panel, group, meta.messages, groups));
    const sizes = reaches.map(measureRectangle);
    const shared = Math.min(...group.panels.map((_, at) => fitRoom(sizes[at], rooms[at])));
    group.panels.forEach((panel, at) => {
      const [height, width] = measureRectangle(rooms[at]), [high, wide] = sizes[at];
      /** @type {Pair} */
      const scale = panel.square ? [shared, shared] : [Math.min(height / high, 0.5 * height), width / wide];
      const rectangle = centreRectangle(findCentre(rooms[at]), [high * scale[0], wide * scale[1]]);
      const place = { rectangle, scale, panel: { held: reaches[at] } };
      placed[panel.rank] = { rectangle: locateTile(place, panel.held), scale, group, panel };
    });
  }
  return placed;
}

/** Return the smallest tile that holds a panel's values and the messages that are drawn beside them.
 * @type {(panel: RankPanel, group: PanelGroup, messages: StepMessage[], groups: PanelGroup[]) => Rectangle} */
function findReach({ rank, held, square }, group, messages, groups) {
  const mine = messages.filter((message) => square && (message.source === rank || message.target === rank));
  const tiles = mine.filter(({ target, tile }) => isInValue(tile, group, groups[target]?.size)).map(({ tile }) => tile);
  return joinRectangles([held, ...tiles]);
}

/** @type {(cell: Rectangle) => Rectangle} */
function getRoom(cell) {
  const [top, left, bottom, right] = cell, rim = Math.min(RIM, (bottom - top) / 16);
  return [top + getCellHead(cell) + rim / 2, left + rim, bottom - rim, right - rim];
}

/** @type {(size: Pair, room: Rectangle) => number} */
function fitRoom([high, wide], room) {
  const [height, width] = measureRectangle(room);
  return Math.min(width / wide, height / high);
}

/** Return where the tile [top, left, bottom, right] of a panel's value is drawn, also beyond what the rank holds.
 * @type {(place: TilePlace, tile: Rectangle) => Rectangle} */
export function locateTile({ rectangle, scale, panel }, tile) {
  return tile.map((side, at) => rectangle[at % 2] + (side - panel.held[at % 2]) * scale[at % 2]);
}

/** Return where a message's tile of a value of `size` is drawn on a rank that shows `place`.
 *
 * A rank that shows nothing, or a value of another size, has it in the middle of its cell.
 * @type {(place: PanelPlace | undefined, cell: Rectangle, tile: Rectangle, size?: number[]) => Rectangle}
 */
export function locateMessage(place, cell, tile, size) {
  if (place && isInValue(tile, place.group, size)) return locateTile(place, tile);
  const sides = measureRectangle(tile).map((side) => Math.max(1, side)), room = getRoom(cell);
  return centreRectangle(findCentre(room), sides.map((side) => Math.max(8, side * 0.5 * fitRoom(sides, room))));
}

/** Return whether a tile of a value of `size`, if that is known, is a part of what a group shows.
 * @type {(tile: Rectangle, group: PanelGroup, size?: number[]) => boolean} */
function isInValue([top, left, bottom, right], group, size) {
  const [high, wide] = group.size;
  return group.size.length === 2 && (!size || size.join() === group.size.join())
    && top >= 0 && left >= 0 && bottom <= high && right <= wide;
}

/** Return `{ rank, row, col }` of the pixel of a value under a point; null where there is none.
 * @type {(placed: PanelPlaces, x: number, y: number) => StepPixel | null} */
export function findPixel(placed, x, y) {
  for (const [rank, place] of placed.entries()) {
    if (!place || !isInside(place.rectangle, y, x)) continue;
    const { rectangle: [top, left], scale: [down, across], panel: { held } } = place;
    return { rank, row: held[0] + Math.floor((y - top) / down), col: held[1] + Math.floor((x - left) / across) };
  }
  return null;
}

/** Return what is beside `own` in `held`, as tiles: above and below over the whole width, then left and right.
 * @type {(held: Rectangle, own: Rectangle) => Rectangle[]} */
export function cutHalo(held, own) {
  /** @type {Rectangle[]} */
  const tiles = [
    [held[0], held[1], own[0], held[3]], [own[2], held[1], held[2], held[3]],
    [own[0], held[1], own[2], own[1]], [own[0], own[3], own[2], held[3]],
  ];
  return tiles.filter(countPixels);
}

/** Return what a panel holds beside its own tile: pixels that are `borrowed`, and `padding` beyond a value of `size`.
 * @type {(panel: RankPanel, size: number[]) => { borrowed: Rectangle[], padding: Rectangle[] }} */
export function splitHalo({ held, own }, size) {
  const halo = cutHalo(held, own);
  if (size.length !== 2) return { borrowed: halo, padding: [] };
  const parts = halo.map((tile) => ({ tile, inside: intersectRectangles(tile, [0, 0, size[0], size[1]]) }));
  return {
    borrowed: parts.map(({ inside }) => inside).filter((inside) => countPixels(inside) > 0),
    padding: parts.flatMap(({ tile, inside }) => (countPixels(inside) > 0 ? cutHalo(tile, inside) : [tile])),
  };
}

/** Return the middle [x, y] of the sign of a sum over ranks, `aside` px beside the middle of their cells: on no name.
 * @type {(cells: Rectangle[], ranks: number[], aside: number) => Pair} */
export function placeSumSign(cells, ranks, aside) {
  const [middle, y] = findMiddle(ranks.map((rank) => findCentre(cells[rank]))), x = middle + aside;
  const sign = growRectangle([y, x, y, x], SIGN_PX);
  const named = cells.find((cell) => {
    const [top, left, , right] = cell;
    return countPixels(intersectRectangles([top, left, top + getCellHead(cell), right], sign));
  });
  if (!named) return [x, y];
  const above = named[0] - SIGN_PX - 1;
  return [x, above < SIGN_PX ? named[0] + CELL_HEAD + SIGN_PX + 1 : above];
}
