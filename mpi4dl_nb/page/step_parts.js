// The elements of a debugged step, with their roles and names.
import { makeElement } from "./elements.js";

/** Return the elements by name: `stage` has the keys, `words` describe it, and `status` is read out when it changes. */
export function makeStepParts(controls, strips, table, tip) {
  const canvas = makeElement("canvas", { "aria-hidden": "true" });
  const caption = makeElement("div", { class: "mpi4dl-step-caption" });
  const id = `mpi4dl-${Math.random().toString(36).slice(2)}`;
  const words = makeElement("div", { class: "mpi4dl-hidden mpi4dl-words", id });
  const status = makeElement("div", { class: "mpi4dl-hidden", role: "status", "aria-live": "polite" });
  const stage = makeElement("div", {
    class: "mpi4dl-stage", tabindex: "0", role: "application", "aria-label": "Ranks of the debugged step",
    "aria-describedby": id, "data-lm-suppress-shortcuts": "true",
  }, canvas);
  const scene = makeElement("div", { class: "mpi4dl-step-scene" }, stage, strips.element);
  const keys = makeElement("details", { class: "mpi4dl-faint" },
    makeElement("summary", { text: "Keys" }), makeElement("p", { text: `${tip}. Shift and an arrow: the values.` }));
  const root = makeElement("div", { class: "mpi4dl-page mpi4dl-stepper" },
    controls.element, caption, scene, table.element, keys, words, status);
  return { canvas, caption, words, status, stage, scene, root };
}
