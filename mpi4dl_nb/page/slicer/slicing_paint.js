// Paints a picture in tiles: pixels of its pyramid, what a tile borrows in the lender's colour, and what it does not need
// in grey. Coordinates of the scene are pixels of the picture; a layer's pixels are scaled to them.

import { DARK, FONT, WHITE, strokeRectangle } from "../shared/canvas.js";
import { chooseScaleBar } from "../shared/format.js";
import { listGridLines, toScreenRectangle, widenPiece } from "./halo_shapes.js";
import { chooseLevel, getTileRectangle, listTiles } from "./pyramid.js";
import {
  countPixels, growRectangle, intersectRectangles, joinRectangles, scaleRectangle, toBox,
} from "../shared/rectangles.js";
import { getVisible } from "./transform.js";

const GRID_PX = 8; // a layer's pixel on the screen, from which on its edges are drawn
const VALUE_PX = 46; // likewise for the values of the picture's pixels
const SCALE_ROOM = [230, 68]; // px of the lower left corner, which the scale bar takes

/** Paint the tiles that the view wants, coarser ones in place of those that have not come yet, and return them.
 * @type {(context: Context, scene: SceneView, picture: PictureFacts, cache: TileCache, preview?: TileImage) =>
 * PyramidTile[]} */
export function paintPicture(context, scene, picture, cache, preview) {
  const { transform, view, ratio, size } = scene;
  context.fillStyle = scene.ground;
  context.fillRect(0, 0, ...view);
  context.imageSmoothingEnabled = transform.scale < 1;
  if (preview) context.drawImage(preview, transform.x, transform.y, size[0] * transform.scale, size[1] * transform.scale);
  const level = chooseLevel(picture.levels, transform.scale * ratio, picture.finest);
  const wanted = listTiles(level, size, getVisible(transform, view));
  for (const tile of wanted) {
    const image = cache.get(tile);
    if (image) drawTile(context, transform, tile, image, size);
    else drawAncestor(context, transform, tile, cache, picture.levels, size);
  }
  return wanted;
}

/** Paint the section of a volume over the whole scene.
 * @type {(context: Context, scene: SceneView, image?: CanvasImageSource) => void} */
export function paintSection(context, { transform, view, size, ground }, image) {
  context.fillStyle = ground;
  context.fillRect(0, 0, ...view);
  context.imageSmoothingEnabled = false;
  if (image) context.drawImage(image, transform.x, transform.y, size[0] * transform.scale, size[1] * transform.scale);
}

/** Paint the planes of the other sections, which meet at a point of the scene.
 * @type {(context: Context, scene: SceneView, point: Pair) => void} */
export function paintPlanes(context, scene, [x, y]) {
  const { transform } = scene, [top, left, bottom, right] = findShown(scene);
  const across = Math.round(x * transform.scale + transform.x), down = Math.round(y * transform.scale + transform.y);
  for (const [colour, width, dash] of /** @type {[string, number, number[]][]} */ ([[WHITE, 3, []], [DARK, 1, [4, 3]]])) {
    context.strokeStyle = colour;
    context.lineWidth = width;
    context.setLineDash(dash);
    context.globalAlpha = dash.length ? 1 : 0.6;
    context.beginPath();
    context.moveTo(across + 0.5, top);
    context.lineTo(across + 0.5, bottom);
    context.moveTo(left, down + 0.5);
    context.lineTo(right, down + 0.5);
    context.stroke();
  }
  context.globalAlpha = 1;
  context.setLineDash([]);
}

/** Paint a predicted map translucently over its rectangle, as far as the picture goes.
 * @type {(context: Context, scene: SceneView, image: TileImage, place: Rectangle) => void} */
export function paintPrediction(context, scene, image, place) {
  const { transform, size } = scene;
  context.save();
  context.beginPath();
  context.rect(...toBox(toScreenRectangle([0, 0, size[1], size[0]], transform)));
  context.clip();
  context.globalAlpha = 0.5;
  context.imageSmoothingEnabled = false;
  context.drawImage(image, ...toBox(toScreenRectangle(place, transform)));
  context.restore();
}

/** @type {(context: Context, transform: Transform, tile: PyramidTile, image: TileImage, size: Pair) => void} */
function drawTile(context, transform, tile, image, size) {
  // Edges on whole pixels of the screen: neighbours would show a seam between them otherwise.
  context.drawImage(image, ...toBox(toScreenRectangle(getTileRectangle(tile, size), transform).map(Math.round)));
}

/** @type {(context: Context, transform: Transform, tile: PyramidTile, cache: TileCache, levels: number, size: Pair) =>
 * void} */
function drawAncestor(context, transform, tile, cache, levels, size) {
  const found = cache.findAncestor(tile, levels);
  if (!found) return;
  const edges = getTileRectangle(tile, size), [left, top, width, height] = toBox(edges);
  const [fromLeft, fromTop, fromWidth, fromHeight] = toBox(getTileRectangle(found.tile, size));
  const [across, down] = [found.image.width / fromWidth, found.image.height / fromHeight];
  context.drawImage(
    found.image, (left - fromLeft) * across, (top - fromTop) * down, width * across, height * down,
    ...toBox(toScreenRectangle(edges, transform)),
  );
}

/** Return [own, needed, pieces] of a tile in pixels of the scene; pieces are { source, rectangle }.
 * @type {(table: LayerTable, tile: number, reading: Reading, size: Pair) => [Rectangle, Rectangle, HaloPiece[]]} */
export function findHalo(table, tile, reading, size) {
  const [down, across] = [size[1] / table.facts.rows, size[0] / table.facts.columns];
  const own = scaleRectangle(table.get("owned", tile), down, across);
  if (reading === "layer") {
    const pieces = table.getBorrowed(tile)
      .filter(({ rectangle }) => countPixels(rectangle)) // a section of a volume does not meet all of them
      .map(({ source, rectangle }) => ({ source, rectangle: scaleRectangle(rectangle, down, across) }));
    return [own, scaleRectangle(table.get("windows", tile), down, across), pieces];
  }
  const { whole } = table.facts, seen = scaleRectangle(table.get("seen", tile), size[1] / whole[0], size[0] / whole[1]);
  /** @type {HaloPiece[]} */
  const pieces = [];
  for (let source = 0; source < table.tiles; source += 1) {
    const other = scaleRectangle(table.get("owned", source), down, across);
    const rectangle = intersectRectangles(seen, other);
    if (source !== tile && countPixels(rectangle) > 0) pieces.push({ source, rectangle });
  }
  return [own, seen, pieces];
}

/** Paint tiles, the chosen tile's halo, and the veil over what it does not need; return how much halos are enlarged.
 * @type {(context: Context, scene: SceneView, table: LayerTable, tile: number, reading: Reading, colours: string[])
 * => number} */
export function paintTiles(context, scene, table, tile, reading, colours) {
  const { transform, size } = scene;
  const { looks } = table.facts;
  const [own, needed, pieces] = findHalo(table, tile, reading, size);
  const ownScreen = toScreenRectangle(own, transform);
  const shown = pieces.map(({ source, rectangle }) =>
    ({ source, ...widenPiece(toScreenRectangle(rectangle, transform), ownScreen) }));
  if (table.tiles > 1) paintVeil(context, scene, toScreenRectangle(needed, transform), shown);
  paintLayerGrid(context, scene, table);
  const tiles = listTileEdges(scene, table);
  for (const { edges } of tiles) paintSeam(context, edges);
  for (const piece of shown) {
    const box = toBox(piece.edges), [, , width, height] = box;
    const colour = context.fillStyle = colours[looks[piece.source]];
    context.globalAlpha = 0.4;
    context.fillRect(...box);
    context.globalAlpha = 1;
    if (width > 6 && height > 6) strokeRectangle(context, growRectangle(piece.edges, -0.75), colour, 1.5);
    else context.fillRect(...box); // too thin to see pixels under a tint: the colour itself
  }
  if (countPixels(own)) outline(context, ownScreen, colours[looks[tile]], 3, 4.5);
  return Math.max(1, ...shown.map((piece) => piece.enlarged));
}

/** Paint the names of the tiles that are in view.
 * @type {(context: Context, scene: SceneView, table: LayerTable, tile: number) => void} */
export function paintLabels(context, scene, table, tile) {
  const tiles = listTileEdges(scene, table);
  const own = tiles.find(({ other }) => other === tile)?.edges ?? [0, 0, scene.view[1], scene.view[0]];
  for (const { other, edges } of tiles) {
    const names = [`tile ${other}, rank ${table.facts.ranks[other]}`, `${other}`];
    paintLabel(context, scene.view, edges, names, own, other === tile);
  }
}

/** Return { other, edges } of each tile that is in view: its number and its edges on the screen.
 * @type {(scene: SceneView, table: LayerTable) => { other: number, edges: Rectangle }[]} */
function listTileEdges(scene, table) {
  const { transform, view, size } = scene;
  const [down, across] = [size[1] / table.facts.rows, size[0] / table.facts.columns];
  const all = Array.from({ length: table.tiles }, (_, other) =>
    ({ other, edges: toScreenRectangle(scaleRectangle(table.get("owned", other), down, across), transform) }));
  return all.filter(({ edges }) => countPixels(intersectRectangles(edges, [0, 0, view[1], view[0]])));
}

/** A hairline along the edges of a tile: dark, with light beside it, so that it is seen on any tissue.
 * @type {(context: Context, edges: Rectangle) => void} */
function paintSeam(context, [top, left, bottom, right]) {
  const [y, x] = [Math.round(top) + 0.5, Math.round(left) + 0.5], [high, wide] = [bottom - top, right - left];
  strokeRectangle(context, [y - 1, x - 1, y - 1 + high, x - 1 + wide], "rgb(255 255 255 / 75%)", 1);
  strokeRectangle(context, [y, x, y + high, x + wide], DARK, 1);
}

/** @type {(context: Context, scene: SceneView, needed: Rectangle, shown: ScreenPiece[]) => void} */
function paintVeil(context, scene, needed, shown) {
  context.beginPath();
  context.rect(...toBox(findShown(scene)));
  // The halo that is drawn enlarged is not greyed either.
  const all = [needed, ...shown.map(({ edges }) => edges)].filter(countPixels);
  if (all.length) context.rect(...toBox(joinRectangles(all)));
  context.fillStyle = "rgb(118 122 128 / 66%)";
  context.fill("evenodd");
}

/** Return the part of the screen in which the picture is.
 * @type {(scene: SceneView) => Rectangle} */
function findShown({ transform, view, size }) {
  return intersectRectangles(toScreenRectangle([0, 0, size[1], size[0]], transform), [0, 0, view[1], view[0]]);
}

/** Draw lines within the edges of a rectangle: one of a colour on a white one of the width `casing`.
 * @type {(context: Context, edges: Rectangle, colour: string, width: number, casing: number, dash?: number[]) => void} */
function outline(context, edges, colour, width, casing, dash) {
  strokeRectangle(context, growRectangle(edges, -casing / 2), WHITE, casing);
  strokeRectangle(context, growRectangle(edges, -width / 2), colour, width, dash);
}

/** Write a tile's name into the corner of its visible part that is farthest from the chosen tile, where the halo is.
 * @type {(context: Context, view: Pair, edges: Rectangle, names: string[], own: Rectangle, chosen: boolean) => void} */
function paintLabel(context, view, edges, [name, number], own, chosen) {
  const [top, left] = edges, [low, start, high, end] = intersectRectangles(edges, [0, 0, view[1], view[0]]);
  const text = end - start > 120 ? name : number;
  context.font = `${chosen ? 600 : 400} 12px ${FONT}`;
  const width = context.measureText(text).width + 8;
  if (high - low < 34 || end - start < width + 14) return;
  const x = left > own[1] + 1 ? end - 8 - width : start + 8;
  const corner = top > own[0] + 1 ? high - 26 : low + 8;
  const y = x < SCALE_ROOM[0] ? Math.min(corner, view[1] - SCALE_ROOM[1]) : corner;
  context.fillStyle = "rgb(255 255 255 / 88%)";
  context.fillRect(x, y, width, 18);
  context.fillStyle = DARK;
  context.fillText(text, x + 4, y + 13);
}

/** @type {(context: Context, scene: SceneView, table: LayerTable) => void} */
function paintLayerGrid(context, scene, table) {
  const { transform, size } = scene;
  const across = (size[0] / table.facts.columns) * transform.scale;
  const down = (size[1] / table.facts.rows) * transform.scale;
  if (Math.min(across, down) < GRID_PX) return;
  context.fillStyle = "rgb(20 23 26 / 22%)";
  const [top, left, bottom, right] = findShown(scene);
  for (const x of listGridLines(across, transform.x, left, right)) context.fillRect(Math.round(x), top, 1, bottom - top);
  for (const y of listGridLines(down, transform.y, top, bottom)) context.fillRect(left, Math.round(y), right - left, 1);
}

/** Write red, green and blue into the pixels of the picture, where they are large enough.
 * @type {(context: Context, scene: SceneView, readPixel: PixelColours) => void} */
export function paintValues(context, scene, readPixel) {
  const { transform, view, size } = scene;
  if (transform.scale < VALUE_PX) return;
  const [top, left, bottom, right] = getVisible(transform, view);
  context.font = `11px ${FONT}`;
  context.textAlign = "center";
  for (let row = Math.max(0, Math.floor(top)); row < Math.min(size[1], bottom); row += 1) {
    for (let column = Math.max(0, Math.floor(left)); column < Math.min(size[0], right); column += 1) {
      const values = readPixel(row, column);
      if (!values) continue;
      context.fillStyle = values[0] + values[1] + values[2] > 380 ? DARK : WHITE;
      const x = (column + 0.5) * transform.scale + transform.x;
      const y = (row + 0.5) * transform.scale + transform.y;
      values.forEach((value, index) => context.fillText(String(value), x, y + 4 + 13 * (index - 1)));
    }
  }
  context.textAlign = "start";
}

/** Frame a pixel of the layer and, dashed, the rectangle of the picture that it depends on.
 * @type {(context: Context, scene: SceneView, pixel: Rectangle, field: Rectangle | null) => void} */
export function paintCursor(context, scene, pixel, field) {
  outline(context, toScreenRectangle(pixel, scene.transform), DARK, 2, 4);
  if (field) outline(context, toScreenRectangle(field, scene.transform), DARK, 2, 4, [5, 4]);
}

/** Paint a scale bar in the lower left corner, and beside it how much a halo is enlarged.
 * @type {(context: Context, scene: SceneView, microns: number | null, enlarged: number) => void} */
export function paintScale(context, scene, microns, enlarged) {
  const [length, label] = chooseScaleBar(scene.transform.scale, Math.min(150, scene.view[0] / 3), microns);
  const note = enlarged > 1.05 ? `   halo enlarged × ${enlarged < 10 ? enlarged.toFixed(1) : Math.round(enlarged)}` : "";
  context.font = `12px ${FONT}`;
  const width = Math.max(length, context.measureText(label + note).width) + 20;
  const top = scene.view[1] - 42;
  context.fillStyle = "rgb(255 255 255 / 88%)";
  context.fillRect(10, top, width, 34);
  context.fillStyle = DARK;
  context.fillText(label + note, 20, top + 14);
  context.fillRect(20, top + 22, length, 3);
  context.fillRect(20, top + 19, 1, 9);
  context.fillRect(19 + length, top + 19, 1, 9);
}
