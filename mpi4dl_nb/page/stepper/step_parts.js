// The elements of a debugged step, with their roles and names.
import { makeElement, makeKeyHelp } from "../shared/elements.js";

/**
 * Return the elements by name: `stage` has the `keys`, listed behind "?", `words` describe it, and `status` is read out
 * when it changes.
 * @type {(canvas: HTMLCanvasElement, controls: StepControls, strips: MessageStrips, table: StepTable, keys: string[][]) => StepParts}
 */
export function makeStepParts(canvas, controls, strips, table, keys) {
  const caption = makeElement("div", { class: "mpi4dl-step-caption" });
  const id = `mpi4dl-${Math.random().toString(36).slice(2)}`;
  const words = makeElement("div", { class: "mpi4dl-hidden mpi4dl-words", id });
  const status = makeElement("div", { class: "mpi4dl-hidden", role: "status", "aria-live": "polite" });
  const stage = makeElement("div", {
    class: "mpi4dl-stage", tabindex: "0", role: "application", "aria-label": "Ranks of the debugged step",
    "aria-describedby": id, "data-lm-suppress-shortcuts": "true",
  }, canvas);
  const scene = makeElement("div", { class: "mpi4dl-step-scene" }, stage, strips.element);
  const leftOut = makeElement("p", { class: "mpi4dl-left-out" },
    "This view is too narrow for the numbers of a message, the schedule and the memory of the ranks",
    makeElement("span", { class: "mpi4dl-narrowest", text: ", and what they do next" }), ".");
  const root = makeElement("div", { class: "mpi4dl-page mpi4dl-stepper" },
    controls.element, caption, scene, leftOut, table.element, words, status);
  controls.bar.append(makeKeyHelp(stage, keys));
  return { canvas, caption, words, status, stage, scene, root };
}
