// The picture of a plan on the page: its canvas, what the pointer or a key means, and the legend.

import { fitCanvas, getContext } from "../shared/canvas.js";
import { LIGHT, listenToKeys, makeElement, readColours, setText } from "../shared/elements.js";
import { makeFrameLoop, watchSize, watchTheme } from "../shared/view_life.js";
import { drawBlock, drawFlows, drawImageSheet, drawOutline, writeSheetName } from "./plan_drawing.js";
import { describeBlock, findBlockAt, moveBlockFocus } from "./plan_focus.js";
import { fillTexture, getBlockFaces } from "./plan_paint.js";
import { buildPlanScene, placePlanScene, readBlocks } from "./plan_scene.js";

const KEYS = "Arrow keys: next tile, then next stage. Page up and down: stage. Home, End: first and last.";

/** Shows a plan in `host`, and tells what is under the pointer or the focus: in a card, and by `status` aloud. */
export class PlanPicture {
  /** @param {HTMLElement} host
   * @param {HTMLElement} status
   * @param {HTMLElement} legend
   * @param {AbortSignal} signal */
  constructor(host, status, legend, signal) {
    this.host = host;
    this.status = status;
    this.legend = legend;
    this.canvas = makeElement("canvas", {
      class: "mpi4dl-plan-canvas", tabindex: "0", role: "application", "aria-roledescription": "picture of a plan",
      "data-lm-suppress-shortcuts": "true", title: "",
    });
    this.room = makeElement("div", { class: "mpi4dl-plan-room" }, this.canvas);
    host.append(this.room);
    this.card = makeElement("div", { class: "mpi4dl-plan-card", "aria-hidden": "true" });
    host.append(this.card);
    this.still = document.createElement("canvas");
    this.hovered = this.focused = -1;
    this.copy = 0;
    /** @type {PlanStage[]} */
    this.stages = [];
    /** @type {BlockColumns | null} */
    this.blocks = null;
    /** @type {Pair | null} */
    this.size = null; // of the picture of all tiles: rows and columns, once there is a plan
    this.image = ""; // the image's size in words
    /** @type {PlanLoad[]} */
    this.groups = [];
    /** @type {Int32Array} */
    this.ofRank = new Int32Array(); // the group of each rank
    this.isStale = true;
    /** @type {PlanScene | null} */
    this.scene = null;
    this.transform = { scale: 1, x: 0, y: 0 };
    this.hasWords = false; // below the names of the sheets
    /** @type {Pair} */
    this.view = [0, 0];
    this.colours = LIGHT;
    this.request = makeFrameLoop(() => this.draw(), signal);
    watchSize(this.room, () => this.layOut(), signal);
    watchTheme(() => this.paint(), signal);
    this.listen();
  }

  listen() {
    this.canvas.addEventListener("pointermove", (event) => this.hover(event.offsetX, event.offsetY));
    this.canvas.addEventListener("pointerleave", () => this.mean("hovered", -1));
    this.canvas.addEventListener("click", () => { if (this.hovered >= 0) this.mean("focused", this.hovered); });
    this.canvas.addEventListener("focus", () => {
      if (this.focused < 0) this.mean("focused", moveBlockFocus(this.scene?.boxes ?? [], -1, "Home"));
    });
    listenToKeys(this.canvas, ({ key, shiftKey }) => {
      const there = shiftKey ? -1 : moveBlockFocus(this.scene?.boxes ?? [], this.focused, key);
      if (there >= 0) this.mean("focused", there);
      return there >= 0;
    });
  }

  /** Show where the ranks of a plan are: its shape, its blocks, if they are not too many, and the picture's size.
   * @type {(shape: Partial<PlanShape>, blocks: BlockColumns | null, size: Pair) => void} */
  showShape(shape, blocks, size) {
    const known = this.describeFocus();
    this.stages = shape.stages ?? [];
    this.blocks = blocks;
    this.size = size;
    this.image = shape.image ?? "";
    this.copy = Math.min(this.copy, Math.max(0, (shape.copies ?? []).length - 1));
    this.canvas.setAttribute("aria-label", `${shape.summary}. ${shape.left_out ?? ""} ${KEYS}`);
    this.layOut(known);
  }

  /** Show another copy of the model.
   * @type {(copy: number) => void} */
  showCopy(copy) {
    this.copy = copy;
    this.layOut();
  }

  /** Show what the ranks hold: groups of equal load, and the number of each rank's group.
   * @type {(groups: PlanLoad[], ofRank: Int32Array, isStale: boolean) => void} */
  showLoads(groups, ofRank, isStale) {
    this.groups = groups;
    this.ofRank = ofRank;
    this.isStale = isStale;
    this.showLegend();
    this.paint();
    if (this.focused >= 0 || this.hovered >= 0) this.tell();
  }

  /** @type {(block: PlanBlock) => PlanLoad | undefined} */
  getLoad(block) {
    return this.isStale ? undefined : this.groups[this.ofRank[block.rank]];
  }

  /** @type {() => PlanBlock | undefined} */
  describeFocus() {
    return this.scene?.boxes[this.focused]?.block;
  }

  /** @type {(known?: PlanBlock) => void} */
  layOut(known = this.describeFocus()) {
    const { clientWidth: width, clientHeight: height } = this.room;
    if (!width || !height || !this.size) return;
    this.scene = buildPlanScene(this.stages, this.blocks ? readBlocks(this.blocks, this.copy) : [], this.size);
    this.view = [width, height];
    [this.transform, this.hasWords] = placePlanScene(this.scene, this.view);
    this.hovered = -1;
    this.focused = this.scene.boxes.findIndex(({ block }) => block.rank === known?.rank && block.stage === known.stage);
    this.paint();
    this.tell();
  }

  /** Paint everything but the outlines once, so that a hover only copies it. */
  paint() {
    if (!this.scene) return;
    const [width, height] = this.view, context = fitCanvas(this.still, width, height);
    this.colours = readColours(this.host);
    this.still.dataset.font = getComputedStyle(this.host).fontFamily;
    this.paintScene(context, this.scene);
    this.request();
  }

  /** @type {(context: Context, scene: PlanScene) => void} */
  paintScene(context, scene) {
    const { transform, colours } = this, room = scene.gap * transform.scale * 0.866 - 6;
    // Flows out of a sheet are drawn before it, so that they begin at its edge and no number is crossed out.
    drawFlows(context, scene.flows[0] ?? [], transform, colours);
    drawImageSheet(context, scene, transform, colours);
    this.stages.forEach((_, number) => {
      drawFlows(context, scene.flows[number + 1] ?? [], transform, colours);
      for (const box of scene.boxes) {
        if (box.block.stage === number) drawBlock(context, box, transform, this.getLoad(box.block));
      }
    });
    /** @type {(foot: Pair, name: string, words: string) => void} */
    const write = (foot, name, words) =>
      writeSheetName(context, foot, transform, name, this.hasWords ? words : "", room, colours);
    write(scene.foot, "image", this.image);
    this.stages.forEach((stage, number) => write(scene.sheets[number].foot, stage.name, stage.words));
  }

  draw() {
    const [width, height] = this.view, context = fitCanvas(this.canvas, width, height);
    context.drawImage(this.still, 0, 0, width, height);
    for (const [index, edge] of [[this.focused, 3], [this.hovered, 2]]) {
      const box = this.scene?.boxes[index];
      if (box) drawOutline(context, box, this.transform, this.colours, edge);
    }
  }

  /** @type {(x: number, y: number) => void} */
  hover(x, y) {
    if (!this.scene) return;
    const { scale, x: dx, y: dy } = this.transform;
    this.mean("hovered", findBlockAt(this.scene.boxes, (x - dx) / scale, (y - dy) / scale));
  }

  /** Take block `index` as the one that is `hovered` or `focused`, and tell what it is.
   * @type {(how: "hovered" | "focused", index: number) => void} */
  mean(how, index) {
    if (this[how] === index) return;
    this[how] = index;
    this.request();
    this.tell();
  }

  tell() {
    const box = this.scene?.boxes[this.hovered >= 0 ? this.hovered : this.focused];
    if (!box) {
      this.card.textContent = "Point at a rank, or go there with Tab and the arrow keys, to see what it holds.";
      return;
    }
    const lines = describeBlock(box.block, this.stages, this.getLoad(box.block));
    this.card.replaceChildren(...lines.map((text) => makeElement("div", { text })));
    setText(this.status, lines.join(", "));
  }

  showLegend() {
    /** @type {Map<number, [string, number]>} */
    const counts = new Map();
    for (const index of this.isStale ? [] : this.ofRank) {
      const group = this.groups[index];
      if (group) counts.set(group.level, [group.word, (counts.get(group.level)?.[1] ?? 0) + 1]);
    }
    const items = [...counts].sort(([one], [other]) => other - one).map(([level, [word, count]]) => {
      const swatch = makeElement("canvas", { width: "26", height: "16", "aria-hidden": "true" });
      const context = getContext(swatch);
      context.rect(0, 0, 26, 16);
      context.fillStyle = getBlockFaces(level)[0];
      context.fill();
      fillTexture(context, level);
      const ranks = `${count.toLocaleString("en")} ${count === 1 ? "rank" : "ranks"}`;
      return makeElement("span", {}, swatch, `${word}: ${ranks}`);
    });
    const isKnown = items.length && ![...counts.keys()].some((level) => level < 0);
    if (isKnown) {
      items.push(makeElement("span", { text: "A block is filled like a tank; that of the fullest rank is full." }));
    }
    this.legend.replaceChildren(...(items.length ? items : ["The memory of the ranks is being counted ..."]));
  }
}
