// The colours of single pixels of a picture, from the finest tiles that are on the page.

import { makeOffscreen } from "../shared/canvas.js";
import { TILE_PX } from "./pyramid.js";

/** Reads red, green and blue of pixels from the tiles of a `TileCache`. */
export class PixelReader {
  /** @param {TileCache} cache */
  constructor(cache) {
    this.cache = cache;
    this.context = makeOffscreen(TILE_PX, TILE_PX, { willReadFrequently: true });
    /** @type {TileImage | null} */
    this.image = null; // whose colours `data` are
    this.data = new Uint8ClampedArray();
  }

  /** Return [red, green, blue] of a pixel; null if its tile is not here.
   * @type {PixelColours} */
  read(row, column) {
    /** @type {PyramidTile} */
    const tile = [0, Math.floor(row / TILE_PX), Math.floor(column / TILE_PX)];
    const image = this.cache.get(tile);
    if (!image) return null;
    if (this.image !== image) {
      this.context.drawImage(image, 0, 0);
      this.data = this.context.getImageData(0, 0, TILE_PX, TILE_PX).data;
      this.image = image;
    }
    const at = 4 * ((row % TILE_PX) * TILE_PX + (column % TILE_PX));
    return [this.data[at], this.data[at + 1], this.data[at + 2]];
  }
}
