// A table with a radio button in each row. The arrow keys move the choice, as in any radio group. A summary folds it.

import { followModel, makeRender } from "../shared/view_life.js";

/** @type {(room: Room<ChoiceValues>) => void} */
function showChoices({ model, el, signal }) {
  const fold = document.createElement("details"), summary = document.createElement("summary");
  const table = document.createElement("div");
  table.className = "mpi4dl-choice-table";
  const shape = () => {
    summary.textContent = model.get("summary");
    if (!summary.textContent) el.replaceChildren(table);
    else if (!fold.contains(table)) {
      fold.replaceChildren(summary, table);
      el.replaceChildren(fold);
    }
  };
  const group = `choice-${crypto.randomUUID?.() ?? Math.random()}`;

  /** @type {() => HTMLInputElement[]} */
  const inputs = () => [.../** @type {NodeListOf<HTMLInputElement>} */ (el.querySelectorAll("input[type=radio]"))];
  const mark = () =>
    inputs().forEach((input) => {
      input.checked = input.value === model.get("chosen");
    });
  const show = () => {
    const focused = el.contains(document.activeElement);
    table.innerHTML = model.get("html");
    inputs().forEach((input) => {
      input.name = group;
      input.setAttribute("data-lm-suppress-shortcuts", "true"); // else JupyterLab handles the arrow keys
    });
    mark();
    if (focused) inputs().find((input) => input.checked)?.focus();
  };
  /** @type {(event: Event) => void} */
  const choose = (event) => {
    const { value } = /** @type {HTMLInputElement} */ (event.target);
    model.set("chosen", value);
    model.save_changes();
    model.send({ choose: value }); // at once: the model's state waits until the kernel has the one before
  };
  shape();
  show();
  followModel(model, { "change:summary": shape, "change:html": show, "change:chosen": mark }, signal);
  el.addEventListener("change", choose, { signal });
}

export default { render: makeRender(showChoices) };
