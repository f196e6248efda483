// The slicer: a picture in tiles, the halo of one tile at one layer, and what is under the pointer.

import { makeButton, makeElement, makeKeyHelp, setText } from "../shared/elements.js";
import { boundHeight, followModel, makeRender, makeTimer, watchTheme } from "../shared/view_life.js";
import { LayerTable } from "./layer_table.js";
import { NetStrip } from "./net_strip.js";
import { clamp } from "../shared/numbers.js";
import { PixelReader } from "./pixel_reader.js";
import { TileCache } from "./pyramid.js";
import { centreRectangle, countPixels, findCentre, measureRectangle, scaleRectangle } from "../shared/rectangles.js";
import { unpackTables } from "../shared/tables.js";
import { Scene } from "./scene.js";
import {
  SLICER_KEYS, describeLayer, describePlace, listTileLines, makeClassList, makePieceList,
} from "./slicer_words.js";
import {
  findHalo, paintCursor, paintLabels, paintPicture, paintPrediction, paintScale, paintTiles, paintValues,
} from "./slicing_paint.js";
import { getVisible } from "./transform.js";

const SEAM_PX = 26; // pixels of the layer across a close view of a seam
/** @type {[Reading, string][]} */
const READINGS = [["layer", "this layer's halo"], ["picture", "cumulative halo"]];

/** The view of one slicer. It owns a scene and a strip, and keeps the model's layer, tile and reading. */
class SlicerView {
  /** @param {Room<SlicerValues, SlicerContent>} room */
  constructor({ model, el, signal }) {
    this.model = model;
    this.save = makeTimer(signal);
    this.say = makeTimer(signal);
    this.facts = model.get("facts");
    /** @type {LayerTable[]} */
    this.tables = [];
    /** @type {TileImage | undefined} */
    this.preview = undefined;
    /** @type {TileImage | undefined} */
    this.overlay = undefined;
    /** @type {Record<string, HTMLButtonElement>} */
    this.switches = {};
    this.root = makeElement("div", { class: "mpi4dl-page mpi4dl-slicer" });
    el.append(this.root);
    this.title = makeElement("div", { class: "mpi4dl-title" });
    this.root.append(this.title);
    this.strip = new NetStrip(this.root, (point) => this.set("layer", point), signal);
    this.stage = makeElement("div", { class: "mpi4dl-stage" });
    this.words = makeElement("div", { class: "mpi4dl-words" });
    const middle = makeElement("div", { class: "mpi4dl-middle" }, this.stage, this.words);
    this.trouble = makeElement("div", { class: "mpi4dl-trouble", role: "alert" });
    this.status = makeElement("div", { class: "mpi4dl-status", role: "status", "aria-live": "polite" });
    this.root.append(this.makeToolbar(), middle, this.status);
    this.cache = new TileCache((tiles) => model.send({ tiles }));
    this.pixels = new PixelReader(this.cache);
    this.readFacts();
    const { rows, columns, name } = this.facts.picture;
    const keys = SLICER_KEYS.map((pair) => pair.join(": ")).join("; ");
    this.scene = new Scene(this.stage, [columns, rows], `${name} in tiles. ${keys}`, this, signal);
    this.stage.append(this.trouble);
    followModel(model, {
      "change:facts change:numbers": () => this.readFacts(),
      "change:layer change:tile change:reading change:fields change:overlaid": () => this.refresh(),
      "change:preview change:overlay": () => this.readPictures(),
      "msg:custom": (content, buffers) => this.receive(content, buffers),
    }, signal);
    watchTheme(() => this.scene.recolour(), signal);
    boundHeight(this.root, model, () => this.scene.resize(), signal);
    if (this.facts.picture.saved) this.readPictures();
    else model.send({ pictures: true });
    this.refresh();
  }

  makeToolbar() {
    const bar = makeElement("div", { class: "mpi4dl-toolbar", role: "toolbar", "aria-label": "view" });
    /** @type {(text: string, action: () => void, tip: string) => HTMLButtonElement} */
    const add = (text, action, tip) => bar.appendChild(makeButton(text, tip, action));
    add("zoom in", () => this.scene.zoom(2), "key +");
    add("zoom out", () => this.scene.zoom(0.5), "key -");
    add("whole", () => this.scene.showWhole(), "key 0");
    add("zoom to halo", () => this.showSeam(), "key h: a close view of where the tile borrows");
    for (const [reading, text] of READINGS) {
      this.switches[reading] = add(text, () => this.set("reading", reading), "key c switches between the two");
    }
    this.switches.overlaid = add("predicted map", () => this.set("overlaid", !this.model.get("overlaid")), "key o");
    this.switches.fields = add("receptive fields", () => this.set("fields", !this.model.get("fields")), "key f");
    bar.append(makeKeyHelp(this.stage, SLICER_KEYS));
    return bar;
  }

  /** Set a value of the model, draw at once, and let the kernel know in a moment.
   * @type {<Name extends keyof SlicerValues>(name: Name, value: SlicerValues[Name]) => void} */
  set(name, value) {
    this.model.set(name, value);
    this.save(60, () => this.model.save_changes());
  }

  readFacts() {
    this.facts = this.model.get("facts");
    const packed = this.model.get("numbers");
    if (!this.facts.layers.length || this.facts.bytes !== packed.byteLength) return; // the other half is still to come
    /** @type {LayerNumbers[]} */
    const numbers = unpackTables(packed);
    this.tables = this.facts.layers.map((layer, at) => new LayerTable(layer, numbers[at]));
    if (this.scene) this.refresh();
  }

  readPictures() {
    return this.takePictures([this.model.get("preview"), this.model.get("overlay")]);
  }

  /** Show the whole picture and the predicted map over it, if there is one: two image files.
   * @type {(files: Bytes[]) => Promise<void>} */
  async takePictures(files) {
    /** @type {(bytes: Bytes) => Promise<TileImage> | undefined} */
    const decode = (bytes) => (bytes.byteLength ? createImageBitmap(new Blob([bytes])) : undefined);
    [this.preview, this.overlay] = await Promise.all(files.map(decode));
    this.scene.requestPaint();
  }

  /** @type {(content: SlicerContent, buffers: Bytes[]) => Promise<void>} */
  async receive(content, buffers) {
    if (content.pictures) await this.takePictures(buffers);
    if (!content.tiles) return;
    await Promise.all(content.tiles.map((tile, index) => this.takeTile(tile, buffers[index], content.trouble)));
    this.scene.requestPaint();
  }

  /** @type {(tile: PyramidTile, bytes: Bytes, trouble?: string) => Promise<void>} */
  async takeTile(tile, bytes, trouble) {
    try {
      if (trouble) throw new Error(trouble);
      this.cache.put(tile, await createImageBitmap(new Blob([bytes])));
    } catch (error) {
      this.cache.fail(tile);
      this.showTrouble(error instanceof Error ? error.message : String(error));
    }
  }

  /** Tell why parts of the picture stay coarse, beside a button that reads them again.
   * @type {(why: string) => void} */
  showTrouble(why) {
    const text = `⚠ Parts of the picture stay coarse: ${why} `;
    if (this.trouble.firstChild?.textContent === text) return; // an alert that is filled again is announced again
    const again = makeButton("read again", undefined, () => {
      this.cache.retry();
      this.trouble.replaceChildren();
      this.scene.requestPaint();
    });
    this.trouble.replaceChildren(text, again);
  }

  get table() {
    return this.tables[Math.min(this.model.get("layer"), this.tables.length - 1)];
  }

  /** The model's reading, or "layer" where outputs are not cut into tiles whose reach could be shown. */
  get reading() {
    return this.table.facts.reach ? this.model.get("reading") : "layer";
  }

  get tile() {
    return Math.min(this.model.get("tile"), this.table.tiles - 1);
  }

  /** Show the model's layer, tile and reading in all parts. */
  refresh() {
    const { table, tile, facts, reading } = this;
    this.title.textContent = this.title.title = table.facts.title;
    this.strip.box.hidden = !facts.net.length;
    this.strip.show(facts.net, this.tables.length, this.tables.indexOf(table), (point) => this.tables[point].facts.title);
    for (const [name] of READINGS) this.switches[name].setAttribute("aria-pressed", String(reading === name));
    for (const name of /** @type {const} */ (["fields", "overlaid"])) {
      this.switches[name].setAttribute("aria-pressed", String(this.model.get(name)));
    }
    this.switches.overlaid.hidden = !facts.prediction;
    const lines = listTileLines(table, tile, reading, facts.remarks).map((text) => makeElement("p", { text }));
    const lists = reading === "layer" ? [makePieceList(table, tile, facts.colours)] : [];
    if (facts.prediction && this.model.get("overlaid")) lists.unshift(makeClassList(facts.prediction.classes));
    this.words.replaceChildren(...lines, ...lists);
    if (this.scene.cursor) this.scene.lookAt(...this.scene.cursor); // what is there may be another pixel now
    else this.leave();
    this.scene.requestPaint();
  }

  // What the scene asks of its owner.

  /** @type {(context: Context, scene: Scene) => void} */
  paint(context, scene) {
    const { picture, colours } = this.facts;
    this.cache.want(paintPicture(context, scene, picture, this.cache, this.preview));
    const { overlay, facts } = this;
    if (overlay && facts.prediction && this.model.get("overlaid")) paintPrediction(context, scene, overlay, facts.prediction.edges);
    const enlarged = paintTiles(context, scene, this.table, this.tile, this.reading, colours);
    paintValues(context, scene, (row, column) => this.pixels.read(row, column));
    paintLabels(context, scene, this.table, this.tile);
    if (scene.cursor && this.isInside(...scene.cursor)) paintCursor(context, scene, ...this.frameCursor(...scene.cursor));
    paintScale(context, scene, picture.microns, enlarged);
  }

  /** Return the layer's pixel at a point, and the pixel of its output at the same place: rows and columns.
   * @type {(x: number, y: number) => [Pair, Pair]} */
  findPixels(x, y) {
    const { facts } = this.table, { rows, columns } = this.facts.picture;
    /** @type {(down: number, across: number) => Pair} */
    const find = (down, across) => [Math.floor((y / rows) * down), Math.floor((x / columns) * across)];
    return [find(facts.rows, facts.columns), find(facts.out_rows, facts.out_columns)];
  }

  /** @type {(x: number, y: number) => [Rectangle, Rectangle | null]} */
  frameCursor(x, y) {
    const { facts } = this.table, { rows, columns } = this.facts.picture;
    const [[row, column], out] = this.findPixels(x, y);
    const pixel = scaleRectangle([row, column, row + 1, column + 1], rows / facts.rows, columns / facts.columns);
    const field = this.model.get("fields") && facts.operator && facts.out_rows ? this.table.getField(...out) : null;
    return [pixel, field];
  }

  /** @type {(x: number, y: number) => boolean} */
  isInside(x, y) {
    return x >= 0 && y >= 0 && x < this.facts.picture.columns && y < this.facts.picture.rows;
  }

  /** @type {(x: number, y: number) => string[]} */
  describe(x, y) {
    if (!this.isInside(x, y)) {
      this.leave();
      return [];
    }
    const [pixel, out] = this.findPixels(x, y);
    /** @type {Pair} */
    const at = [Math.floor(y), Math.floor(x)];
    const lines = describePlace(this.facts.picture, this.table, { at, values: this.pixels.read(...at), pixel, out });
    this.sayLater(() => lines.join("; "));
    return lines;
  }

  /** No pixel is looked at any more: the status line tells of the layer again. */
  leave() {
    this.sayLater(() => describeLayer(this.table.facts, this.model.get("fields")));
  }

  /** Announce a text once nothing else has been said for a moment.
   * @type {(word: () => string) => void} */
  sayLater(word) {
    this.say(250, () => {
      this.status.title = word();
      setText(this.status, this.status.title);
    });
  }

  /** @type {() => Pair} */
  getPixel() {
    return [this.facts.picture.columns / this.table.facts.columns, this.facts.picture.rows / this.table.facts.rows];
  }

  /** @type {(x: number, y: number) => void} */
  pick(x, y) {
    if (!this.isInside(x, y)) return;
    const [[row, column], out] = this.findPixels(x, y);
    this.set("picked", [row, column, ...out]);
    this.set("tile", this.table.findOwner(row, column));
  }

  /** @type {(key: string) => boolean} */
  press(key) {
    /** @type {Record<string, () => void>} */
    const actions = {
      "[": () => this.strip.select(this.model.get("layer") - 1),
      "]": () => this.strip.select(this.model.get("layer") + 1),
      t: () => this.set("tile", (this.tile + 1) % this.table.tiles),
      T: () => this.set("tile", (this.tile + this.table.tiles - 1) % this.table.tiles),
      h: () => this.showSeam(),
      c: () => this.set("reading", this.model.get("reading") === "layer" ? "picture" : "layer"),
      f: () => this.set("fields", !this.model.get("fields")),
      o: () => this.set("overlaid", !this.model.get("overlaid")),
    };
    actions[key]?.();
    return key in actions;
  }

  /** Move to a close view of the smallest piece that the tile borrows, where it touches the tile. */
  showSeam() {
    const [own, , pieces] = findHalo(this.table, this.tile, "layer", this.scene.size);
    if (!pieces.length) {
      this.sayLater(() => `Tile ${this.tile} borrows nothing at this layer.`);
      return;
    }
    const [piece] = pieces.map(({ rectangle }) => rectangle).sort((one, other) => countPixels(one) - countPixels(other));
    const [x, y] = findCentre(piece), side = SEAM_PX * Math.max(...this.getPixel());
    this.scene.showRectangle(centreRectangle([clamp(x, own[1], own[3]), clamp(y, own[0], own[2])], [side, side]));
  }

  settle() {
    const visible = getVisible(this.scene.transform, this.scene.view), [x, y] = findCentre(visible);
    this.set("place", this.scene.isWhole ? [] : [y, x, Math.min(...measureRectangle(visible))].map(Math.round));
  }
}

export default { render: makeRender((room) => new SlicerView(room)) };
