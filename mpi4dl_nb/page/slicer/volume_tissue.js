// The grey of a volume, from which a page makes any section at once: as coarse as the kernel has made it.

import { makeOffscreen } from "../shared/canvas.js";
import { scalePosition } from "./layer_sections.js";

/** Unpacked by `unpackVolume`: `grey` has a byte for each pixel, the last axis first to change. */
export class VolumeTissue {
  /** @param {number[]} sizes
   * @param {Uint8Array} grey */
  constructor(sizes, grey) {
    this.sizes = sizes;
    this.grey = grey;
  }

  /** Whether it has all pixels of a volume of these sizes.
   * @type {(sizes: number[]) => boolean} */
  isExact(sizes) {
    return sizes.every((size, axis) => size === this.sizes[axis]);
  }

  /** Return about which number is at a pixel, if black and white are the numbers of `span`.
   * @type {(at: number[], span: Pair) => number} */
  read(at, [low, high]) {
    const index = at.reduce((sum, px, axis) => sum * this.sizes[axis] + px, 0);
    return low + (this.grey[index] / 255) * (high - low);
  }

  /** Return the section through a position of a volume of `sizes`, as an image.
   * @type {(section: SectionFacts, position: number[], sizes: number[]) => OffscreenCanvas} */
  draw({ axes }, position, sizes) {
    const steps = this.sizes.map((_, axis) => this.sizes.slice(axis + 1).reduce((all, size) => all * size, 1));
    const at = scalePosition(position, sizes, this.sizes);
    const [down, right] = axes.length > 1 ? axes : [-1, axes[0]], rows = down < 0 ? 1 : this.sizes[down];
    const columns = this.sizes[right];
    const start = steps.reduce((sum, step, axis) => (axes.includes(axis) ? sum : sum + step * at[axis]), 0);
    const context = makeOffscreen(columns, rows), image = context.createImageData(columns, rows);
    for (let row = 0, to = 0; row < rows; row += 1) {
      for (let column = 0; column < columns; column += 1, to += 4) {
        const grey = this.grey[start + (down < 0 ? 0 : row * steps[down]) + column * steps[right]];
        image.data[to] = image.data[to + 1] = image.data[to + 2] = grey;
        image.data[to + 3] = 255;
      }
    }
    context.putImageData(image, 0, 0);
    return context.canvas;
  }
}

/** Return the volume that the kernel has packed: its sizes, and deflated bytes.
 * @type {(packed: { sizes: number[], grey: Bytes }) => Promise<VolumeTissue>} */
export async function unpackVolume({ sizes, grey }) {
  const stream = new Blob([grey]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new VolumeTissue(sizes, new Uint8Array(await new Response(stream).arrayBuffer()));
}
