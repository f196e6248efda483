// The life of a view on a page: whatever it begins ends when its signal is aborted, which its `render` does at the end.

/** Return the function `render` of a module: it lets `show` show a model in an element, and returns what ends that.
 * @type {<Values, Content>(show: (room: Room<Values, Content>) => unknown) =>
 * (place: { model: Model<Values, Content>, el: HTMLElement }) => () => void} */
export function makeRender(show) {
  return ({ model, el }) => {
    const life = new AbortController();
    show({ model, el, signal: life.signal });
    return () => life.abort();
  };
}

/** Call each of `acts` when an event of the model occurs that it is named by; several names are separated by a space.
 * @type {<Values, Content>(model: Model<Values, Content>, acts: Record<string, Observer<Content>>, signal: AbortSignal)
 * => void} */
export function followModel(model, acts, signal) {
  for (const [events, act] of Object.entries(acts)) {
    model.on(events, act);
    signal.addEventListener("abort", () => model.off(events, act));
  }
}

/** Call `resize` when an element has its first size, and when that changes.
 * @type {(element: Element, resize: () => void, signal: AbortSignal) => void} */
export function watchSize(element, resize, signal) {
  const sizes = new ResizeObserver(resize);
  sizes.observe(element);
  signal.addEventListener("abort", () => sizes.disconnect());
}

/** Call `redraw` when the theme of the page may have changed.
 * @type {(redraw: () => void, signal: AbortSignal) => void} */
export function watchTheme(redraw, signal) {
  const themes = new MutationObserver(redraw);
  themes.observe(document.body, { attributeFilter: ["data-jp-theme-light", "style", "class"] });
  signal.addEventListener("abort", () => themes.disconnect());
}

/** Keep an element within the `max_height` of a model, in px, or else within the window; `resize` when either changes.
 * @type {(element: HTMLElement, model: Model<PageValues>, resize: () => void, signal: AbortSignal) => void} */
export function boundHeight(element, model, resize, signal) {
  const bound = () => {
    const most = model.get("max_height");
    element.style.setProperty("--mpi4dl-max-height", most ? `${most}px` : "");
    resize();
  };
  bound();
  followModel(model, { "change:max_height": bound }, signal);
  window.addEventListener("resize", resize, { signal });
}

/** Return a function that calls `draw` before the next frame, once, however often it is called.
 * @type {(draw: () => void, signal: AbortSignal) => () => void} */
export function makeFrameLoop(draw, signal) {
  let asked = 0;
  signal.addEventListener("abort", () => cancelAnimationFrame(asked));
  return () => {
    asked ||= requestAnimationFrame(() => { asked = 0; draw(); });
  };
}

/** Return a function that calls `act` after some ms, unless it is called again before then; without `act` it only ends
 * the wait.
 * @type {(signal: AbortSignal) => (ms: number, act?: () => void) => void} */
export function makeTimer(signal) {
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let timer;
  signal.addEventListener("abort", () => clearTimeout(timer));
  return (ms, act) => {
    clearTimeout(timer);
    if (act) timer = setTimeout(act, ms);
  };
}
