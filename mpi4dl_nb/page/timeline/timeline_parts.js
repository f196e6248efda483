// The elements of a timeline beside its canvas: title, shares of the time, search, buttons and legend.

import { keepFocus, makeButton, makeElement, makeSignButton } from "../shared/elements.js";
import { formatShare } from "../shared/format.js";
import { makeSwatch } from "../shared/textures.js";

/** Return the elements of a timeline; `actions` are its buttons' functions: zoomOut, zoomIn, showAll, goBack, goOn.
 * @type {(actions: TimelineActions) => TimelineParts} */
export function makeTimelineParts(actions) {
  const parts = {
    title: makeElement("div", { class: "mpi4dl-timeline-title" }),
    shares: makeElement("div", { class: "mpi4dl-shares" }),
    search: makeElement("input", {
      type: "search", placeholder: "search: layer, kind, F0 …",
      "aria-label": "search for layers, kinds, passes or labels",
      "data-lm-suppress-shortcuts": "true", spellcheck: "false",
    }),
    steppers: [makeSignButton("‹", "previous match", actions.goBack), makeSignButton("›", "next match", actions.goOn)],
    count: makeElement("span", { class: "mpi4dl-timeline-count", role: "status" }),
    shown: makeElement("span", { class: "mpi4dl-timeline-count" }),
    canvas: makeElement("canvas", {
      class: "mpi4dl-timeline-rows", tabindex: "0", role: "application", "aria-roledescription": "timeline",
      "data-lm-suppress-shortcuts": "true",
    }),
    marks: makeElement("canvas", { class: "mpi4dl-timeline-marks", "aria-hidden": "true" }),
    overview: makeElement("canvas", { class: "mpi4dl-overview", "aria-hidden": "true" }),
    leftOut: makeElement("div", { class: "mpi4dl-timeline-left-out" }),
    status: makeElement("div", { class: "mpi4dl-timeline-status", role: "status", "aria-live": "polite" }),
    legend: makeElement("div", {
      class: "mpi4dl-legend", role: "group", "aria-label": "kinds: press one to search for it",
    }),
  };
  const tools = makeElement("div", { class: "mpi4dl-timeline-tools" }, parts.search, ...parts.steppers, parts.count,
    makeElement("span", { class: "mpi4dl-gap" }), parts.shown, makeSignButton("−", "zoom out", actions.zoomOut),
    makeSignButton("+", "zoom in", actions.zoomIn), makeSignButton("All", "show all of the step", actions.showAll));
  const stack = makeElement("div", { class: "mpi4dl-timeline-stack" }, parts.canvas, parts.marks);
  const room = makeElement("div", { class: "mpi4dl-timeline-room" }, parts.overview, stack);
  return { ...parts, tools, stack, room };
}

/** Return the text that describes a timeline's canvas to a screen reader.
 * @type {(words: TimelineWords) => string} */
export function describeTimeline(words) {
  const ranks = words.rows.map(({ rank, roles, shares: [work, messages, wait] }) =>
    `rank ${rank}${roles && `, ${roles}`}: work ${formatShare(work)}, messages ${formatShare(messages)}, ` +
    `waiting ${formatShare(wait)}`);
  return `${words.titles.join(". ")}. ${ranks.slice(0, 16).join("; ")}.`;
}

/** Fill the bar of all ranks' time, and name its parts; `colours` are the page's { paper, ink }.
 * @type {(shares: HTMLElement, words: TimelineWords, theme: Theme) => void} */
export function fillShares(shares, words, { paper, ink }) {
  /** @type {(look: Look, name: string) => HTMLElement} */
  const swatch = (look, name) => makeElement("span", { class: name, style: `background: ${makeSwatch(look, paper, ink)}` });
  const used = words.shares.filter(({ share }) => share > 0);
  const bars = used.map((each) => {
    const bar = swatch(each, "mpi4dl-share");
    bar.style.flexGrow = String(each.share);
    return bar;
  });
  shares.replaceChildren(makeElement("span", { class: "mpi4dl-share-title", text: "All ranks" }),
    makeElement("span", { class: "mpi4dl-share-bar", "aria-hidden": "true" }, ...bars),
    ...used.map((each) => makeElement("span", { class: "mpi4dl-share-text" }, swatch(each, "mpi4dl-swatch"),
      `${each.kind} ${formatShare(each.share)}`)));
}

/** Fill the legend with a button for each look that occurs; `press(name)` is called with its name.
 * @type {(legend: HTMLElement, scene: TimelineScene, theme: Theme, press: (name: string) => void) => void} */
export function fillLegend(legend, scene, { paper, ink }, press) {
  const { words, events } = scene, used = new Set(events.look);
  if (events.wait.some((each) => each > 0)) used.add(words.wait);
  const entries = [...used].sort((a, b) => a - b).map((look) => {
    const { name } = words.looks[look], style = `background: ${makeSwatch(words.looks[look], paper, ink)}`;
    const entry = makeButton(name, undefined, () => press(name), { "aria-pressed": String(scene.query === name) });
    entry.prepend(makeElement("span", { class: "mpi4dl-swatch", style }));
    return entry;
  });
  const thin = words.counts.length > 1 ? [makeElement("span", { text: "thin bars: predicted" })] : [];
  keepFocus(legend, () => legend.replaceChildren(...entries, ...thin));
}
