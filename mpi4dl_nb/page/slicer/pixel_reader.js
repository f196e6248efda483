// The colours of single pixels of a picture, from the finest tiles that are on the page.

import { TILE_PX } from "./pyramid.js";

/** Reads red, green and blue of pixels from the tiles of a `TileCache`. */
export class PixelReader {
  constructor(cache) {
    this.cache = cache;
    this.canvas = new OffscreenCanvas(TILE_PX, TILE_PX);
    this.context = this.canvas.getContext("2d", { willReadFrequently: true });
  }

  /** Return [red, green, blue] of a pixel; null if its tile is not here. */
  read(row, column) {
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
