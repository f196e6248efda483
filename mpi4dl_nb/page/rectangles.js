// Rectangles of rows and columns, in the order in which all pages and the kernel give their sides: [top, left, bottom,
// right], where `bottom` and `right` are the first row and column beyond.

/** Whether the pixel (row, col) lies in a rectangle. */
export function isInside([top, left, bottom, right], row, col) {
  return row >= top && row < bottom && col >= left && col < right;
}

/** Return the number of pixels in a rectangle. */
export function countPixels([top, left, bottom, right]) {
  return Math.max(0, bottom - top) * Math.max(0, right - left);
}

/** Return a rectangle with rows and columns multiplied. */
export function scaleRectangle([top, left, bottom, right], down, across) {
  return [top * down, left * across, bottom * down, right * across];
}
