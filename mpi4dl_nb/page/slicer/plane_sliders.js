// The sliders through a volume, one for each axis, and beside each the button that makes its view the large one.

import { makeButton, makeElement, setText } from "../shared/elements.js";

/** Controls of the position through which all sections of a volume go. */
export class PlaneSliders {
  /** @param {SlicerFacts} facts
   * @param {(position: number[]) => void} move
   * @param {(number: number) => void} enlarge */
  constructor({ picture, sections }, move, enlarge) {
    this.sizes = picture.sizes;
    this.sliders = picture.sizes.map((size, axis) => {
      const name = picture.axes[axis].replace(/s$/, "");
      const input = makeElement("input", { type: "range", min: 0, max: size - 1, step: 1, "aria-label": name });
      input.addEventListener("input", () => move(this.sliders.map((slider) => Number(slider.input.value))));
      const number = sections.findIndex(({ across }) => across.includes(axis));
      const large = makeButton(`along ${picture.axes[axis]}`, "make this view the large one: key v", () => enlarge(number));
      const text = makeElement("output", { "aria-hidden": "true" });
      return { input, text, large, number, name };
    });
    const boxes = this.sliders.map(({ input, text, large }) => makeElement("span", {}, large, input, text));
    this.bar = makeElement("div", { class: "mpi4dl-planes", role: "group", "aria-label": "position" }, ...boxes);
  }

  /** Show a position, and which view is the large one.
   * @type {(position: number[], large: number) => void} */
  show(position, large) {
    this.sliders.forEach(({ input, text, large: button, number, name }, axis) => {
      input.value = String(position[axis]);
      input.setAttribute("aria-valuetext", `${name} ${position[axis]} of 0 to ${this.sizes[axis] - 1}`);
      setText(text, `${name} ${position[axis]}`);
      button.setAttribute("aria-pressed", String(number === large));
    });
  }
}
