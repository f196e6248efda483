// Types of a debugged step: what the kernel tells (mpi4dl_nb/draw/step_frame.py, mpi4dl_nb/widgets/step_scene.py), and where
// it is drawn.

/** Which of the values of a frame something has; null if they are not kept. */
type ValuesPlace = number | null;

/** What is known of a step before it runs. */
interface StepSetup {
  boxes: StepBox[];
  ranks: { box: number; row: number; col: number; role: string }[];
  schedule: { name: string; length: number; lanes: [number, number, string, number][][] }; // start, stop, text, look
  looks: Look[];
  ends: number[]; // instructions of each rank
  size: Pair; // rows and columns of the image
  saved: boolean;
}

/** A stage of a replica, with its ranks arranged as its tiles are. */
interface StepBox {
  title: string;
  rows: number;
  cols: number;
  replica: number;
}

/** All ranks after an advance. Frames of one step have its name `step`, and are in the order of `number`. */
interface FrameMeta {
  step: string;
  number: number;
  title: string;
  merged: string;
  done: boolean;
  total: number;
  ranks: RankState[];
  groups: PanelGroup[];
  empty: Record<number, string>;
  messages: StepMessage[];
  sums: StepSum[];
  dropped?: number[];
  note?: string;
}

interface RankState {
  did: string;
  didWords: string;
  next: string;
  nextWords: string;
  work: string;
  kind: string;
  phase: string;
  moved: boolean;
  waits: number[];
  time: number;
  done: number;
  memory: string;
}

/** Ranks that show parts of one value, whose `size` is [rows, columns] if it has some. */
interface PanelGroup {
  title: string[];
  gradient: boolean;
  span: Pair;
  size: number[];
  panels: RankPanel[];
}

interface RankPanel {
  rank: number;
  held: Rectangle;
  own: Rectangle;
  square: boolean;
  blockPx: Pair;
  values: ValuesPlace;
}

interface StepMessage {
  source: number;
  target: number;
  tile: Rectangle;
  back: boolean;
  words: string[];
  names: string[];
  before: ValuesPlace;
  arrived: ValuesPlace;
  after: ValuesPlace;
}

interface StepSum {
  group: number[];
  starts: boolean;
  waits: boolean;
  words: string;
  count: number;
  terms: SumTerm[];
}

interface SumTerm {
  rank: number;
  before: ValuesPlace;
  after: ValuesPlace;
}

/** What makes the ranks go on: a key, the name of its button, and what it does. */
type StepRun = [string, string, string];

interface StepperValues extends PageValues {
  setup: StepSetup;
  palettes: Bytes;
  meta: FrameMeta | { ranks?: undefined; number?: undefined };
  values: Bytes;
  focus: number;
  alt: string;
  runs: StepRun[];
  accepts: string[];
  trouble: string;
}

/** What the kernel sends: the newest frame, all recorded ones, or what has become of a question. */
interface StepperContent {
  frame?: FrameMeta;
  history?: FrameMeta[];
  refused?: string;
  answered?: number;
}

interface StepFrame {
  meta: FrameMeta;
  values: FrameValues[];
}

interface FrameValues {
  numbers: Float32Array;
  high: number;
  wide: number;
}

/** Cells of a strip that are shown, see `cutStrip`. */
interface StripCells {
  along: string;
  first: number;
  from: number;
  count: number;
  rows: number[][];
}

/** Where the boxes of stages and the cells of ranks are. */
interface StepLayout {
  high: number;
  boxes: Rectangle[];
  cells: Rectangle[];
}

/** Where what a rank holds is drawn, at `scale` px for a pixel, down and across. */
interface TilePlace {
  rectangle: Rectangle;
  scale: Pair;
  panel: Pick<RankPanel, "held">;
}

interface PanelPlace extends TilePlace {
  group: PanelGroup;
  panel: RankPanel;
}

/** By rank; ranks that show no values have none. */
type PanelPlaces = (PanelPlace | undefined)[];

/** A pixel of what a rank holds. */
interface StepPixel {
  rank: number;
  row: number;
  col: number;
}

/** How far a strip has come, each from 0 to 1. */
interface Flight {
  lift: number;
  travel: number;
  landed: boolean;
  glow: number;
}

interface StripPictures {
  arrived: OffscreenCanvas | null;
  before: OffscreenCanvas | null;
}

/** Colours of the theme, and those of marks on values. */
interface StepLook extends Theme {
  tint: string;
  padding: string;
  hatch: string;
}

interface PlayerActs {
  show(index: number, moves: boolean): void;
  ask(key: string, asked: number): void;
  tell(): void;
}

type KeyActions = Record<string, () => void>;
type FrameStore = import("./step_frames.js").FrameStore;
type StepPlayer = import("./step_player.js").StepPlayer;
type StepControls = import("./step_controls.js").StepControls;
type StepTable = import("./step_table.js").StepTable;
type MessageStrips = import("./message_strips.js").MessageStrips;

/** The cells of a rank's row in the table. */
interface RankRow {
  row: HTMLElement;
  lane: HTMLElement;
  marker: HTMLElement;
  did: HTMLElement;
  next: HTMLElement;
  memory: HTMLElement;
}

/** The elements of a debugged step by name, see `makeStepParts`. */
interface StepParts {
  canvas: HTMLCanvasElement;
  caption: HTMLElement;
  words: HTMLElement;
  status: HTMLElement;
  stage: HTMLElement;
  scene: HTMLElement;
  root: HTMLElement;
}
