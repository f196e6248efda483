// The tables of one layer, as mpi4dl_nb/draw/layer_tables.py writes them: the pixels that each tile owns, reads,
// borrows and depends on.

import { isInside, readRectangle } from "../shared/rectangles.js";

/** What a page knows of a section of a layer: the facts and the tables that the kernel has sent. */
export class LayerTable {
  /** @param {SectionLayerFacts} facts
   * @param {LayerNumbers} numbers */
  constructor(facts, numbers) {
    this.facts = facts;
    this.numbers = numbers;
    this.tiles = facts.ranks.length;
    /** @type {BorrowedPiece[] | undefined} */
    this.found = undefined;
  }

  /** All pieces that tiles borrow. */
  get pieces() {
    const { sources, targets, pieces } = this.numbers;
    return this.found ??= Array.from(sources, (source, at) => (
      { source, target: targets[at], rectangle: readRectangle(pieces, at), text: this.facts.moves?.[at] }));
  }

  /** Return the rectangle that a tile owns, that it reads, or of the picture that its outputs depend on.
   * @type {(name: "owned" | "windows" | "seen", tile: number) => Rectangle} */
  get(name, tile) {
    return readRectangle(this.numbers[name], tile);
  }

  /** Return the pieces that a tile borrows from others.
   * @type {(tile: number) => BorrowedPiece[]} */
  getBorrowed(tile) {
    return this.pieces.filter(({ target }) => target === tile);
  }

  /** Return the number of the tile that owns a pixel, or -1 outside the layer.
   * @type {(row: number, column: number) => number} */
  findOwner(row, column) {
    for (let tile = 0; tile < this.tiles; tile += 1) {
      if (isInside(this.get("owned", tile), row, column)) return tile;
    }
    return -1;
  }

  /** Return the tiles that borrow a pixel, or compute it a second time.
   * @type {(row: number, column: number) => number[]} */
  findBorrowers(row, column) {
    const found = this.pieces.filter(({ rectangle }) => isInside(rectangle, row, column));
    return [...new Set(found.map(({ target }) => target))];
  }

  /** Return the rectangle of the picture on which an output pixel depends.
   * @type {(row: number, column: number) => Rectangle} */
  getField(row, column) {
    const [down, across] = this.numbers.fields;
    return [down[2 * row], across[2 * column], down[2 * row + 1], across[2 * column + 1]];
  }
}
