// Types of a timeline: what the kernel tells of a step (mpi4dl_nb/draw/timeline_rows.py), and how it is shown.

/** The words of a step; columns of its events refer to them by place. */
interface TimelineWords {
  looks: Look[];
  wait: number; // the look of waiting
  row_looks: number[]; // of a rank's shares
  names: string[];
  layers: string[]; // of each name
  kinds: string[];
  work: boolean[]; // of each kind: whether it is work
  phases: string[];
  letters: string[]; // of each phase
  counts: number[]; // of events: measured ones and, if there are some, predicted ones
  seconds: number[];
  titles: string[];
  rows: { rank: number; roles: string; shares: number[] }[];
  shares: (Look & { kind: string; share: number })[];
}

interface TimelineValues extends PageValues {
  words: TimelineWords;
  columns: Bytes;
  serial: number;
  selected: number;
  rank: number;
}

/** The events of a step, column by column: the measured ones first. Times are in seconds of the step. */
interface EventColumns {
  start: Float64Array;
  end: Float64Array;
  wait: Float64Array;
  bytes: Float64Array;
  row: Int32Array;
  look: Int32Array;
  name: Int32Array;
  kind: Int32Array;
  phase: Int32Array;
  microBatch: Int32Array;
  place: Int32Array;
}

interface TimelineEvents extends EventColumns {
  count: number;
  measured: number;
}

/** Spans in order of their starts; `latest` is the latest end so far. */
interface Spans {
  start: ArrayLike<number>;
  end: ArrayLike<number>;
  latest: ArrayLike<number>;
}

/** The bars of a lane. */
interface Lane extends Spans {
  look: Uint8Array;
  event: Int32Array;
}

/** Bars of a lane before they are complete. */
interface OpenLane {
  start: number[];
  end: number[];
  look: number[];
  event: number[];
}

/** Consecutive bars of one label. */
interface Runs {
  start: number[];
  end: number[];
  latest: number[];
  label: string[];
}

/** Visible boxes of a lane, five numbers each: left, right, look, bar (-1: several), whether a search has found it. */
type LaneBoxes = number[];

/** A part of a step, in seconds. */
interface TimeSpan {
  start: number;
  end: number;
}

interface TimelineLayout {
  rows: number;
  left: number;
  right: number;
  ruler: number;
  lanes: { top: number; height: number }[];
  rowHeight: number;
  content: number;
  width: number;
  small: boolean;
  plot: number;
  height: number;
}

/** A lane of a visible row: where it is in the row, its boxes, and the strip of its thin ones (-1: there are none). */
interface DrawnLane {
  top: number;
  height: number;
  boxes: LaneBoxes;
  strip: number;
}

interface DrawnRow {
  row: number;
  top: number;
  lanes: DrawnLane[];
}

/** Fills by look: with texture, and plain ones. */
type LookFills = [Style[], string[]];

/** A scene with what it is drawn with. */
type DrawnScene = TimelineScene & {
  textures: Textures;
  strips: Strips;
  theme: Theme;
  pixelRatio: number;
  fills: LookFills;
};

/** Who shows a timeline, for the pointer. */
interface TimelineHost {
  scene: TimelineScene;
  show(span: TimeSpan, smooth?: boolean): void;
  hover(x: number, y: number): void;
  press(x: number, y: number): void;
  leave(): void;
  redraw(): void;
}

/** What a key does: a span to show, an event to select, or something else. */
interface KeyAct {
  span?: TimeSpan;
  event?: number;
  action?: "search" | "clear";
}

/** What a press on the overview moves. */
type WindowHandle = "start" | "end" | "both" | "jump";

interface TimelineActions {
  zoomOut(): void;
  zoomIn(): void;
  showAll(): void;
  goBack(): void;
  goOn(): void;
}

/** The elements of a timeline, by name. */
interface TimelineParts {
  title: HTMLElement;
  shares: HTMLElement;
  search: HTMLInputElement;
  steppers: HTMLButtonElement[];
  count: HTMLElement;
  shown: HTMLElement;
  canvas: HTMLCanvasElement;
  marks: HTMLCanvasElement;
  overview: HTMLCanvasElement;
  leftOut: HTMLElement;
  status: HTMLElement;
  legend: HTMLElement;
  tools: HTMLElement;
  stack: HTMLElement;
  room: HTMLElement;
}

type Strips = import("./strips.js").Strips;
type TimelineScene = import("./timeline_scene.js").TimelineScene;
