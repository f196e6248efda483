// Types of the configurator: what the kernel tells of a plan (mpi4dl_nb/widgets/plan_view.py), and its picture.

/** A control, as `describe_options` describes it. */
interface PlanOption {
  name: string;
  label: string;
  mpi: string;
  kind: "steps" | "range" | "grid" | "menu" | "switch" | "text" | "number";
  axes?: string[];
  group: string;
  help: string;
  steps?: number[];
  low?: number | null;
  high?: number;
  choices?: string[];
}

/** What a control is set to: text, a switch, or the parts of a grid along each axis. */
type PlanValue = string | boolean | number[];
type PlanSettings = Record<string, PlanValue>;

/** What each rank of a plan is for, without its blocks; empty until there is a plan. `plan` is its number. */
interface PlanShape {
  plan: number;
  summary: string;
  image: string;
  size: Pair;
  facts: [string, string][];
  stages: PlanStage[];
  copies: string[];
  left_out: string;
}

interface PlanStage {
  name: string;
  words: string;
  cols: number;
  spatial: boolean;
  shared: boolean;
}

/** What ranks of one load hold: a level of memory with its word, and the share of the fullest rank's memory. */
interface PlanLoad {
  level: number;
  word: string;
  share: number;
  lines: string[];
}

interface PlanLoads {
  plan: number;
  groups: PlanLoad[];
}

interface PlanGauge {
  name: string;
  label: string;
  value: number | null;
  text: string;
  limit: number | null;
  verdict: "fits" | "does not fit" | "";
  note: string;
  reason: string;
}

/** What a gauge's bar is drawn from. */
type GaugeNumbers = Partial<Pick<PlanGauge, "value" | "limit">>;

interface PlanGaugeSet {
  plan: number;
  now: PlanGauge[];
  before: PlanGauge[];
}

interface PlanStart {
  label: string;
  disabled: boolean;
  reason: string;
  place: string;
  note: string;
  trouble: string;
}

/** Values of the configurator's model. `locked` is in saved pages only: why a control cannot be set. */
interface PlanPageValues extends PageValues {
  options: PlanOption[];
  values: PlanSettings;
  errors: Record<string, string>;
  shape: Partial<PlanShape>;
  blocks: Bytes;
  loads: Partial<PlanLoads>;
  rank_groups: Bytes;
  gauges: Partial<PlanGaugeSet>;
  status: { words?: string };
  start: Partial<PlanStart>;
  locked?: Record<string, string>;
}

/** What the kernel sends: by its number, the message that it has taken over. */
interface PlanContent {
  answered?: number;
}

/**
 * A rank's part in a stage, and its part of the image: `spans` has the first position along each axis and then the last
 * one + 1 along each, `sides` are those in the picture of all tiles.
 */
interface PlanBlock {
  stage: number;
  tile: number;
  rank: number;
  spans: number[];
  sides: Rectangle;
}

/** The blocks of all copies of the model, column by column. */
type BlockColumns = Record<"copy" | Exclude<keyof PlanBlock, "sides">, Int32Array> & { sides: Float64Array };

type Polygon = Pair[];

interface BlockFaces {
  left: Polygon;
  top: Polygon;
  front: Polygon;
}

/** A block in the scene: its faces, the width and height of its front, and where flows arrive and leave. */
interface PlanBox {
  block: PlanBlock;
  faces: BlockFaces;
  span: Pair;
  into: Pair;
  out: Pair;
  row: number;
  column: number;
}

/** A copy of the model in units of an image's longer side. `flows` are the ends of lines, by the stage they lead to. */
interface PlanScene {
  boxes: PlanBox[];
  sheets: { number: number; d: number; foot: Pair }[];
  image: Polygon;
  cuts: Polygon[];
  foot: Pair;
  flows: [Pair, Pair][][];
  gap: number;
}

/** The elements of a gauge, by name. */
interface GaugeRow {
  root: HTMLElement;
  label: HTMLElement;
  text: HTMLElement;
  change: HTMLElement;
  note: HTMLElement;
  fill: HTMLElement;
  ghost: HTMLElement;
  limit: HTMLElement;
}

/** The row of a control, with its inputs. */
interface ControlRow {
  row: HTMLElement;
  inputs: ControlInput[];
  option: PlanOption;
}

type ControlInput = HTMLElement & { disabled?: boolean };

/** The columns of the configurator. */
interface PlanParts {
  left: HTMLElement;
  facts: HTMLElement;
  copies: HTMLSelectElement;
  doing: HTMLElement;
  picture: HTMLElement;
  legend: HTMLElement;
  status: HTMLElement;
  gauges: HTMLElement;
  button: HTMLButtonElement;
  place: HTMLElement;
  reason: HTMLElement;
  root: HTMLElement;
}

type PlanPicture = import("./plan_picture.js").PlanPicture;
