// Types of the slicer: what the kernel tells (mpi4dl_nb/widgets/slicer_view.py, mpi4dl_nb/draw/layer_tables.py), the view.

/** A layer. Without a model it has no `operator`. */
interface LayerFacts {
  title: string;
  name: string;
  operator: string;
  stage: number;
  ranks: number[]; // by tile
  looks: number[]; // by tile: which of the colours it has
  sizes: number[]; // of what it reads
  out_sizes: number[]; // none if its output has no rows and columns
  pixel_bytes: number;
  moves: string[];
  computed: boolean;
  reach: boolean;
  words: string[][]; // by tile
}

/** A layer in a section: sizes as rows and columns, also those of the `whole` picture. */
interface SectionLayerFacts extends LayerFacts {
  rows: number;
  columns: number;
  out_rows: number;
  out_columns: number;
  whole: Pair;
}

/** A section: numbers of the axes that are drawn down and to the right, and of the others; the names of the former. */
interface SectionFacts {
  axes: number[];
  across: number[];
  names: string[];
  scene: Pair; // rows and columns as which it is drawn
}

/** The tables of a layer, of which those of tiles and of pieces are boxes; `fields` are of each axis. */
interface LayerNumbers {
  owned: Int32Array;
  windows: Int32Array;
  sources: Int32Array;
  targets: Int32Array;
  pieces: Int32Array;
  seen: Int32Array;
  fields: Int32Array[];
}

/** A layer of the model in the strip; `points` are the numbers of those in which tiles borrow. */
interface NetLayer {
  name: string;
  sizes: number[];
  channels: number;
  stage: number;
  tiles: number;
  points: number[];
}

/** Where a layer's bar is in the strip, in px. */
interface NetBar {
  x: number;
  middle: number;
  slot: number;
  width: number;
  height: number;
}

interface PictureFacts {
  name: string;
  sizes: number[];
  axes: string[]; // their names
  span: Pair | null; // of a volume: the numbers that are black and white
  levels: number;
  finest?: number; // in a saved page: the finest level that it has
  microns: number | null; // of a pixel
  saved: boolean;
}

interface ClassColour {
  text: string;
  colour: string;
}

interface SlicerFacts {
  picture: PictureFacts;
  layers: LayerFacts[];
  bytes: number; // of the tables of all layers
  net: NetLayer[];
  remarks: Record<string, string[][]>; // by stage, then by tile
  colours: string[];
  sections: SectionFacts[];
  prediction: { classes: ClassColour[]; edges: Rectangle } | null;
}

interface SlicerValues extends PageValues {
  facts: SlicerFacts;
  numbers: Bytes;
  preview: Bytes;
  overlay: Bytes;
  overlaid: boolean;
  layer: number;
  tile: number;
  reading: Reading;
  fields: boolean;
  place: number[];
  picked: number[];
  position: number[];
  large: number;
}

/** What the kernel sends: image files, of the whole picture or of tiles, or why the tiles cannot be read. */
interface SlicerContent {
  pictures?: boolean;
  tiles?: TissueKey[];
  trouble?: string;
}

/** Whether the halo at one layer is shown, or all that outputs read of the picture. */
type Reading = "layer" | "picture";

/** A tile of the pyramid: [level, row, column]. */
type PyramidTile = [number, number, number];
/** A section of a volume: [its number, position]. */
type SectionKey = [number, number];
type TissueKey = PyramidTile | SectionKey;
type TileImage = ImageBitmap;

/** What a tile borrows: numbers of tiles, and the rectangle; `text` is the message that brings it. */
interface BorrowedPiece {
  source: number;
  target: number;
  rectangle: Rectangle;
  text?: string;
}

/** A borrowed rectangle in pixels of the picture. */
interface HaloPiece {
  source: number;
  rectangle: Rectangle;
}

/** A borrowed rectangle on the screen; `enlarged` is by how much it is drawn thicker than it is. */
interface ScreenPiece {
  edges: Rectangle;
  enlarged: number;
}

/** screen = scene * scale + offset, for both axes. */
interface Transform {
  scale: number;
  x: number;
  y: number;
}

/** What painters need of a scene, once it has a transform. */
interface SceneView {
  transform: Transform;
  view: Pair;
  ratio: number;
  size: Pair;
  ground: string;
}

/** Who decides what is on a scene, and what is done there. Points (x, y) are those of the scene. */
interface SceneOwner {
  paint(context: Context, scene: Scene): void;
  describe(x: number, y: number): string[];
  pick(x: number, y: number): void;
  press(key: string): boolean;
  getPixel(): Pair;
  leave(): void;
  settle(): void;
}

/** The slicer as its sections know it: what is shown of which layer, and what is done with a click or a key. */
interface SectionOwner {
  model: Model<SlicerValues, SlicerContent>;
  facts: SlicerFacts;
  layer: { facts: LayerFacts; numbers: LayerNumbers };
  tile: number;
  reading: Reading;
  position: number[];
  large: SectionView;
  isVolume: boolean;
  cache: TileCache;
  preview?: TileImage;
  overlay?: TileImage;
  volume?: VolumeTissue;
  set<Name extends keyof SlicerValues>(name: Name, value: SlicerValues[Name]): void;
  moveTo(position: number[]): void;
  press(key: string, section: SectionView): boolean;
  leave(): void;
  sayLater(word: () => string): void;
}

/** A place of the picture: its pixel and that pixel's colours, the layer's pixel, and that of the layer's output. */
interface PointedPlace {
  at: number[];
  values: number[] | null;
  grey?: number | null;
  names: string[];
  pixel: Pair;
  out: Pair;
}

type PixelColours = (row: number, column: number) => [number, number, number] | null;
type LayerTable = import("./layer_table.js").LayerTable;
type SectionView = import("./section_view.js").SectionView;
type VolumeTissue = import("./volume_tissue.js").VolumeTissue;
type Scene = import("./scene.js").Scene;
type TileCache = import("./pyramid.js").TileCache;
