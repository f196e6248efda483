// Types of a saved page: what is packed into it (mpi4dl_nb/widgets/saved_page.py), and what stands for the kernel.

/** What the kernel would have sent: the content of a message, and its buffers. */
type Answer = [object, Bytes[]];

/** Answers by the name of a message, and then by what it asks for, as JSON. */
type Answers = Record<string, Record<string, Answer>>;

interface PackedView {
  values: SavedValues;
  answers: Answers;
  code: number;
}

/** A part of a page as it is packed. */
interface PackedPart {
  views: PackedView[];
  links: ViewLinks;
}

/** How the views of one widget follow each other, see saved_links.js. */
interface ViewLinks {
  same?: [number, string][][];
  selection?: SelectionLinks;
  plans?: PlanRow[];
}

interface SelectionLinks {
  timed: boolean;
  ranks: number[][];
  layers: number[];
  pictures: [Bytes, string, string][];
}

/** What a configurator shows of one plan, see saved_plans.js. */
interface PlanRow {
  values: PlanSettings;
  shape: PlanShape;
  blocks: Bytes;
  loads: PlanLoads;
  rank_groups: Bytes;
  gauges: PlanGaugeSet;
}

/** Values of a view in a saved page by name: those that views of a page share or that stand for a kernel's answer. */
interface SavedValues extends PlanPageValues {
  [name: string]: unknown;
  unavailable: string;
  layer: number; // of a slicer
  tile: number;
  rank: number; // of a timeline
  selected: number;
}

/** A message to the kernel: what it asks for by name, and by which number the page knows the answer. */
type SavedMessage = Record<string, unknown> & { asked?: number };
type MessageHandler = (value: unknown) => void;
type SavedModel = import("./saved_model.js").SavedModel;

/** A module of a view, of which several stand in the script of a page as functions that return them. */
interface ViewModule {
  render(room: { model: SavedModel; el: HTMLElement }): unknown;
}
type MakeView = () => ViewModule;
