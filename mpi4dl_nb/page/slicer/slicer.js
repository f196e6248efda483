// The slicer: a picture in tiles, the halo of one tile at one layer, and what is under the pointer.

import { makeButton, makeElement, makeKeyHelp, setText } from "../shared/elements.js";
import { boundHeight, followModel, makeRender, makeTimer, watchTheme } from "../shared/view_life.js";
import { NetStrip } from "./net_strip.js";
import { clamp } from "../shared/numbers.js";
import { TileCache } from "./pyramid.js";
import { unpackTables } from "../shared/tables.js";
import { PlaneSliders } from "./plane_sliders.js";
import { SectionView } from "./section_view.js";
import { describeLayer, listKeys, listTileLines, makeClassList, makePieceList } from "./slicer_words.js";
import { unpackVolume } from "./volume_tissue.js";

/** @type {[Reading, string][]} */
const READINGS = [["layer", "this layer's halo"], ["picture", "cumulative halo"]];

/** The view of one slicer: a strip, and sections of what is shown. It keeps the model's layer, tile and reading. */
class SlicerView {
  /** @param {Room<SlicerValues, SlicerContent>} room */
  constructor({ model, el, signal }) {
    this.model = model;
    this.save = makeTimer(signal);
    this.say = makeTimer(signal);
    this.facts = model.get("facts");
    /** @type {{ facts: LayerFacts, numbers: LayerNumbers }[]} */
    this.layers = [];
    /** @type {SectionView[]} */
    this.sections = [];
    /** @type {VolumeTissue | undefined} */
    this.volume = undefined;
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
    this.root.append(this.makeToolbar());
    if (this.facts.sections.length > 1) {
      this.sliders = new PlaneSliders(this.facts, (position) => this.moveTo(position), (number) => this.enlarge(number));
      this.root.append(this.sliders.bar);
    }
    this.root.append(middle, this.status);
    this.cache = new TileCache((tiles) => model.send({ tiles }));
    this.readFacts();
    this.sections = this.facts.sections.map((_, number) => new SectionView(this, number, this.makeHost(), signal));
    this.stage.append(this.trouble);
    followModel(model, {
      "change:facts change:numbers": () => this.readFacts(),
      "change:layer change:tile change:reading change:fields change:overlaid": () => this.refresh(),
      "change:position change:large": () => this.refresh(),
      "change:preview change:overlay": () => this.readPictures(),
      "msg:custom": (content, buffers) => this.receive(content, buffers),
    }, signal);
    watchTheme(() => this.sections.forEach(({ scene }) => scene.recolour()), signal);
    boundHeight(this.root, model, () => this.sections.forEach(({ scene }) => scene.resize()), signal);
    if (this.facts.picture.saved) this.readPictures();
    else model.send({ pictures: true });
    this.refresh();
  }

  /** Return where a section is drawn: all of the stage, or one of its cells.
   * @returns {HTMLElement} */
  makeHost() {
    if (this.facts.sections.length < 2) return this.stage;
    return this.stage.appendChild(makeElement("div", { class: "mpi4dl-section" }));
  }

  /** Whether what is shown is a volume or a signal, in grey. */
  get isVolume() {
    return this.facts.picture.span !== null;
  }

  get large() {
    return this.sections[clamp(this.model.get("large"), 0, this.sections.length - 1)];
  }

  /** The pixel through which all sections go. */
  get position() {
    return this.model.get("position");
  }

  makeToolbar() {
    const bar = makeElement("div", { class: "mpi4dl-toolbar", role: "toolbar", "aria-label": "view" });
    /** @type {(text: string, action: () => void, tip: string) => HTMLButtonElement} */
    const add = (text, action, tip) => bar.appendChild(makeButton(text, tip, action));
    add("zoom in", () => this.large.scene.zoom(2), "key +");
    add("zoom out", () => this.large.scene.zoom(0.5), "key -");
    add("whole", () => this.large.scene.showWhole(), "key 0");
    add("zoom to halo", () => this.showSeam(), "key h: a close view of where the tile borrows");
    for (const [reading, text] of READINGS) {
      this.switches[reading] = add(text, () => this.set("reading", reading), "key c switches between the two");
    }
    this.switches.overlaid = add("predicted map", () => this.set("overlaid", !this.model.get("overlaid")), "key o");
    this.switches.fields = add("receptive fields", () => this.set("fields", !this.model.get("fields")), "key f");
    bar.append(makeKeyHelp(this.stage, listKeys(this.facts)));
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
    this.layers = this.facts.layers.map((facts, at) => ({ facts, numbers: numbers[at] }));
    if (this.sections.length) this.refresh();
  }

  readPictures() {
    return this.takePictures([this.model.get("preview"), this.model.get("overlay")]);
  }

  /** Show the whole picture and the predicted map over it, if there is one: two image files.
   * @type {(files: Bytes[]) => Promise<void>} */
  async takePictures(files) {
    if (this.isVolume) {
      this.volume = files[0].byteLength ? await unpackVolume(unpackTables(files[0])) : undefined;
      this.requestPaint();
      return;
    }
    /** @type {(bytes: Bytes) => Promise<TileImage> | undefined} */
    const decode = (bytes) => (bytes.byteLength ? createImageBitmap(new Blob([bytes])) : undefined);
    [this.preview, this.overlay] = await Promise.all(files.map(decode));
    this.requestPaint();
  }

  /** @type {(content: SlicerContent, buffers: Bytes[]) => Promise<void>} */
  async receive(content, buffers) {
    if (content.pictures) await this.takePictures(buffers);
    if (!content.tiles) return;
    await Promise.all(content.tiles.map((tile, index) => this.takeTile(tile, buffers[index], content.trouble)));
    this.requestPaint();
  }

  requestPaint() {
    this.sections.forEach(({ scene }) => scene.requestPaint());
  }

  /** @type {(tile: TissueKey, bytes: Bytes, trouble?: string) => Promise<void>} */
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
      this.requestPaint();
    });
    this.trouble.replaceChildren(text, again);
  }

  /** The layer that is shown: its facts and its tables. */
  get layer() {
    return this.layers[Math.min(this.model.get("layer"), this.layers.length - 1)];
  }

  /** How many tiles the layer has. */
  get tiles() {
    return this.layer.facts.ranks.length;
  }

  /** The model's reading, or "layer" where outputs are not cut into tiles whose reach could be shown. */
  get reading() {
    return this.layer.facts.reach ? this.model.get("reading") : "layer";
  }

  get tile() {
    return Math.min(this.model.get("tile"), this.tiles - 1);
  }

  /** Show the model's layer, tile and reading in all parts. */
  refresh() {
    const { layers, layer, tile, facts, reading } = this, { table } = this.large;
    this.title.textContent = this.title.title = layer.facts.title;
    this.sections.forEach((section) => section.host.classList.toggle("large", section.isLarge));
    this.sliders?.show(this.position, this.sections.indexOf(this.large));
    this.strip.box.hidden = !facts.net.length;
    this.strip.show(facts.net, layers.length, layers.indexOf(layer), (point) => layers[point].facts.title);
    for (const [name] of READINGS) this.switches[name].setAttribute("aria-pressed", String(reading === name));
    for (const name of /** @type {const} */ (["fields", "overlaid"])) {
      this.switches[name].setAttribute("aria-pressed", String(this.model.get(name)));
    }
    this.switches.overlaid.hidden = !facts.prediction;
    const lines = listTileLines(table, tile, reading, facts.remarks).map((text) => makeElement("p", { text }));
    const lists = reading === "layer" ? [makePieceList(table, tile, facts.colours)] : [];
    if (facts.prediction && this.model.get("overlaid")) lists.unshift(makeClassList(facts.prediction.classes));
    this.words.replaceChildren(...lines, ...lists);
    const looked = this.sections.find(({ scene }) => scene.cursor)?.scene;
    if (looked?.cursor) looked.lookAt(...looked.cursor); // what is there may be another pixel now
    else this.leave();
    this.requestPaint();
  }

  /** No pixel is looked at any more: the status line tells of the layer again. */
  leave() {
    this.sayLater(() => describeLayer(this.large.table.facts, this.model.get("fields")));
  }

  /** Announce a text once nothing else has been said for a moment.
   * @type {(word: () => string) => void} */
  sayLater(word) {
    this.say(250, () => {
      this.status.title = word();
      setText(this.status, this.status.title);
    });
  }

  /** Do what a key on one of the sections means.
   * @type {(key: string, section: SectionView) => boolean} */
  press(key, section) {
    /** @type {Record<string, () => void>} */
    const actions = {
      "[": () => this.strip.select(this.model.get("layer") - 1),
      "]": () => this.strip.select(this.model.get("layer") + 1),
      t: () => this.set("tile", (this.tile + 1) % this.tiles),
      T: () => this.set("tile", (this.tile + this.tiles - 1) % this.tiles),
      h: () => this.showSeam(),
      c: () => this.set("reading", this.model.get("reading") === "layer" ? "picture" : "layer"),
      f: () => this.set("fields", !this.model.get("fields")),
      o: () => this.set("overlaid", !this.model.get("overlaid")),
    };
    const [across] = section.section.across;
    if (this.sections.length > 1) {
      Object.assign(actions, {
        PageUp: () => this.step(across, -1),
        PageDown: () => this.step(across, 1),
        v: () => this.enlarge((this.sections.indexOf(this.large) + 1) % this.sections.length),
      });
    }
    actions[key]?.();
    return key in actions;
  }

  /** Move to a close view of the smallest piece that the tile borrows, where it touches the tile. */
  showSeam() {
    if (this.large.showSeam(this.tile)) return;
    const where = this.isVolume ? "in this view of this layer" : "at this layer";
    this.sayLater(() => `Tile ${this.tile} borrows nothing ${where}.`);
  }

  // The sections of a volume.

  /** Move all sections through another pixel of the volume.
   * @type {(position: number[]) => void} */
  moveTo(position) {
    this.set("position", position);
  }

  /** Move by some planes along an axis.
   * @type {(axis: number, planes: number) => void} */
  step(axis, planes) {
    const position = [...this.position];
    position[axis] = clamp(position[axis] + planes, 0, this.facts.picture.sizes[axis] - 1);
    this.moveTo(position);
  }

  /** Make a section the large one, of which the place is kept.
   * @type {(number: number) => void} */
  enlarge(number) {
    this.set("large", number);
    this.set("place", this.large.place);
    this.sections[number].scene.canvas.focus({ preventScroll: true });
  }
}

export default { render: makeRender((room) => new SlicerView(room)) };
