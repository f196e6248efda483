// The browser's own slider, which can have an accessible name and handles all keys.

import { followModel, makeRender } from "../shared/view_life.js";

/** @type {(room: Room<RangeValues>) => void} */
function showBar({ model, el, signal }) {
  const bar = document.createElement("input");
  bar.type = "range";
  bar.style.width = "18em";
  bar.style.accentColor = "var(--jp-brand-color1, #1976d2)";
  bar.setAttribute("data-lm-suppress-shortcuts", "true"); // else JupyterLab handles the arrow keys
  el.append(bar);

  const show = () => {
    bar.min = String(model.get("min")); // limits first, since the browser clamps the value to them
    bar.max = String(model.get("max"));
    bar.value = String(model.get("value"));
    bar.ariaLabel = model.get("label");
    bar.title = model.get("tip");
  };
  show();
  followModel(model, { change: show }, signal);
  bar.addEventListener("change", () => {
    model.set("value", Number(bar.value));
    model.save_changes();
  });
}

export default { render: makeRender(showBar) };
