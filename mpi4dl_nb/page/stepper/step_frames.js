// The frames of a debugged step on the page: what the kernel has sent, oldest first.

import { unpackTables } from "../shared/tables.js";

/** What is shown before the first frame.
 * @type {StepFrame} */
export const NO_FRAME = {
  meta: {
    step: "", number: -1, title: "", merged: "", done: false, total: 0, ranks: [], groups: [], empty: {}, messages: [], sums: [],
  },
  values: [],
};

/** The frames of one step, each `{ meta, values }`; a new step forgets the old one. */
export class FrameStore {
  constructor() {
    /** @type {StepFrame[]} */
    this.frames = [];
    this.note = "";
  }

  /** Add a frame, or replace the one of the same number, and return its index. Forget what `meta.dropped` names.
   * @type {(meta: FrameMeta, buffer: Bytes) => number} */
  add(meta, buffer) {
    if (this.frames.length && this.frames[0].meta.step !== meta.step) this.frames = [];
    const gone = new Set(meta.dropped ?? []);
    this.frames = this.frames.filter((each) => !gone.has(each.meta.number) && each.meta.number !== meta.number);
    this.frames.push({ meta, values: unpackTables(buffer) });
    this.frames.sort((one, other) => one.meta.number - other.meta.number);
    this.note = meta.note ?? this.note;
    return this.frames.findIndex((each) => each.meta.number === meta.number);
  }

  /** The index of the newest frame; -1 if there is none. */
  get last() {
    return this.frames.length - 1;
  }
}

/** Return values of a frame as `{ numbers, high, wide }`; null where `place` is null.
 * @type {(frame: StepFrame, place: ValuesPlace) => FrameValues | null} */
export function readValues(frame, place) {
  return place === null ? null : frame.values[place];
}

/** Kinds of instructions in the order in which one stands for a frame in which ranks did several. */
const KIND_ORDER = ["halo", "stage", "ring", "all-reduce", "update", "compute"];

/** Return `{ kind, phase }` of a frame: of the ranks that went on, the kind that tells most.
 * @type {(meta: Pick<FrameMeta, "ranks">) => { kind: string, phase: string }} */
export function summariseFrame(meta) {
  const moved = meta.ranks.filter((rank) => rank.moved && rank.kind);
  const kind = KIND_ORDER.find((each) => moved.some((rank) => rank.kind === each)) ?? "";
  return { kind, phase: moved.find((rank) => rank.kind === kind)?.phase ?? "" };
}

/** Return the duration of a frame's motion in ms at normal speed: messages and sums travel, other values fade in.
 * @type {(meta: Pick<FrameMeta, "messages" | "sums">) => number} */
export function getDuration(meta) {
  return meta.messages.length || meta.sums.length ? 1100 : 280;
}

/** Return a number in at most three significant digits, such as `0.0123` or `1.2e-5`.
 * @type {(number: number) => string} */
export function formatNumber(number) {
  if (!Number.isFinite(number)) return Number.isNaN(number) ? "NaN" : number > 0 ? "∞" : "−∞";
  const size = Math.abs(number);
  if (!size) return "0";
  const text = size >= 1e-3 && size < 1e4 ? String(Number(number.toPrecision(3))) : number.toExponential(1);
  return text.replace("e+", "e").replaceAll("-", "−");
}
