// What the ranks show, in words with a scale of colours, and the colours of the page's theme.
import { LIGHT, makeElement, readColours } from "../shared/elements.js";
import { formatNumber } from "./step_frames.js";

/** Return a line about a group of ranks that show parts of one value: its name, its size and its colours.
 * @type {(group: PanelGroup, palettes: Uint8Array[]) => Element} */
export function makeCaption({ title, span, gradient, panels }, palettes) {
  const palette = palettes[Number(gradient)];
  const stops = [0, 64, 128, 192, 255].map((at) => `rgb(${palette.slice(4 * at, 4 * at + 3).join(" ")})`);
  const style = `background: linear-gradient(90deg, ${stops.join(", ")})`;
  const bar = makeElement("span", { class: "mpi4dl-scale", "aria-hidden": "true", style });
  const scale = makeElement("span", { class: "mpi4dl-nowrap" }, formatNumber(span[0]), bar, formatNumber(span[1]));
  const ranks = panels.map((each) => each.rank);
  const few = ranks.length < 9 ? ranks.join(", ") : `${ranks[0]} … ${ranks.at(-1)}`;
  const who = makeElement("span", { class: "mpi4dl-faint", text: `${ranks.length > 1 ? "ranks" : "rank"} ${few} ` });
  const words = ` ${title.slice(1).join(", ")}`;
  const text = makeElement("span", { class: "mpi4dl-step-words", title: `${who.textContent}${title[0]}${words}` },
    who, makeElement("b", { text: title[0] }), words);
  return makeElement("div", {}, text, scale);
}

// What a rank borrows lies on values of any colour, not on the paper.
const MARKS = { tint: "rgb(255 255 255 / 32%)", padding: "rgb(190 190 190 / 75%)", hatch: "rgb(0 0 0 / 60%)" };

/** The colours until `element` is in the page. */
export const LIGHT_LOOK = { ...LIGHT, ...MARKS };

/** Return the colours of the theme in which `element` is shown, light or dark.
 * @type {(element: Element) => StepLook} */
export function readLook(element) {
  return { ...readColours(element), ...MARKS };
}
