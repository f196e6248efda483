// Where the ranks of a step, and the values that they hold, are drawn: rectangles are [left, top, width, height] in px.

import { clamp } from "../shared/numbers.js";
import { countPixels, intersectRectangles } from "../shared/rectangles.js";

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
    let left = (wide - measureLine(line, setup.size, high)) / 2;
    return line.map((box) => {
      /** @type {Rectangle} */
      const place = [left, row * (high + BOX_HEAD) + BOX_HEAD, measureBox(box, setup.size, high), high];
      left += place[2] + BOX_GAP;
      return place;
    });
  });
  /** @type {Rectangle[]} */
  const cells = setup.ranks.map(({ box: index, row, col }) => {
    const [left, top, width, height] = boxes[index], { rows, cols } = setup.boxes[index];
    return [left + (width / cols) * col, top + (height / rows) * row, width / cols, height / rows];
  });
  return { high: Math.ceil(count / across) * (high + BOX_HEAD) + 14, boxes, cells };
}

/** Return the width of a box `high` px high: the pixels of its tiles are squares, beside their names and gaps.
 * @type {(box: StepBox, size: Pair, high: number) => number} */
function measureBox({ rows, cols }, size, high) {
  const aspect = clamp((size[1] / cols) / (size[0] / rows), 0.3, 4);
  const side = high / rows, room = getRoom([0, 0, side, side]);
  return cols * (room[3] * aspect + side - room[2]);
}

/** @type {(line: StepBox[], size: Pair, high: number) => number} */
function measureLine(line, size, high) {
  return line.reduce((sum, box) => sum + measureBox(box, size, high) + BOX_GAP, -BOX_GAP);
}

/** Return the height of the line above a cell's values that names its rank; 0 where the cell is too small for it.
 * @type {(cell: Rectangle) => number} */
export function getCellHead(cell) {
  return cell[3] > 46 ? CELL_HEAD : 0;
}

/** Return for each rank that shows values `{ rectangle, scale: [x, y], group, panel }`; other ranks are undefined.
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
    /** @type {Pair[]} */
    const sizes = reaches.map(([top, left, bottom, right]) => [right - left, bottom - top]);
    const shared = Math.min(...group.panels.map((_, at) => fitRoom(sizes[at], rooms[at])));
    group.panels.forEach((panel, at) => {
      const [left, top, width, height] = rooms[at], [wide, high] = sizes[at];
      /** @type {Pair} */
      const scale = panel.square ? [shared, shared] : [width / wide, Math.min(height / high, 0.5 * height)];
      /** @type {Pair} */
      const corner = [left + (width - wide * scale[0]) / 2, top + (height - high * scale[1]) / 2];
      const place = { rectangle: corner, scale, group, panel: { held: reaches[at] } };
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
  return held.map((side, at) => (at < 2 ? Math.min : Math.max)(side, ...tiles.map((tile) => tile[at])));
}

/** @type {(cell: Rectangle) => Rectangle} */
function getRoom([left, top, width, height]) {
  const head = getCellHead([left, top, width, height]), rim = Math.min(RIM, height / 16);
  return [left + rim, top + head + rim / 2, width - 2 * rim, height - head - 1.5 * rim];
}

/** @type {(size: Pair, room: Rectangle) => number} */
function fitRoom([wide, high], [, , width, height]) {
  return Math.min(width / wide, height / high);
}

/** Return where the tile [top, left, bottom, right] of a panel's value is drawn, also beyond what the rank holds.
 * @type {(place: TilePlace, tile: Rectangle) => Rectangle} */
export function locateTile({ rectangle, scale, panel }, [top, left, bottom, right]) {
  return [
    rectangle[0] + (left - panel.held[1]) * scale[0], rectangle[1] + (top - panel.held[0]) * scale[1],
    (right - left) * scale[0], (bottom - top) * scale[1],
  ];
}

/** Return where a message's tile of a value of `size` is drawn on a rank that shows `place`.
 *
 * A rank that shows nothing, or a value of another size, has it in the middle of its cell.
 * @type {(place: PanelPlace | undefined, cell: Rectangle, tile: Rectangle, size?: number[]) => Rectangle}
 */
export function locateMessage(place, cell, tile, size) {
  if (place && isInValue(tile, place.group, size)) return locateTile(place, tile);
  /** @type {Pair} */
  const sides = [Math.max(1, tile[3] - tile[1]), Math.max(1, tile[2] - tile[0])], room = getRoom(cell);
  const [wide, high] = sides.map((side) => Math.max(8, side * 0.5 * fitRoom(sides, room)));
  return [room[0] + (room[2] - wide) / 2, room[1] + (room[3] - high) / 2, wide, high];
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
    if (!place) continue;
    const { rectangle: [left, top, width, height], scale, panel } = place;
    if (x < left || y < top || x >= left + width || y >= top + height) continue;
    return {
      rank,
      row: panel.held[0] + Math.floor((y - top) / scale[1]),
      col: panel.held[1] + Math.floor((x - left) / scale[0]),
    };
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
  return tiles.filter(([top, left, bottom, right]) => bottom > top && right > left);
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
  const [middle, y] = findMiddle(cells, ranks), x = middle + aside;
  const named = cells.find((cell) => {
    const [left, top, width] = cell, head = getCellHead(cell);
    return head && x + SIGN_PX > left && x - SIGN_PX < left + width && y + SIGN_PX > top && y - SIGN_PX < top + head;
  });
  if (!named) return [x, y];
  const above = named[1] - SIGN_PX - 1;
  return [x, above < SIGN_PX ? named[1] + CELL_HEAD + SIGN_PX + 1 : above];
}

/** Return the middle [x, y] of the cells of some ranks.
 * @type {(cells: Rectangle[], ranks: number[]) => Pair} */
export function findMiddle(cells, ranks) {
  let [x, y] = [0, 0];
  for (const rank of ranks) {
    const [left, top, width, height] = cells[rank];
    x += (left + width / 2) / ranks.length;
    y += (top + height / 2) / ranks.length;
  }
  return [x, y];
}
