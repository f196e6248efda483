// The gauges of a plan: memory, time and traffic, each above the plan before, and a verdict in words, colour and shape.

import { makeElement, makeSvg } from "../shared/elements.js";

/** @type {Record<PlanGauge["verdict"], string>} */
const SIGNS = {
  fits: "M12 2a10 10 0 1 0 0 20a10 10 0 1 0 0-20zM7 12l4 4l7-8",
  "does not fit": "M8 2h8l6 6v8l-6 6H8l-6-6V8zM8 8l8 8M16 8l-8 8",
  "": "M12 2a10 10 0 1 0 0 20a10 10 0 1 0 0-20zM9 9q0-3 3-3q3 0 3 3q0 2-3 3.5V14M12 17.4v.6",
};

/** Return what a gauge's bar shows as fractions of its length: the value, that of the plan before, and the limit.
 * @type {(now?: GaugeNumbers, before?: GaugeNumbers) => { value: number | null, before: number | null, limit: number
 * | null }} */
export function scaleGauge(now, before) {
  const known = [now?.value, before?.value].filter((value) => value != null);
  const limit = now?.limit ?? null;
  const most = Math.max(...known, limit ?? 0, 0) || 1;
  /** @type {(value?: number | null) => number | null} */
  const share = (value) => (value == null ? null : value / most);
  return { value: share(now?.value), before: share(before?.value), limit: share(limit) };
}

/** Return by how much a value differs from the one before, in words; empty if either is unknown or both are equal.
 * @type {(now?: GaugeNumbers, before?: GaugeNumbers) => string} */
export function describeChange(now, before) {
  if (now?.value == null || !before?.value || now.value === before.value) return "";
  const ratio = now.value / before.value;
  if (ratio >= 2) return `${ratio.toFixed(1)} times the plan before`;
  const percent = Math.round(Math.abs(ratio - 1) * 100);
  return `${percent || "under 1"} % ${ratio > 1 ? "more" : "less"} than the plan before`;
}

/** Shows the gauges in `host`. Every line has its place from the start, so that nothing moves when a number comes. */
export class PlanGauges {
  /** @param {HTMLElement} host */
  constructor(host) {
    this.path = makeSvg("path", { fill: "none", stroke: "currentColor", "stroke-width": 2.4 });
    this.verdict = makeElement("strong");
    this.reason = makeElement("span", { class: "mpi4dl-plan-small" });
    const sign = makeSvg("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" }, this.path);
    this.box = makeElement("div", { class: "mpi4dl-plan-verdict" }, sign,
      makeElement("div", {}, this.verdict, this.reason));
    /** @type {Map<string, GaugeRow>} */
    this.rows = new Map();
    this.list = makeElement("div", { class: "mpi4dl-plan-list" });
    host.append(this.box, this.list);
    for (const name of ["memory", "time", "traffic"]) this.rows.set(name, this.makeRow());
  }

  /** @type {() => GaugeRow} */
  makeRow() {
    /** @type {(tag: "div" | "i", name: string) => HTMLElement} */
    const make = (tag, name) => makeElement(tag, { class: `mpi4dl-plan-${name}` });
    const [label, text, change, note] = ["label", "text", "change", "note"].map((name) => make("div", name));
    const [fill, ghost, limit] = ["fill", "ghost", "limit"].map((name) => make("i", name));
    const bar = makeElement("div", { class: "mpi4dl-plan-bar", "aria-hidden": "true" }, fill, ghost, limit);
    const root = makeElement("div", { class: "mpi4dl-plan-gauge", role: "group" }, label, text, bar, change, note);
    this.list.append(root);
    return { root, label, text, change, note, fill, ghost, limit };
  }

  /**
   * Show the gauges `now` and `before` (lists of gauges). `isStale`: those of now belong to the plan before, since the
   * new one is being predicted or, if it `isInvalid`, cannot be.
   * @type {(now: PlanGauge[], before: PlanGauge[], isStale: boolean, isInvalid?: boolean) => void}
   */
  show(now, before, isStale, isInvalid = false) {
    for (const [name, row] of this.rows) {
      const here = now.find((each) => each.name === name), old = before.find((each) => each.name === name);
      const scaled = scaleGauge(here, isStale ? undefined : old);
      row.root.classList.toggle("mpi4dl-plan-stale", isStale);
      row.label.textContent = here?.label ?? name;
      row.text.textContent = here?.text || (here ? "not known" : "...");
      row.change.textContent = isStale ? (here ? "of the plan before" : "") : describeChange(here, old);
      row.note.textContent = here?.note ?? "";
      row.note.title = here?.note ?? "";
      row.root.setAttribute("aria-label", [here?.label, here?.text, row.change.textContent, here?.note].join(", "));
      row.fill.dataset.verdict = here?.verdict ?? "";
      this.setWidth(row.fill, scaled.value);
      this.setWidth(row.ghost, scaled.before);
      row.limit.hidden = scaled.limit === null;
      row.limit.style.left = `calc(${(scaled.limit ?? 0) * 100}% - 2px)`;
    }
    this.showVerdict(now.find((each) => each.name === "memory"), isStale, isInvalid);
  }

  /** @type {(part: HTMLElement, share: number | null) => void} */
  setWidth(part, share) {
    part.hidden = share === null;
    part.style.width = `${(share ?? 0) * 100}%`;
  }

  /** @type {(memory: PlanGauge | undefined, isStale: boolean, isInvalid: boolean) => void} */
  showVerdict(memory, isStale, isInvalid) {
    const known = isStale ? "" : memory?.verdict ?? "";
    this.box.dataset.verdict = known;
    this.path.setAttribute("d", SIGNS[known]);
    this.verdict.textContent = known ? `${known[0].toUpperCase()}${known.slice(1)}`
      : isInvalid ? "No valid plan" : isStale || !memory ? "Predicting ..." : "No limit known";
    this.reason.textContent = memory && known ? memory.reason : isInvalid ? "the numbers are of the plan before"
      : memory && !isStale ? memory.note : "whether the ranks fit";
    this.reason.title = this.reason.textContent;
  }
}
