// The words of a slicer: about a tile at a layer, and about the place that is pointed at.

import { makeElement } from "../shared/elements.js";
import { formatBytes, formatExtent, formatMicrons } from "../shared/format.js";

const WHOLE_READING = "Shown: all pixels of the picture that its outputs read through windows. Grey: all others.";
const LAYER_READING = "Tinted in the owner's colour: what it borrows. Grey: what it does not need.";
const FIELDS_WAIT = "Receptive fields wait for a pixel: point at one, or go to one with the arrow keys.";
const NO_FIELDS = "The outputs of this layer are no pixels, and have no receptive fields.";

/** What the pointer and the keys do on the picture. */
const SLICER_KEYS = [
  ["drag", "move the picture"], ["wheel, + −", "zoom"], ["0", "the whole picture"], ["click, t T", "choose a tile"],
  ["pointer, arrows", "from pixel to pixel: who owns it, who borrows it"], ["[ ]", "choose a layer"],
  ["h", "the halo from close by"], ["c", "this layer's halo, or the cumulative one"], ["f", "receptive fields"],
  ["o", "the predicted map"],
];

/** What other keys do where there are several sections. */
const VOLUME_KEYS = [["PageUp PageDown", "to the plane before or behind"], ["v", "make another view the large one"]];

/** Return all keys, each with what it does.
 * @type {(facts: SlicerFacts) => string[][]} */
export function listKeys({ sections }) {
  return sections.length > 1 ? [...SLICER_KEYS, ...VOLUME_KEYS] : SLICER_KEYS;
}

/** Return the line about a layer while no pixel is pointed at, with what receptive fields wait for if they are on.
 * @type {(facts: SectionLayerFacts, fields: boolean) => string} */
export function describeLayer(facts, fields) {
  if (!fields) return `Pixels of ${facts.name}: point at one, or go to one with the arrow keys.`;
  return facts.operator && facts.out_rows ? FIELDS_WAIT : NO_FIELDS;
}

/** Return the lines about a tile at a layer; `remarks` are those on the tiles of each stage.
 * @type {(table: LayerTable, tile: number, reading: Reading, remarks: SlicerFacts["remarks"]) => string[]} */
export function listTileLines(table, tile, reading, remarks) {
  const { facts } = table, shown = reading === "picture" ? WHOLE_READING : LAYER_READING;
  return [...facts.words[tile], ...(facts.operator ? [shown] : []), ...(remarks[facts.stage]?.[tile] ?? [])];
}

/** Return a list of the pieces that a tile borrows, each beside the colour of its owner.
 * @type {(table: LayerTable, tile: number, colours: string[]) => Element} */
export function makePieceList(table, tile, colours) {
  return makeColourList(table.getBorrowed(tile).flatMap(({ source, text }) =>
    text ? [{ text, colour: colours[table.facts.looks[source]] }] : []));
}

/** Return the legend of a predicted map: its classes, each beside its colour.
 * @type {(classes: ClassColour[]) => Element} */
export function makeClassList(classes) {
  return makeElement("div", {}, makeElement("p", { text: "Predicted classes, drawn over the picture:" }), makeColourList(classes));
}

/** @type {(items: ClassColour[]) => Element} */
function makeColourList(items) {
  return makeElement("ul", { class: "mpi4dl-legend" }, ...items.map(({ text, colour }) =>
    makeElement("li", {}, makeElement("span", { class: "chip", style: `background: ${colour}` }), text)));
}

/**
 * Return the lines about a place of the picture. `at` is its pixel there, `values` are its colours if they have come, and
 * `grey` is about which number a volume has. `pixel` is what the layer reads there, and `out` its output: as [row, column]
 * of the section, whose axes have `names`.
 * @type {(picture: Pick<PictureFacts, "microns" | "axes" | "name">, table: LayerTable, place: PointedPlace) => string[]}
 */
export function describePlace({ microns, axes, name }, table, { at, values, grey, names, pixel, out }) {
  const { facts } = table, [row, column] = pixel, owner = table.findOwner(row, column);
  const lengths = microns ? ` (${at.map((each) => formatMicrons(each * microns)).join(", ")})` : "";
  const where = at.map((px, axis) => `${axes[axis].replace(/s$/, "")} ${px.toLocaleString("en")}`).join(", ");
  const lines = [`${axes.length === 2 ? "picture" : name}: ${where}${lengths}`];
  if (typeof grey === "number") lines.push(`number: about ${grey.toPrecision(3)}`);
  if (values) lines.push(`red, green, blue: ${values.join(", ")}`);
  if (facts.operator) lines.push(`layer: ${names[0]} ${row}, ${names[1]} ${column}`);
  lines.push(`owner: tile ${owner}, rank ${facts.ranks[owner]}`, ...describeBorrowers(table, row, column));
  if (facts.operator && facts.out_rows) {
    const [top, left, bottom, right] = table.getField(...out);
    const view = axes.length > 2 ? " of this view" : "";
    lines.push(`the output here depends on ${formatExtent(bottom - top, right - left, microns)}${view}`);
  }
  return lines;
}

/** @type {(table: LayerTable, row: number, column: number) => string[]} */
function describeBorrowers(table, row, column) {
  const { facts } = table, ranks = table.findBorrowers(row, column).map((tile) => facts.ranks[tile]);
  if (!ranks.length) return facts.operator ? ["no tile borrows it"] : [];
  const several = ranks.length > 1, who = `rank${several ? "s" : ""} ${ranks.join(", ")}`;
  if (facts.computed) return [`computed again by ${who}`];
  return [`borrowed by ${who}: ${formatBytes(facts.pixel_bytes)}${several ? " each" : ""}`];
}
