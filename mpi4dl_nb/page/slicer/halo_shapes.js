// Shapes of halos in pixels of the screen: a halo of one pixel is drawn wide enough to be seen, and says so.

const LEAST_PX = 3;

/**
 * Return { edges, enlarged } on the screen of a borrowed rectangle beside the tile `own`, both on the screen.
 *
 * A side thinner than LEAST_PX grows away from the own tile, so that the edge between them stays in place; `enlarged`
 * is by how much, 1 if not at all.
 * @type {(piece: Rectangle, own: Rectangle) => ScreenPiece}
 */
export function widenPiece(piece, own) {
  const [top, bottom, down] = widenSpan(piece[0], piece[2], own[0], own[2]);
  const [left, right, across] = widenSpan(piece[1], piece[3], own[1], own[3]);
  return { edges: [top, left, bottom, right], enlarged: Math.max(down, across) };
}

/** @type {(start: number, stop: number, ownStart: number, ownStop: number) => [number, number, number]} */
function widenSpan(start, stop, ownStart, ownStop) {
  const width = stop - start;
  if (width >= LEAST_PX) return [start, stop, 1];
  const factor = LEAST_PX / width;
  if (stop <= ownStart + 1e-6) return [stop - LEAST_PX, stop, factor];
  if (start >= ownStop - 1e-6) return [start, start + LEAST_PX, factor];
  return [start, stop, 1]; // it lies beside the own tile in the other direction only
}

/** Return a rectangle of the picture on the screen.
 * @type {(rectangle: Rectangle, transform: Transform) => Rectangle} */
export function toScreenRectangle([top, left, bottom, right], transform) {
  const { scale, x, y } = transform;
  return [top * scale + y, left * scale + x, bottom * scale + y, right * scale + x];
}

/** Return the lines between pixels `pixel` px wide, the first of which begins at `offset`, from `start` to `stop` px.
 * @type {(pixel: number, offset: number, start: number, stop: number) => number[]} */
export function listGridLines(pixel, offset, start, stop) {
  const found = [];
  for (let at = offset + Math.ceil((start - offset) / pixel) * pixel; at < stop; at += pixel) found.push(at);
  return found;
}
