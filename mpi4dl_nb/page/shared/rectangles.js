// Rectangles of rows and columns, in the order in which all pages and the kernel give their sides: [top, left, bottom,
// right], where `bottom` and `right` are the first row and column beyond.

/** Whether the pixel (row, col) lies in a rectangle.
 * @type {(rectangle: Sides, row: number, col: number) => boolean} */
export function isInside([top, left, bottom, right], row, col) {
  return row >= top && row < bottom && col >= left && col < right;
}

/** Return the rectangle that two have in common, which is empty if they have none.
 * @type {(one: Sides, other: Sides) => Rectangle} */
export function intersectRectangles([a, b, c, d], [e, f, g, h]) {
  return [Math.max(a, e), Math.max(b, f), Math.min(c, g), Math.min(d, h)];
}

/** Return the number of pixels in a rectangle.
 * @type {(rectangle: Sides) => number} */
export function countPixels([top, left, bottom, right]) {
  return Math.max(0, bottom - top) * Math.max(0, right - left);
}

/** Return a rectangle with rows and columns multiplied.
 * @type {(rectangle: Sides, down: number, across: number) => Rectangle} */
export function scaleRectangle([top, left, bottom, right], down, across) {
  return [top * down, left * across, bottom * down, right * across];
}
