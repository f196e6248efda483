// One section of what a slicer shows, on its own canvas: all of a picture, or a plane through a volume.

import { clamp } from "../shared/numbers.js";
import { centreRectangle, countPixels, findCentre, measureRectangle, scaleRectangle } from "../shared/rectangles.js";
import { cutLayer, scalePosition } from "./layer_sections.js";
import { PixelReader } from "./pixel_reader.js";
import { Scene } from "./scene.js";
import { describePlace, listKeys } from "./slicer_words.js";
import {
  findHalo, paintCursor, paintLabels, paintPicture, paintPlanes, paintPrediction, paintScale, paintSection, paintTiles,
  paintValues,
} from "./slicing_paint.js";
import { getVisible } from "./transform.js";

const SEAM_PX = 26; // pixels of the layer across a close view of a seam

/** The owner of a scene. What is shown of which layer is known to the slicer, `view`, which has several of these. */
export class SectionView {
  /** @param {SectionOwner} view
   * @param {number} number
   * @param {HTMLElement} host
   * @param {AbortSignal} signal */
  constructor(view, number, host, signal) {
    this.view = view;
    this.number = number;
    this.host = host;
    this.section = view.facts.sections[number];
    this.pixels = new PixelReader(view.cache);
    /** @type {LayerTable | undefined} */
    this.cutTable = undefined;
    /** @type {unknown[]} */
    this.cutOf = []; // what the table has been cut of, and where
    /** @type {OffscreenCanvas | undefined} */
    this.coarse = undefined;
    /** @type {unknown[]} */
    this.coarseOf = [];
    const keys = listKeys(view.facts).map((pair) => pair.join(": ")).join("; ");
    const what = view.facts.sections.length > 1 ? `, ${this.section.names.join(" and ")}` : "";
    const [rows, columns] = this.section.scene;
    this.scene = new Scene(host, [columns, rows], `${view.facts.picture.name} in tiles${what}. ${keys}`, this, signal);
  }

  /** What this section shows of the layer. */
  get table() {
    const { facts, numbers } = this.view.layer, { picture } = this.view.facts, { position } = this.view;
    const here = [facts, ...this.section.across.map((axis) => position[axis])];
    if (!this.cutTable || here.some((each, index) => each !== this.cutOf[index])) {
      const at = scalePosition(position, picture.sizes, facts.sizes);
      this.cutTable = cutLayer(facts, numbers, this.section, at, position, picture.sizes);
      this.cutOf = here;
    }
    return this.cutTable;
  }

  /** Whether it is the large one. */
  get isLarge() {
    return this.view.large === this;
  }

  /** @type {(context: Context, scene: Scene) => void} */
  paint(context, scene) {
    const { view, table } = this, { picture, colours, prediction } = view.facts;
    if (view.isVolume) this.paintGrey(context);
    else view.cache.want(paintPicture(context, scene, picture, view.cache, view.preview));
    if (view.overlay && prediction && view.model.get("overlaid")) paintPrediction(context, scene, view.overlay, prediction.edges);
    const enlarged = paintTiles(context, scene, table, view.tile, view.reading, colours);
    if (!view.isVolume) paintValues(context, scene, (row, column) => this.pixels.read(row, column));
    paintLabels(context, scene, table, view.tile);
    if (view.facts.sections.length > 1) paintPlanes(context, scene, this.toScene(view.position));
    if (scene.cursor && this.isInside(...scene.cursor)) paintCursor(context, scene, ...this.frameCursor(...scene.cursor));
    if (this.isLarge) paintScale(context, scene, picture.microns, enlarged);
  }

  /** Paint the section of a volume: as the page has it, until the kernel has sent it.
   * @type {(context: Context) => void} */
  paintGrey(context) {
    const { cache, volume, position } = this.view, { sizes } = this.view.facts.picture, { section } = this;
    const along = section.across.map((axis) => position[axis]), exact = volume?.isExact(sizes);
    /** @type {SectionKey} */
    const key = [this.number, along[0] ?? 0];
    const here = [volume, ...along];
    if (volume && here.some((each, index) => each !== this.coarseOf[index])) {
      this.coarse = volume.draw(section, position, sizes);
      this.coarseOf = here;
    }
    paintSection(context, this.scene, (exact ? undefined : cache.get(key)) ?? this.coarse);
    if (volume && !exact) cache.want([key]);
  }

  /** Return the point of the scene in the middle of a pixel.
   * @type {(position: number[]) => Pair} */
  toScene(position) {
    const { axes, scene } = this.section, { sizes } = this.view.facts.picture;
    const [y, x] = axes.map((axis, index) => ((position[axis] + 0.5) / sizes[axis]) * scene[index]);
    return [x, y];
  }

  /** Return a pixel of an image of these sizes: that of the view, moved to a point of the scene.
   * @type {(x: number, y: number, sizes: number[]) => number[]} */
  findPixel(x, y, sizes) {
    const at = scalePosition(this.view.position, this.view.facts.picture.sizes, sizes);
    const [rows, columns] = this.section.scene, shares = [y / rows, x / columns].slice(-this.section.axes.length);
    this.section.axes.forEach((axis, index) => { at[axis] = Math.floor(shares[index] * sizes[axis]); });
    return at;
  }

  /** Return the row and the column of the section, of an image of these sizes.
   * @type {(x: number, y: number, sizes: Pair) => Pair} */
  findPlace(x, y, [down, across]) {
    const [rows, columns] = this.section.scene;
    return [Math.floor((y / rows) * down), Math.floor((x / columns) * across)];
  }

  /** @type {(x: number, y: number) => [Rectangle, Rectangle | null]} */
  frameCursor(x, y) {
    const { facts } = this.table, [rows, columns] = this.section.scene;
    const [row, column] = this.findPlace(x, y, [facts.rows, facts.columns]);
    const pixel = scaleRectangle([row, column, row + 1, column + 1], rows / facts.rows, columns / facts.columns);
    if (!this.view.model.get("fields") || !facts.operator || !facts.out_rows) return [pixel, null];
    const field = this.table.getField(...this.findPlace(x, y, [facts.out_rows, facts.out_columns]));
    return [pixel, scaleRectangle(field, rows / facts.whole[0], columns / facts.whole[1])];
  }

  /** @type {(x: number, y: number) => boolean} */
  isInside(x, y) {
    return x >= 0 && y >= 0 && x < this.section.scene[1] && y < this.section.scene[0];
  }

  // What the scene asks of its owner, besides `paint`.

  /** @type {(x: number, y: number) => string[]} */
  describe(x, y) {
    if (!this.isInside(x, y)) {
      this.leave();
      return [];
    }
    const { table } = this, { facts } = table, { picture } = this.view.facts, at = this.findPixel(x, y, picture.sizes);
    const lines = describePlace(picture, table, {
      at, values: this.view.isVolume ? null : this.pixels.read(at[0], at[1]), names: this.section.names,
      grey: this.readGrey(x, y), pixel: this.findPlace(x, y, [facts.rows, facts.columns]),
      out: this.findPlace(x, y, [facts.out_rows, facts.out_columns]),
    });
    this.view.sayLater(() => lines.join("; "));
    return lines;
  }

  /** Return about which number of a volume is at a point; null of a picture.
   * @type {(x: number, y: number) => number | null} */
  readGrey(x, y) {
    const { picture } = this.view.facts, { volume } = this.view;
    return picture.span && volume?.isExact(picture.sizes) ? volume.read(this.findPixel(x, y, picture.sizes), picture.span) : null;
  }

  leave() {
    this.view.leave();
  }

  /** @type {() => Pair} */
  getPixel() {
    const { facts } = this.table, [rows, columns] = this.section.scene;
    return [columns / facts.columns, rows / facts.rows];
  }

  /** @type {(x: number, y: number) => void} */
  pick(x, y) {
    if (!this.isInside(x, y)) return;
    const { facts, findOwner } = this.table, { view } = this, { sizes } = view.facts.picture;
    const pixel = this.findPixel(x, y, facts.sizes);
    const owner = findOwner.call(this.table, ...this.findPlace(x, y, [facts.rows, facts.columns]));
    const out = facts.out_sizes.length ? this.findPixel(x, y, facts.out_sizes) : facts.sizes.map(() => 0);
    view.set("picked", [...pixel, ...out]);
    view.set("tile", owner);
    if (view.isVolume) view.moveTo(this.findPixel(x, y, sizes));
  }

  /** @type {(key: string) => boolean} */
  press(key) {
    return this.view.press(key, this);
  }

  /** Move to a close view of the smallest piece that the tile borrows here, where it touches the tile; false if none is.
   * @type {(tile: number) => boolean} */
  showSeam(tile) {
    const [own, , pieces] = findHalo(this.table, tile, "layer", this.scene.size);
    if (!pieces.length) return false;
    const [piece] = pieces.map(({ rectangle }) => rectangle).sort((one, other) => countPixels(one) - countPixels(other));
    const [x, y] = findCentre(piece), side = SEAM_PX * Math.max(...this.getPixel());
    this.scene.showRectangle(centreRectangle([clamp(x, own[1], own[3]), clamp(y, own[0], own[2])], [side, side]));
    return true;
  }

  settle() {
    if (this.isLarge) this.view.set("place", this.place);
  }

  /** The row, the column and the side of what is shown, in pixels of the scene; nothing if that is all of it. */
  get place() {
    if (this.scene.isWhole) return [];
    const visible = getVisible(this.scene.transform, this.scene.view), [x, y] = findCentre(visible);
    return [y, x, Math.max(1, Math.min(...measureRectangle(visible)))].map(Math.round);
  }
}
