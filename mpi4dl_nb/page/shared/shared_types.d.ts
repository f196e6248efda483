// Types that the modules of several widgets use. They are known everywhere without an import, and only TypeScript reads
// these files: a page gets none of it.

/** Two numbers: a place [x, y], a size [width, height] or a span [low, high]. */
type Pair = [number, number];

/** The sides of a rectangle, see rectangles.js. */
type Rectangle = [top: number, left: number, bottom: number, right: number];

/** Bytes that the kernel has sent. */
type Bytes = DataView<ArrayBuffer>;

/** An array in the text of packed tables: the kind of its numbers, how many, and where they begin behind the text. */
interface PackedArray {
  packed: string;
  count: number;
  at: number;
}

/** Of two or of four numbers, `map` makes as many. */
interface Array<T> {
  map<Made>(this: [T, T], make: (value: T, index: number) => Made): [Made, Made];
  map<Made>(this: [T, T, T, T], make: (value: T, index: number) => Made): [Made, Made, Made, Made];
}

type Context = CanvasRenderingContext2D;
type OffscreenContext = OffscreenCanvasRenderingContext2D;
type Style = string | CanvasPattern;

/** What `makeElement` sets: `text`, attributes, and with true or false those that have no value. */
type Attributes = Record<string, string | number | boolean | undefined>;
type Child = Node | string;

/** Colours of the theme in which a page is shown, by the names of page.css. */
interface Theme {
  ink: string;
  faint: string;
  paper: string;
  panel: string;
  line: string;
  brand: string;
}

/** The fill of a kind of bars: a colour `#rrggbb`, and a hatch as matplotlib names it. */
interface Look {
  name: string;
  colour: string;
  hatch: string;
}

type Observer<Content = object> = (content: Content, buffers: Bytes[]) => void;

/** What anywidget gives a view of the Python object: its values by name, their observers, and messages. */
interface Model<Values, Content = object> {
  get<Name extends keyof Values>(name: Name): Values[Name];
  set<Name extends keyof Values>(name: Name, value: Values[Name]): void;
  save_changes(): void;
  send(message: object): void;
  on(events: string, observer: Observer<Content>): void;
  off(events: string, observer: Observer<Content>): void;
}

/** Where a view shows a model: an element, until the signal is aborted. */
interface Room<Values, Content = object> {
  model: Model<Values, Content>;
  el: HTMLElement;
  signal: AbortSignal;
}

/** Values that all views of a page can have. */
interface PageValues {
  max_height: number | null; // px
  unavailable?: string; // in a saved page: why there is no kernel
}

type Tooltip = import("./elements.js").Tooltip;
type Textures = import("./textures.js").Textures;

/** What is done while one pointer is pressed on an element; `hover` is for moves without a drag. */
interface DragActs {
  begin(x: number, y: number, event: PointerEvent): void;
  move(x: number, y: number, event: PointerEvent): void;
  end?(x: number, y: number, event: PointerEvent): void;
  hover?(x: number, y: number, event: PointerEvent): void;
}

/** The strokes of which hatches consist: ends of lines, or places of circles of one radius. */
interface HatchStrokes {
  line(...ends: number[]): void;
  dots(radius: number, ...places: number[]): void;
  rings(radius: number, ...places: number[]): void;
}
