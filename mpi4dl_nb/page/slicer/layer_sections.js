// Sections of a layer: planes through its boxes, which are rectangles there. A picture has one section, which is all of it.

import { LayerTable } from "./layer_table.js";

/**
 * Return the table of what a section shows of a layer. `at` is a position of what the layer reads, `there` the same
 * place of the picture; both are needed along the axes that the section is across. A box that it does not meet becomes an
 * empty rectangle.
 * @type {(facts: LayerFacts, numbers: LayerNumbers, section: SectionFacts, at: number[], there: number[], sizes: number[])
 * => LayerTable}
 */
export function cutLayer(facts, numbers, section, at, there, sizes) {
  const { axes, across } = section, count = facts.sizes.length;
  /** @type {(sides: Int32Array, position: number[]) => Int32Array} */
  const cut = (sides, position) => {
    const found = new Int32Array((sides.length / count) * 2);
    for (let from = 0, to = 0; from < sides.length; from += 2 * count, to += 4) {
      if (!across.every((axis) => isWithin(position[axis], sides[from + axis], sides[from + count + axis]))) continue;
      const [down, right] = axes.length > 1 ? axes : [-1, axes[0]];
      found[to + 1] = sides[from + right];
      found[to + 3] = sides[from + count + right];
      [found[to], found[to + 2]] = down < 0 ? [0, 1] : [sides[from + down], sides[from + count + down]];
    }
    return found;
  };
  /** @type {(all: number[]) => Pair} */
  const pick = (all) => (axes.length > 1 ? [all[axes[0]], all[axes[1]]] : [1, all[axes[0]]]);
  const [rows, columns] = pick(facts.sizes), hasFields = facts.out_sizes.length > 0;
  const [out_rows, out_columns] = hasFields ? pick(facts.out_sizes) : [0, 0];
  const fields = hasFields ? axes.map((axis) => numbers.fields[axis]) : [];
  if (hasFields && axes.length < 2) fields.unshift(new Int32Array([0, 1]));
  return new LayerTable({ ...facts, rows, columns, out_rows, out_columns, whole: pick(sizes) }, {
    ...numbers, fields, owned: cut(numbers.owned, at), windows: cut(numbers.windows, at),
    pieces: cut(numbers.pieces, at), seen: cut(numbers.seen, there),
  });
}

/** @type {(px: number, start: number, stop: number) => boolean} */
function isWithin(px, start, stop) {
  return px >= start && px < stop;
}

/** Return the pixel of a layer of the sizes `other` that has the middle of pixel `at`.
 * @type {(at: number[], sizes: number[], other: number[]) => number[]} */
export function scalePosition(at, sizes, other) {
  return at.map((px, axis) => Math.min(other[axis] - 1, Math.floor(((px + 0.5) / sizes[axis]) * other[axis])));
}
