// The controls of a plan: six in view, all others folded into groups. What a user sets is sent at once, and a control
// that is in use is not overwritten by an older answer.

import { makeElement, setText } from "../shared/elements.js";
import { findNearest } from "../shared/numbers.js";

/** Return the values of a slider of an option: its steps, or all whole numbers from its least to its greatest.
 * @type {(option: Pick<PlanOption, "steps" | "low" | "high">) => number[]} */
export function listSteps(option) {
  if (option.steps) return option.steps;
  const low = option.low ?? 1, high = option.high ?? 16;
  return Array.from({ length: high - low + 1 }, (_, index) => low + index);
}

/** All controls in `host`; `send(values)` sends what was set, by name. */
export class PlanControls {
  /** @param {HTMLElement} host
   * @param {PlanOption[]} options
   * @param {(values: PlanSettings) => void} send */
  constructor(host, options, send) {
    /** @type {Map<string, (value: PlanValue) => void>} */
    this.setters = new Map();
    /** @type {Map<string, ControlRow>} */
    this.rows = new Map();
    /** @type {Map<string, { details: HTMLElement, summary: HTMLElement }>} */
    this.groups = new Map();
    this.send = send;
    const main = makeElement("div", { class: "mpi4dl-plan-main" });
    this.alert = makeElement("div", { class: "mpi4dl-plan-alert", role: "alert", tabindex: "-1" });
    const more = makeElement("div", { class: "mpi4dl-plan-more" });
    host.append(main, this.alert, more);
    for (const option of options) {
      (option.group ? this.getGroup(more, option.group) : main).append(this.makeRow(option));
    }
  }

  /** @type {(host: HTMLElement, name: string) => HTMLElement} */
  getGroup(host, name) {
    const known = this.groups.get(name);
    if (known) return known.details;
    const summary = makeElement("summary", { text: name }), details = makeElement("details", {}, summary);
    this.groups.set(name, { details, summary });
    host.append(details);
    return details;
  }

  /** @type {(option: PlanOption) => HTMLElement} */
  makeRow(option) {
    const id = `mpi4dl-plan-${option.name}-${Math.random().toString(36).slice(2)}`;
    const kinds = { steps: this.makeSlider, range: this.makeSlider, grid: this.makeGrid, menu: this.makeMenu,
      switch: this.makeSwitch, text: this.makeText, number: this.makeText };
    const inputs = kinds[option.kind].call(this, option, id);
    for (const input of inputs) {
      input.dataset.lmSuppressShortcuts = "true";
      input.addEventListener("keydown", (event) => event.stopPropagation());
      if (!input.matches("[type=text], [type=number]")) continue;
      input.addEventListener("input", () => { input.dataset.typed = "true"; });
      input.addEventListener("change", () => delete input.dataset.typed);
    }
    const names = makeElement("div", { class: "mpi4dl-plan-names" },
      makeElement("label", { for: id, text: option.label }),
      option.group ? "" : makeElement("code", { text: option.mpi }));
    const kind = `mpi4dl-plan-row mpi4dl-plan-of-${option.kind}`;
    const row = makeElement("div", { class: kind, title: option.help }, names,
      makeElement("div", { class: "mpi4dl-plan-inputs" }, ...inputs));
    this.rows.set(option.name, { row, inputs, option });
    return row;
  }

  /** @type {(option: PlanOption, id: string) => ControlInput[]} */
  makeSlider(option, id) {
    let steps = listSteps(option);
    const slider = makeElement("input", { type: "range", id, min: 0, max: steps.length - 1, step: 1 });
    const box = makeElement("input", { type: "number", min: option.low ?? 1, "aria-label": `${option.label}, exact` });
    slider.addEventListener("input", () => {
      box.value = String(steps[Number(slider.value)]);
      slider.setAttribute("aria-valuetext", box.value);
      this.send({ [option.name]: box.value });
    });
    box.addEventListener("change", () => this.send({ [option.name]: box.value }));
    this.setters.set(option.name, (text) => {
      const number = Number(text);
      if (Number.isFinite(number) && number > steps[steps.length - 1] && !option.steps) {
        steps = listSteps({ ...option, high: Math.min(number, 512) });
        slider.max = String(steps.length - 1);
      }
      box.value = String(text);
      slider.value = String(findNearest(steps, number));
      slider.setAttribute("aria-valuetext", box.value);
    });
    return [slider, box];
  }

  /** @type {(option: PlanOption, id: string) => ControlInput[]} */
  makeGrid(option, id) {
    const sides = (option.axes ?? []).map((name, axis) => makeElement("input", {
      type: "range", min: 1, max: 16, step: 1, "aria-label": `${option.label}, ${name}`, ...(axis ? {} : { id }) }));
    const told = makeElement("output", {}, "");
    const tell = () => { told.textContent = sides.map(({ value }) => value).join(" × "); };
    for (const side of sides) {
      side.addEventListener("input", () => { tell(); this.send({ grid: sides.map((each) => Number(each.value)) }); });
    }
    this.setters.set(option.name, (grid) => {
      if (!Array.isArray(grid)) return;
      sides.forEach((side, at) => { side.max = String(Math.max(16, grid[at])); side.value = String(grid[at]); });
      tell();
    });
    return [...sides, told];
  }

  /** @type {(option: PlanOption, id: string) => ControlInput[]} */
  makeMenu(option, id) {
    const choices = (option.choices ?? []).map((text) => makeElement("option", { value: text, text }));
    const menu = makeElement("select", { id }, ...choices);
    menu.addEventListener("change", () => this.send({ [option.name]: menu.value }));
    this.setters.set(option.name, (text) => { menu.value = String(text); });
    return [menu];
  }

  /** @type {(option: PlanOption, id: string) => ControlInput[]} */
  makeSwitch(option, id) {
    const box = makeElement("input", { type: "checkbox", id });
    box.addEventListener("change", () => this.send({ [option.name]: box.checked }));
    this.setters.set(option.name, (value) => { box.checked = Boolean(value); });
    return [box];
  }

  /** @type {(option: PlanOption, id: string) => ControlInput[]} */
  makeText(option, id) {
    const list = makeElement("datalist", { id: `${id}-list` },
      ...(option.choices ?? []).map((value) => makeElement("option", { value })));
    const box = makeElement("input", { type: option.kind, id, list: list.children.length ? list.id : undefined });
    box.addEventListener("change", () => this.send({ [option.name]: box.value }));
    box.append(list);
    this.setters.set(option.name, (text) => { box.value = String(text); });
    return list.children.length ? [box, list] : [box];
  }

  /** Show the values that the kernel has, by name.
   * @type {(values: PlanSettings) => void} */
  showValues(values) {
    for (const [name, value] of Object.entries(values)) {
      const isTyped = this.rows.get(name)?.inputs.some(
        (input) => input === document.activeElement && input.dataset.typed);
      if (!isTyped) this.setters.get(name)?.(value);
    }
  }

  /** Lock controls, by name, for the reason given: of a saved page, which has not all plans.
   * @type {(locked: Record<string, string>) => void} */
  lock(locked) {
    for (const [name, { row, inputs, option }] of this.rows) {
      const reason = locked[name];
      row.title = reason ? `${option.help}. ${reason}` : option.help;
      row.classList.toggle("mpi4dl-plan-locked", Boolean(reason));
      for (const input of inputs) input.disabled = Boolean(reason);
    }
  }

  /** Show the errors by the name of the control that causes each, in the place that is kept free for them.
   * @type {(errors: Record<string, string>) => void} */
  showErrors(errors) {
    const found = Object.entries(errors);
    setText(this.alert, found.map(([, text]) => `⚠ ${text}`).join(" "));
    for (const [name, { row, inputs, option }] of this.rows) {
      const covers = option.name === "grid" && ("slice_method" in errors || "num_spatial_parts" in errors);
      const wrong = name in errors || covers;
      row.classList.toggle("mpi4dl-plan-wrong", wrong);
      for (const input of inputs) input.setAttribute("aria-invalid", String(wrong));
    }
    for (const [name, { summary }] of this.groups) {
      const wrong = found.some(([option]) => this.rows.get(option)?.option.group === name);
      summary.textContent = wrong ? `${name} ⚠` : name;
    }
  }
}
