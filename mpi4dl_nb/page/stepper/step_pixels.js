// The value of one pixel of a rank in words, and the way from pixel to pixel by keyboard.
import { clamp } from "../shared/numbers.js";
import { isInside } from "../shared/rectangles.js";
import { formatNumber, readValues } from "./step_frames.js";

/** Return lines of text about pixel { rank, row, col } of a frame, where `place` is what its rank shows.
 * @type {(frame: StepFrame, place: PanelPlace, pixel: StepPixel) => string[]} */
export function describePixel(frame, { panel, group }, { rank, row, col }) {
  const values = readValues(frame, panel.values), [high, wide] = panel.blockPx;
  const at = [(row - panel.held[0]) / high, (col - panel.held[1]) / wide].map(Math.floor);
  const number = values ? formatNumber(values.numbers[at[0] * values.wide + at[1]]) : "not kept";
  const lands = frame.meta.messages.find((each) => each.target === rank && isInside(each.tile, row, col));
  return [
    `rank ${rank}, row ${row}, column ${col}`,
    `${group.gradient ? "gradient" : "value"} ${number}` + (high * wide > 1 ? `, mean of ${high} × ${wide} px` : ""),
    describeOwner(panel, group, row, col), ...(lands ? [`arrived from rank ${lands.source} now`] : []),
  ];
}

/** @type {(panel: RankPanel, group: PanelGroup, row: number, col: number) => string} */
function describeOwner(panel, group, row, col) {
  if (isInside(panel.own, row, col)) return "own pixel";
  if (group.size.length === 2 && !isInside([0, 0, group.size[0], group.size[1]], row, col)) return "beyond the image: padding";
  const owner = group.panels.find(({ own }) => isInside(own, row, col));
  return owner ? `halo, owned by rank ${owner.rank}` : "halo";
}

/** Return the pixel { rank, row, col } beside another one, which is the middle of the first rank if there is none.
 *
 * At the edge of what a rank holds, the way goes on in the rank that owns the next pixel, if there is one.
 * @type {(placed: PanelPlaces, pixel: StepPixel | null, down: number, across: number) => StepPixel | null}
 */
export function movePixel(placed, pixel, down, across) {
  const place = placed[pixel?.rank ?? placed.findIndex(Boolean)];
  if (!place) return null;
  const { held, rank } = place.panel;
  const from = pixel ?? { row: (held[0] + held[2]) >> 1, col: (held[1] + held[3]) >> 1 };
  const row = from.row + down, col = from.col + across;
  const owner = place.group.panels.find(({ own }) => isInside(own, row, col));
  if (!isInside(held, row, col) && owner) return { rank: owner.rank, row, col };
  return { rank, row: clamp(row, held[0], held[2] - 1), col: clamp(col, held[1], held[3] - 1) };
}
