// Transforms between a scene and the screen: one scale and one offset, so that zooming and panning are numbers only.
// screen = scene * scale + offset, for both axes.

import { clamp } from "../shared/numbers.js";

/** Return the transform that shows all of `size` (width, height, in scene units) centred in `view` (in screen px).
 * @type {(size: Pair, view: Pair, margin?: number) => Transform} */
export function fitTransform(size, view, margin = 0) {
  const scale = Math.min((view[0] - 2 * margin) / size[0], (view[1] - 2 * margin) / size[1]);
  return { scale, x: (view[0] - size[0] * scale) / 2, y: (view[1] - size[1] * scale) / 2 };
}

/** Return the transform that shows a rectangle of the scene centred in `view`.
 * @type {(rectangle: Rectangle, view: Pair, margin?: number) => Transform} */
export function fitRectangle([top, left, bottom, right], view, margin = 0) {
  const fitted = fitTransform([right - left, bottom - top], view, margin);
  return { ...fitted, x: fitted.x - left * fitted.scale, y: fitted.y - top * fitted.scale };
}

/** Return the transform scaled by `factor`, within `limits` [least, most]; the scene under (x, y) stays in place.
 * @type {(transform: Transform, x: number, y: number, factor: number, limits: Pair) => Transform} */
export function zoomAt(transform, x, y, factor, limits) {
  const scale = clamp(transform.scale * factor, ...limits);
  const ratio = scale / transform.scale;
  return { scale, x: x - (x - transform.x) * ratio, y: y - (y - transform.y) * ratio };
}

/** Return the transform moved by (dx, dy) screen px.
 * @type {(transform: Transform, dx: number, dy: number) => Transform} */
export function panBy(transform, dx, dy) {
  return { ...transform, x: transform.x + dx, y: transform.y + dy };
}

/** Return the transform moved as little as needed so that the scene covers the middle of the view.
 * @type {(transform: Transform, size: Pair, view: Pair) => Transform} */
export function keepInView(transform, size, view) {
  /** @type {(offset: number, length: number, room: number) => number} */
  const keep = (offset, length, room) => clamp(offset, room / 2 - length, room / 2);
  return {
    ...transform,
    x: keep(transform.x, size[0] * transform.scale, view[0]),
    y: keep(transform.y, size[1] * transform.scale, view[1]),
  };
}

/** Return the point of the scene under the point (x, y) of the screen.
 * @type {(transform: Transform, x: number, y: number) => Pair} */
export function toScene(transform, x, y) {
  return [(x - transform.x) / transform.scale, (y - transform.y) / transform.scale];
}

/** Return the point of the screen at the point (x, y) of the scene.
 * @type {(transform: Transform, x: number, y: number) => Pair} */
export function toScreen(transform, x, y) {
  return [x * transform.scale + transform.x, y * transform.scale + transform.y];
}

/** Return the rectangle of the scene that a view of `view` px shows.
 * @type {(transform: Transform, view: Pair) => Rectangle} */
export function getVisible(transform, view) {
  const [[left, top], [right, bottom]] = [toScene(transform, 0, 0), toScene(transform, ...view)];
  return [top, left, bottom, right];
}
