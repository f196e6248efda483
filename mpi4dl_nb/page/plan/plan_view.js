// The configurator on the page: controls on the left, the picture of the plan in the middle, its gauges on the right.

import { makeButton, makeElement } from "../shared/elements.js";
import { boundHeight, followModel, makeRender } from "../shared/view_life.js";
import { unpackTables } from "../shared/tables.js";
import { PlanControls } from "./plan_controls.js";
import { PlanGauges } from "./plan_gauges.js";
import { PlanPicture } from "./plan_picture.js";

/** Sends what controls set, one message at a time: while an answer is awaited, later values replace earlier ones. */
export class SettingSender {
  /** @param {(message: { set: PlanSettings, asked: number }) => void} send */
  constructor(send) {
    this.send = send;
    this.asked = 0; // the number of the message that is to be answered
    /** @type {PlanSettings | null} */
    this.waiting = null;
  }

  /** Whether the kernel has answered everything that was set. */
  get isQuiet() {
    return !this.asked && !this.waiting;
  }

  /** @type {(values: PlanSettings) => void} */
  set(values) {
    this.waiting = { ...this.waiting, ...values };
    if (!this.asked) this.flush(this.waiting);
  }

  /** @type {(asked: number) => void} */
  answer(asked) {
    if (asked !== this.asked) return; // it was asked by another view
    this.asked = 0;
    if (this.waiting) this.flush(this.waiting);
  }

  /** @type {(values: PlanSettings) => void} */
  flush(values) {
    this.waiting = null;
    this.asked = Math.random(); // unlike that of any other message, also of other views
    this.send({ set: values, asked: this.asked });
  }
}

/** @type {(el: HTMLElement, start: () => void) => PlanParts} */
function buildColumns(el, start) {
  /** @type {(name: string, attributes?: Attributes, ...children: Child[]) => HTMLElement} */
  const part = (name, attributes = {}, ...children) =>
    makeElement("div", { class: `mpi4dl-plan-${name}`, ...attributes }, ...children);
  const parts = {
    left: part("controls", { role: "group", "aria-label": "options of the plan" }),
    facts: part("facts"), copies: makeElement("select", { "aria-label": "copy of the model that is drawn" }),
    doing: part("doing", { role: "status" }), picture: part("picture"), legend: part("legend"),
    status: part("status mpi4dl-hidden", { role: "status", "aria-live": "polite" }), gauges: part("gauges"),
    button: makeButton("", undefined, start, { class: "mpi4dl-plan-start" }), place: part("place"),
    reason: part("reason", { role: "status" }),
  };
  const head = part("head", {}, parts.facts, parts.copies);
  const middle = part("middle", {}, head, parts.doing, parts.picture, parts.legend, parts.status);
  const right = part("right", {}, parts.gauges, part("run", {}, parts.button, parts.place, parts.reason));
  const root = makeElement("div", { class: "mpi4dl-page mpi4dl-plan" }, parts.left, middle, right);
  el.append(part("frame", {}, root));
  return { ...parts, root };
}

/** @type {(parts: PlanParts, shape: Partial<PlanShape>, picture: PlanPicture) => void} */
function showFacts(parts, shape, picture) {
  parts.facts.replaceChildren(...(shape.facts ?? []).map(([number, words]) =>
    makeElement("span", {}, makeElement("b", { text: number }), ` ${words}`)));
  const copies = shape.copies ?? [];
  parts.copies.hidden = copies.length < 2;
  if ([...parts.copies.options].map((each) => each.text).join() !== copies.join()) {
    parts.copies.replaceChildren(...copies.map((text, value) => makeElement("option", { value, text })));
    parts.copies.value = String(picture.copy);
  }
}

/** @type {(parts: PlanParts, start: Partial<PlanStart>) => void} */
function showStart(parts, start) {
  parts.button.textContent = start.label ?? "";
  parts.button.setAttribute("aria-disabled", String(start.disabled ?? true));
  parts.place.textContent = start.place ?? "";
  parts.reason.textContent = start.trouble ? `⚠ ${start.trouble}` : start.reason || start.note || "";
  parts.reason.title = parts.reason.textContent;
  parts.reason.classList.toggle("mpi4dl-plan-bad", Boolean(start.trouble));
}

/** Show the configurator of `model` in `el`.
 * @type {(room: Room<PlanPageValues, PlanContent>) => void} */
function showPlan({ model, el, signal }) {
  const parts = buildColumns(el, () => model.send({ start: true }));
  const sender = new SettingSender((content) => model.send(content));
  const controls = new PlanControls(parts.left, model.get("options"), (values) => sender.set(values));
  const picture = new PlanPicture(parts.picture, parts.status, parts.legend, signal);
  const gauges = new PlanGauges(parts.gauges);
  /** @type {Record<string, () => void>} */
  const show = {
    shape: () => {
      const shape = model.get("shape"), blocks = model.get("blocks");
      if (!shape.size) return;
      picture.showShape(shape, blocks.byteLength ? unpackTables(blocks) : null, shape.size);
      showFacts(parts, shape, picture);
    },
    loads: () => {
      const { groups = [], plan } = model.get("loads"), isStale = plan !== model.get("shape").plan;
      picture.showLoads(groups, groups.length ? unpackTables(model.get("rank_groups")) : new Int32Array(), isStale);
    },
    gauges: () => {
      const { now = [], before = [], plan } = model.get("gauges");
      const isInvalid = Object.values(model.get("errors")).some(Boolean);
      gauges.show(now, before, isInvalid || plan !== model.get("shape").plan, isInvalid);
    },
    values: () => { if (sender.isQuiet) controls.showValues(model.get("values")); },
    errors: () => controls.showErrors(model.get("errors")),
    status: () => { parts.doing.textContent = model.get("status").words ?? ""; },
    start: () => showStart(parts, model.get("start")),
    locked: () => controls.lock(model.get("locked") ?? {}),
  };
  /** @type {Record<string, string[]>} */
  const follow = { errors: ["errors", "gauges"], blocks: ["shape"], shape: ["shape", "loads", "gauges"], rank_groups: ["loads"] };
  const names = [...new Set([...Object.keys(show), ...Object.keys(follow)])];
  followModel(model, Object.fromEntries(names.map((name) =>
    [`change:${name}`, () => (follow[name] ?? [name]).forEach((each) => show[each]())])), signal);
  followModel(model, { "msg:custom": ({ answered }) => {
    sender.answer(answered ?? 0);
    show.values();
  } }, signal);
  parts.copies.addEventListener("change", () => picture.showCopy(Number(parts.copies.value)));
  for (const each of Object.values(show)) each();
  boundHeight(parts.root, model, () => picture.layOut(), signal);
}

export default { render: makeRender(showPlan) };
