// Elements of a page: HTML and SVG elements with attributes, buttons, a tooltip, a drawing loop, and the reader's
// preferences.

/** Return a new HTML element with attributes and children; `text` is its text. */
export function makeElement(name, attributes = {}, ...children) {
  return fillElement(document.createElement(name), attributes, children);
}

/** Return a new SVG element with attributes and children. */
export function makeSvg(name, attributes = {}, ...children) {
  return fillElement(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function fillElement(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") element.textContent = value;
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/**
 * Return a button that calls `act`, but not while its `aria-disabled` is "true". Unlike one with `disabled`, it keeps
 * the focus then, so that the keyboard goes on from there.
 */
export function makeButton(text, title, act, attributes = {}) {
  const button = makeElement("button", { type: "button", text, title, ...attributes });
  button.addEventListener("click", () => { if (button.getAttribute("aria-disabled") !== "true") act(); });
  return button;
}

/** Call `rebuild`. If it removes the focused button of `host`, focus the new one of the same name, or else `host`. */
export function keepFocus(host, rebuild) {
  const name = (element) => element.getAttribute("aria-label") ?? element.textContent;
  const held = host.contains(document.activeElement) ? name(document.activeElement) : null;
  rebuild();
  if (held === null || host.contains(document.activeElement)) return;
  const successor = [...host.querySelectorAll("button")].find((button) => name(button) === held);
  (successor ?? host).focus({ preventScroll: true });
}

/** Whether the reader has asked for less motion. */
export function prefersReducedMotion() {
  return matchMedia("(prefers-reduced-motion: reduce)").matches;
}

/** A small text box beside the pointer, in `host`. It is no announcement: what it says is also in the host's status. */
export class Tooltip {
  constructor(host) {
    this.host = host;
    this.box = makeElement("div", { class: "mpi4dl-tooltip", "aria-hidden": "true", hidden: true });
    host.append(this.box);
  }

  /** Show lines of text beside (x, y) in px of the host; on the side where there is room. */
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

/** Return a function that calls `draw` before the next frame, once, however often it is called. */
export function makeFrameLoop(draw) {
  let asked = 0;
  const request = () => {
    if (!asked) asked = requestAnimationFrame(() => { asked = 0; draw(); });
  };
  request.cancel = () => cancelAnimationFrame(asked);
  return request;
}

const LIGHT = { ink: "#1f2328", faint: "#57606a", paper: "#ffffff", panel: "#f3f4f6", line: "#c4c8cc", brand: "#1976d2" };

/**
 * Return the colours of the theme in which an element is shown, light or dark: those of page.css, by name.
 *
 * They are known once the element is in the page, which it is when it first has a size.
 */
export function readColours(element) {
  const style = getComputedStyle(element);
  const read = ([name, light]) => [name, style.getPropertyValue(`--${name}`).trim() || light];
  return Object.fromEntries(Object.entries(LIGHT).map(read));
}

/** Call `redraw` when the theme of the page may have changed. Return a function that stops. */
export function watchTheme(redraw) {
  const themes = new MutationObserver(() => redraw());
  themes.observe(document.body, { attributeFilter: ["data-jp-theme-light", "style", "class"] });
  return () => themes.disconnect();
}
