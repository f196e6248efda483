// The controls of a plan: six in view, all others folded into groups. What a user sets is sent at once, and a control
// that is in use is not overwritten by an older answer.

import { makeElement } from "../shared/elements.js";

/** Return the position on a slider of `steps` that is nearest to a value. */
export function findStep(steps, value) {
  let best = 0;
  steps.forEach((step, index) => { if (Math.abs(step - value) < Math.abs(steps[best] - value)) best = index; });
  return best;
}

/** Return the values of a slider of an option: its steps, or all whole numbers from its least to its greatest. */
export function listSteps(option) {
  if (option.steps) return option.steps;
  const low = option.low ?? 1, high = option.high ?? 16;
  return Array.from({ length: high - low + 1 }, (_, index) => low + index);
}

/** All controls in `host`; `send(values)` sends what was set, by name. */
export class PlanControls {
  constructor(host, options, send) {
    this.setters = new Map();
    this.rows = new Map();
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

  getGroup(host, name) {
    if (!this.groups.has(name)) {
      const summary = makeElement("summary", { text: name });
      const details = makeElement("details", {}, summary);
      this.groups.set(name, { details, summary });
      host.append(details);
    }
    return this.groups.get(name).details;
  }

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

  makeSlider(option, id) {
    let steps = listSteps(option);
    const slider = makeElement("input", { type: "range", id, min: 0, max: steps.length - 1, step: 1 });
    const box = makeElement("input", { type: "number", min: option.low ?? 1, "aria-label": `${option.label}, exact` });
    slider.addEventListener("input", () => {
      box.value = steps[slider.value];
      slider.setAttribute("aria-valuetext", box.value);
      this.send({ [option.name]: String(steps[slider.value]) });
    });
    box.addEventListener("change", () => this.send({ [option.name]: box.value }));
    this.setters.set(option.name, (text) => {
      const number = Number(text);
      if (Number.isFinite(number) && number > steps.at(-1) && !option.steps) {
        steps = listSteps({ ...option, high: Math.min(number, 512) });
        slider.max = steps.length - 1;
      }
      box.value = text;
      slider.value = findStep(steps, number);
      slider.setAttribute("aria-valuetext", text);
    });
    return [slider, box];
  }

  makeGrid(option, id) {
    const make = (name, own) => makeElement("input", {
      type: "range", min: 1, max: 16, step: 1, "aria-label": `${option.label}, ${name}`, ...(own ? { id: own } : {}) });
    const sides = [make("rows", id), make("columns")];
    const told = makeElement("output", {}, "");
    const tell = () => { told.textContent = `${sides[0].value} x ${sides[1].value}`; };
    for (const side of sides) {
      side.addEventListener("input", () => { tell(); this.send({ grid: sides.map((each) => Number(each.value)) }); });
    }
    this.setters.set(option.name, (grid) => {
      sides.forEach((side, at) => { side.max = Math.max(16, grid[at]); side.value = grid[at]; });
      tell();
    });
    return [...sides, told];
  }

  makeMenu(option, id) {
    const choices = option.choices.map((text) => makeElement("option", { value: text, text }));
    const menu = makeElement("select", { id }, ...choices);
    menu.addEventListener("change", () => this.send({ [option.name]: menu.value }));
    this.setters.set(option.name, (text) => { menu.value = text; });
    return [menu];
  }

  makeSwitch(option, id) {
    const box = makeElement("input", { type: "checkbox", id });
    box.addEventListener("change", () => this.send({ [option.name]: box.checked }));
    this.setters.set(option.name, (value) => { box.checked = value; });
    return [box];
  }

  makeText(option, id) {
    const list = makeElement("datalist", { id: `${id}-list` },
      ...option.choices.map((value) => makeElement("option", { value })));
    const box = makeElement("input", { type: option.kind, id, list: list.children.length ? list.id : undefined });
    box.addEventListener("change", () => this.send({ [option.name]: box.value }));
    box.append(list);
    this.setters.set(option.name, (text) => { box.value = text; });
    return list.children.length ? [box, list] : [box];
  }

  /** Show the values that the kernel has, by name. */
  showValues(values) {
    for (const [name, value] of Object.entries(values)) {
      const { inputs } = this.rows.get(name) ?? {};
      const isTyped = inputs?.some((input) => input === document.activeElement && input.dataset.typed);
      if (inputs && !isTyped) this.setters.get(name)(value);
    }
  }

  /** Lock controls, by name, for the reason given: of a saved page, which has not all plans. */
  lock(locked) {
    for (const [name, { row, inputs, option }] of this.rows) {
      const reason = locked[name];
      row.title = reason ? `${option.help}. ${reason}` : option.help;
      row.classList.toggle("mpi4dl-plan-locked", Boolean(reason));
      for (const input of inputs) input.disabled = Boolean(reason);
    }
  }

  /** Show the errors by the name of the control that causes each, in the place that is kept free for them. */
  showErrors(errors) {
    const found = Object.entries(errors);
    const words = found.map(([, text]) => `⚠ ${text}`);
    if (this.alert.textContent !== words.join(" ")) this.alert.textContent = words.join(" ");
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
