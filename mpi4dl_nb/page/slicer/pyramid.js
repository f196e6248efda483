// The tiles of a picture's pyramid: which ones a view needs, and those that are on the page already.
// Level k has one pixel for 2^k x 2^k pixels of the picture. All tiles have TILE_PX pixels a side, but at the edges.

import { clamp } from "../shared/numbers.js";
import { findCentre, intersectRectangles, scaleRectangle } from "../shared/rectangles.js";

export const TILE_PX = 256;

/**
 * Return the coarsest level that has a pixel for each pixel of the screen, `finest` if none has. `scale`: device px per
 * picture px.
 * @type {(levels: number, scale: number, finest?: number) => number}
 */
export function chooseLevel(levels, scale, finest = 0) {
  return clamp(Math.floor(Math.log2(1 / scale) + 1e-6), finest, levels - 1);
}

/** Return [level, row, column] of the tiles of a level within a rectangle, nearest to the middle first.
 * @type {(level: number, size: Pair, visible: Rectangle) => PyramidTile[]} */
export function listTiles(level, size, visible) {
  const side = TILE_PX * 2 ** level;
  const [width, height] = size;
  /** @type {(start: number) => number} */
  const first = (start) => Math.max(0, Math.floor(start / side));
  /** @type {(stop: number, length: number) => number} */
  const last = (stop, length) => Math.min(Math.ceil(length / side), Math.ceil(stop / side));
  /** @type {PyramidTile[]} */
  const found = [];
  for (let row = first(visible[0]); row < last(visible[2], height); row += 1) {
    for (let column = first(visible[1]); column < last(visible[3], width); column += 1) found.push([level, row, column]);
  }
  const [x, y] = findCentre(visible).map((middle) => middle / side - 0.5);
  /** @type {(tile: PyramidTile) => number} */
  const distance = ([, row, column]) => Math.hypot(column - x, row - y);
  return found.sort((one, other) => distance(one) - distance(other));
}

/** Return the rectangle of a tile in pixels of the picture.
 * @type {(tile: PyramidTile, size: Pair) => Rectangle} */
export function getTileRectangle([level, row, column], size) {
  const side = TILE_PX * 2 ** level;
  return intersectRectangles(scaleRectangle([row, column, row + 1, column + 1], side, side), [0, 0, size[1], size[0]]);
}

/** Return the name of a tile or a section, for a cache.
 * @type {(tile: TissueKey) => string} */
function nameTile(tile) {
  return tile.join("/");
}

/** The tiles that are on the page, at most `most` of them: those used last are kept. `ask` requests missing ones. */
export class TileCache {
  /** @param {(tiles: TissueKey[]) => void} ask
   * @param {number} [most] */
  constructor(ask, most = 400) {
    this.ask = ask;
    this.most = most;
    /** @type {Map<string, TileImage>} */
    this.images = new Map(); // by name, in the order of use
    /** @type {Set<string>} */
    this.asked = new Set();
    /** @type {Set<string>} */
    this.failed = new Set();
  }

  /** Return the image of a tile, or undefined if it is not here.
   * @type {(tile: TissueKey) => TileImage | undefined} */
  get(tile) {
    const name = nameTile(tile);
    const image = this.images.get(name);
    if (image) {
      this.images.delete(name);
      this.images.set(name, image);
    }
    return image;
  }

  /** Ask for those of `tiles` that are neither here nor on their way, and can be read.
   * @type {(tiles: TissueKey[]) => void} */
  want(tiles) {
    const known = [this.images, this.asked, this.failed];
    const missing = tiles.filter((tile) => !known.some((each) => each.has(nameTile(tile))));
    missing.forEach((tile) => this.asked.add(nameTile(tile)));
    if (missing.length) this.ask(missing);
  }

  /** Keep the image of a tile that has come.
   * @type {(tile: TissueKey, image: TileImage) => void} */
  put(tile, image) {
    this.asked.delete(nameTile(tile));
    this.images.set(nameTile(tile), image);
    for (const [name, old] of this.images) {
      if (this.images.size <= this.most) break;
      old.close?.();
      this.images.delete(name);
    }
  }

  /** Ask no more for a tile that cannot be read, until `retry`.
   * @type {(tile: TissueKey) => void} */
  fail(tile) {
    this.asked.delete(nameTile(tile));
    this.failed.add(nameTile(tile));
  }

  /** Let `want` ask again for what could not be read. */
  retry() {
    this.failed.clear();
  }

  /** Return the nearest tile that is here and covers `tile`, with its image; undefined if there is none.
   * @type {(tile: PyramidTile, levels: number) => { tile: PyramidTile, image: TileImage } | undefined} */
  findAncestor([level, row, column], levels) {
    for (let up = 1; level + up < levels; up += 1) {
      /** @type {PyramidTile} */
      const tile = [level + up, row >> up, column >> up];
      const image = this.get(tile);
      if (image) return { tile, image };
    }
    return undefined;
  }
}
