// The tables of one layer, as mpi4dl_nb/draw/layer_tables.py writes them: the pixels that each tile owns, reads,
// borrows and depends on.

import { isInside } from "../shared/rectangles.js";

/** The tables of the layer with these facts in the int32 array `numbers` of all layers. */
export class LayerTable {
  /** @param {LayerFacts} facts
   * @param {Int32Array} numbers */
  constructor(facts, numbers) {
    this.facts = facts;
    this.tiles = facts.ranks.length;
    let at = facts.at;
    /** @type {(count: number) => Int32Array} */
    const take = (count) => numbers.subarray(at, (at += count));
    this.owned = take(4 * this.tiles);
    this.windows = take(4 * this.tiles);
    this.pieces = take(6 * facts.pieces);
    this.seen = take(4 * this.tiles);
    this.rowFields = take(2 * facts.out_rows);
    this.columnFields = take(2 * facts.out_columns);
  }

  /** Return the rectangle that a tile owns.
   * @type {(tile: number) => Int32Array} */
  getOwned(tile) {
    return this.owned.subarray(4 * tile, 4 * tile + 4);
  }

  /** Return the rectangle that a tile reads.
   * @type {(tile: number) => Int32Array} */
  getWindow(tile) {
    return this.windows.subarray(4 * tile, 4 * tile + 4);
  }

  /** Return the rectangle of the picture on which a tile's outputs depend.
   * @type {(tile: number) => Int32Array} */
  getSeen(tile) {
    return this.seen.subarray(4 * tile, 4 * tile + 4);
  }

  /** Return { source, target, rectangle, text } of each piece that `keep(source, target)` is true of.
   * @type {(keep: (source: number, target: number) => boolean) => BorrowedPiece[]} */
  listPieces(keep) {
    const found = [];
    for (let at = 0; at < this.pieces.length; at += 6) {
      const [source, target] = [this.pieces[at], this.pieces[at + 1]];
      if (keep(source, target)) {
        found.push({ source, target, rectangle: this.pieces.subarray(at + 2, at + 6), text: this.facts.moves?.[at / 6] });
      }
    }
    return found;
  }

  /** Return the pieces that a tile borrows from others.
   * @type {(tile: number) => BorrowedPiece[]} */
  getBorrowed(tile) {
    return this.listPieces((_, target) => target === tile);
  }

  /** Return the number of the tile that owns a pixel, or -1 outside the layer.
   * @type {(row: number, column: number) => number} */
  findOwner(row, column) {
    for (let tile = 0; tile < this.tiles; tile += 1) {
      if (isInside(this.getOwned(tile), row, column)) return tile;
    }
    return -1;
  }

  /** Return the tiles that borrow a pixel, or compute it a second time.
   * @type {(row: number, column: number) => number[]} */
  findBorrowers(row, column) {
    const found = this.listPieces(() => true).filter(({ rectangle }) => isInside(rectangle, row, column));
    return [...new Set(found.map(({ target }) => target))];
  }

  /** Return the rectangle of the picture on which an output pixel depends.
   * @type {(row: number, column: number) => Rectangle} */
  getField(row, column) {
    const [top, bottom] = this.rowFields.subarray(2 * row, 2 * row + 2);
    const [left, right] = this.columnFields.subarray(2 * column, 2 * column + 2);
    return [top, left, bottom, right];
  }
}
