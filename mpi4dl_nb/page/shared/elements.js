// Elements of a page: HTML and SVG elements with attributes, buttons, a tooltip, and the reader's preferences.

/** Return a new HTML element with attributes and children; `text` is its text.
 * @type {<Name extends keyof HTMLElementTagNameMap>(name: Name, attributes?: Attributes, ...children: Child[]) =>
 * HTMLElementTagNameMap[Name]} */
export function makeElement(name, attributes = {}, ...children) {
  return fillElement(document.createElement(name), attributes, children);
}

/** Return a new SVG element with attributes and children.
 * @type {<Name extends keyof SVGElementTagNameMap>(name: Name, attributes?: Attributes, ...children: Child[]) =>
 * SVGElementTagNameMap[Name]} */
export function makeSvg(name, attributes = {}, ...children) {
  return fillElement(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

/** @type {<Made extends Element>(element: Made, attributes: Attributes, children: Child[]) => Made} */
function fillElement(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") element.textContent = String(value ?? "");
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== undefined) element.setAttribute(name, String(value));
  }
  element.append(...children);
  return element;
}

/** Set the text of an element if it is another one: one that is set again is laid out and announced again.
 * @type {(element: Element, text: string) => void} */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Call `press` with each key on an element, unless it belongs to a shortcut. If it returns true, nobody else gets it.
 * @type {(element: GlobalEventHandlers, press: (event: KeyboardEvent) => boolean) => void} */
export function listenToKeys(element, press) {
  element.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !press(event)) return;
    event.preventDefault();
    event.stopPropagation();
  });
}

/**
 * Return a button that calls `act`, but not while its `aria-disabled` is "true". Unlike one with `disabled`, it keeps
 * the focus then, so that the keyboard goes on from there.
 * @type {(text: string, title: string | undefined, act: () => void, attributes?: Attributes) => HTMLButtonElement}
 */
export function makeButton(text, title, act, attributes = {}) {
  const button = makeElement("button", { type: "button", text, title, ...attributes });
  button.addEventListener("click", () => { if (button.getAttribute("aria-disabled") !== "true") act(); });
  return button;
}

/** Return a button with a sign in place of a text, and with a name.
 * @type {(sign: string, name: string, act: () => void) => HTMLButtonElement} */
export function makeSignButton(sign, name, act) {
  return makeButton(sign, name, act, { "aria-label": name });
}

/** Call `rebuild`. If it removes the focused button of `host`, focus the new one of the same name, or else `host`.
 * @type {(host: HTMLElement, rebuild: () => void) => void} */
export function keepFocus(host, rebuild) {
  /** @type {(element: Element) => string} */
  const name = (element) => element.getAttribute("aria-label") ?? element.textContent;
  const focused = document.activeElement, held = focused && host.contains(focused) ? name(focused) : null;
  rebuild();
  if (held === null || host.contains(document.activeElement)) return;
  const successor = [...host.querySelectorAll("button")].find((button) => name(button) === held);
  (successor ?? host).focus({ preventScroll: true });
}

/**
 * Return a button "?" that opens a list of keys over the upper right corner of `host`. `keys` are [keys, what they do].
 * It is closed by the button, by Escape, and when the focus leaves both.
 * @type {(host: HTMLElement, keys: string[][]) => HTMLButtonElement}
 */
export function makeKeyHelp(host, keys) {
  const id = `mpi4dl-keys-${Math.random().toString(36).slice(2)}`;
  const lines = keys.flatMap(([key, text]) => [makeElement("dt", { text: key }), makeElement("dd", { text })]);
  const list = makeElement("div", {
    class: "mpi4dl-key-help", id, role: "region", "aria-label": "Keys", tabindex: "0", hidden: true,
    "data-lm-suppress-shortcuts": "true",
  }, makeElement("dl", {}, ...lines));
  /** @type {(isOpen: boolean) => void} */
  const show = (isOpen) => {
    list.hidden = !isOpen;
    button.setAttribute("aria-expanded", String(isOpen));
  };
  const names = { "aria-label": "Keys", "aria-controls": id };
  const button = makeButton("?", "Keys", () => show(list.hidden !== false), names);
  show(false);
  for (const part of /** @type {HTMLElement[]} */ ([button, list])) {
    part.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !list.hidden) {
        show(false);
        button.focus();
      }
      event.stopPropagation(); // in the list, keys scroll it
    });
    part.addEventListener("focusout", ({ relatedTarget }) => {
      if (relatedTarget instanceof Node && relatedTarget !== button && !list.contains(relatedTarget)) show(false);
    });
  }
  for (const name of ["click", "pointermove"]) list.addEventListener(name, (event) => event.stopPropagation());
  host.append(list);
  return button;
}

/** Return the px that an element is at most high, see page.css.
 * @type {(element: Element) => number} */
export function readHeightLimit(element) {
  return parseFloat(getComputedStyle(element).maxHeight) || innerHeight;
}

/** Whether the reader has asked for less motion. */
export function prefersReducedMotion() {
  return matchMedia("(prefers-reduced-motion: reduce)").matches;
}

/** A small text box beside the pointer, in `host`. It is no announcement: what it says is also in the host's status. */
export class Tooltip {
  /** @param {HTMLElement} host */
  constructor(host) {
    this.host = host;
    this.box = makeElement("div", { class: "mpi4dl-tooltip", "aria-hidden": "true", hidden: true });
    host.append(this.box);
  }

  /** Show lines of text beside (x, y) in px of the host; on the side where there is room.
   * @type {(lines: string[], x: number, y: number) => void} */
  show(lines, x, y) {
    this.box.replaceChildren(...lines.map((line) => makeElement("div", { text: line })));
    this.box.hidden = false;
    const { width, height } = this.box.getBoundingClientRect();
    const room = this.host.getBoundingClientRect();
    const left = x + 14 + width > room.width ? x - 14 - width : x + 14;
    const top = y + 14 + height > room.height ? y - 14 - height : y + 14;
    this.box.style.transform = `translate(${Math.max(0, left)}px, ${Math.max(0, top)}px)`;
  }

  hide() {
    this.box.hidden = true;
  }
}

/** The colours of the light theme.
 * @type {Theme} */
export const LIGHT = {
  ink: "#1f2328", faint: "#57606a", paper: "#ffffff", panel: "#f3f4f6", line: "#c4c8cc", brand: "#1976d2",
};

/**
 * Return the colours of the theme in which an element is shown, light or dark: those of page.css, by name.
 *
 * They are known once the element is in the page, which it is when it first has a size.
 * @type {(element: Element) => Theme}
 */
export function readColours(element) {
  const style = getComputedStyle(element);
  /** @type {(name: keyof Theme) => string} */
  const read = (name) => style.getPropertyValue(`--${name}`).trim() || LIGHT[name];
  const [ink, faint, paper] = [read("ink"), read("faint"), read("paper")];
  return { ink, faint, paper, panel: read("panel"), line: read("line"), brand: read("brand") };
}
