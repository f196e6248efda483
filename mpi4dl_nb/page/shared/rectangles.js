// Rectangles, with their sides in the order in which all pages and the kernel give them: [top, left, bottom, right],
// where `bottom` and `right` are the first row and column beyond. Units are pixels of an image or px of the page.

/** Return a rectangle from an array that the kernel has sent, by its place there.
 * @type {(sides: Int32Array | Float64Array, place: number) => Rectangle} */
export function readRectangle(sides, place) {
  const at = 4 * place;
  return [sides[at], sides[at + 1], sides[at + 2], sides[at + 3]];
}

/** Return [left, top, width, height] of a rectangle, as a canvas takes it.
 * @type {(rectangle: Rectangle) => [number, number, number, number]} */
export function toBox([top, left, bottom, right]) {
  return [left, top, right - left, bottom - top];
}

/** Return [height, width] of a rectangle.
 * @type {(rectangle: Rectangle) => Pair} */
export function measureRectangle([top, left, bottom, right]) {
  return [bottom - top, right - left];
}

/** Return the centre [x, y] of a rectangle.
 * @type {(rectangle: Rectangle) => Pair} */
export function findCentre([top, left, bottom, right]) {
  return [(left + right) / 2, (top + bottom) / 2];
}

/** Return the rectangle of [height, width] around a centre [x, y].
 * @type {(centre: Pair, extent: Pair) => Rectangle} */
export function centreRectangle([x, y], [high, wide]) {
  return [y - high / 2, x - wide / 2, y + high / 2, x + wide / 2];
}

/** Return a rectangle grown by `px` on all sides.
 * @type {(rectangle: Rectangle, px: number) => Rectangle} */
export function growRectangle([top, left, bottom, right], px) {
  return [top - px, left - px, bottom + px, right + px];
}

/** Return a rectangle with rows and columns multiplied.
 * @type {(rectangle: Rectangle, down: number, across: number) => Rectangle} */
export function scaleRectangle([top, left, bottom, right], down, across) {
  return [top * down, left * across, bottom * down, right * across];
}

/** Return the rectangle that two have in common, which is empty if they have none.
 * @type {(one: Rectangle, other: Rectangle) => Rectangle} */
export function intersectRectangles([a, b, c, d], [e, f, g, h]) {
  return [Math.max(a, e), Math.max(b, f), Math.min(c, g), Math.min(d, h)];
}

/** Return the smallest rectangle that holds some others.
 * @type {(rectangles: Rectangle[]) => Rectangle} */
export function joinRectangles([first, ...others]) {
  return others.reduce(([a, b, c, d], [e, f, g, h]) =>
    [Math.min(a, e), Math.min(b, f), Math.max(c, g), Math.max(d, h)], first);
}

/** Return the number of pixels in a rectangle.
 * @type {(rectangle: Rectangle) => number} */
export function countPixels([top, left, bottom, right]) {
  return Math.max(0, bottom - top) * Math.max(0, right - left);
}

/** Whether the pixel (row, col) lies in a rectangle.
 * @type {(rectangle: Rectangle, row: number, col: number) => boolean} */
export function isInside([top, left, bottom, right], row, col) {
  return row >= top && row < bottom && col >= left && col < right;
}

/** Return the middle [x, y] of some points.
 * @type {(points: Pair[]) => Pair} */
export function findMiddle(points) {
  /** @type {(axis: 0 | 1) => number} */
  const average = (axis) => points.reduce((sum, point) => sum + point[axis], 0) / points.length;
  return [average(0), average(1)];
}
