// Above a debugged step: what the ranks can run and how its record is looked at, and a scrubber over all frames.
import { DARK, FONT, fitCanvas, setLetters, strokeRectangle } from "../shared/canvas.js";
import { makeButton, makeElement } from "../shared/elements.js";
import { clamp } from "../shared/numbers.js";
import { listenToDrag } from "../shared/pointer_drag.js";
import { SPEEDS } from "./step_player.js";
import { summariseFrame } from "./step_frames.js";

/** @type {Record<string, [string, string]>} */
const SIGNS = {
  compute: ["c", "#56b4e9"], halo: ["h", "#009e73"], stage: ["s", "#cc79a7"], "all-reduce": ["Σ", "#f0e442"],
  ring: ["k", "#9b8ce0"], update: ["u", "#9e9e9e"], "": ["·", "#d9d9d9"],
};
const HIGH = 30, RESTART = "r";

/** Return the index of the frame at x of a scrubber `wide` px wide with `count` frames.
 * @type {(x: number, wide: number, count: number) => number} */
export function findFrame(x, wide, count) {
  return clamp(Math.floor(x / getFrameWidth(wide, count)), 0, count - 1);
}

/** Return the width of a frame's mark, in px: frames get narrower only when the bar is full.
 * @type {(wide: number, count: number) => number} */
export function getFrameWidth(wide, count) {
  return Math.min(20, wide / Math.max(1, count));
}

/** The buttons of a `StepPlayer` in one row, the line that says where it is, and the scrubber.
 *
 * `runs` are [key, name, what it does] of all that makes the ranks go on, `run(key)` does it.
 */
export class StepControls {
  /** @param {StepPlayer} player
   * @param {StepRun[]} runs
   * @param {(key: string) => void} run */
  constructor(player, runs, run) {
    this.player = player;
    this.state = this.painted = ""; // what `update` and `paint` have shown
    this.refusedAt = -1;
    this.runButtons = runs.map(([key, name, does]) =>
      makeButton(name, `${does} (${key})`, () => run(key), { "data-key": key }));
    this.backButton = makeButton("◀ Back", "One frame back in the record: the ranks stay where they are (left arrow)",
      () => player.back());
    this.forwardButton = makeButton("Forward ▶", "One frame forward in the record, to the newest one", () => player.forward());
    this.badge = makeButton("", "To the newest frame (End)", () => player.seek(player.store.last));
    this.badge.className = "mpi4dl-badge";
    const plays = runs.length ? "Play what is recorded; at its end the ranks go on" : "Play what is recorded";
    this.playButton = makeButton("▶ Play", `${plays} (space)`, () => player.playing ? player.pause() : player.play());
    this.playButton.className = "mpi4dl-play";
    const speeds = SPEEDS.map(
      (speed) => makeElement("option", { value: speed, text: `${speed} ×`, selected: speed === player.speed }));
    this.speed = makeElement("select", { "aria-label": "Speed", title: "Speed" }, ...speeds);
    this.speed.addEventListener("change", () => { player.speed = Number(this.speed.value); });
    this.title = makeElement("span", { class: "mpi4dl-step-title" });
    this.trouble = makeElement("span", { class: "mpi4dl-step-trouble", role: "alert" });
    this.canvas = makeElement("canvas", { "aria-hidden": "true" });
    this.slider = makeElement("div", {
      class: "mpi4dl-scrubber", tabindex: "0", role: "slider", "aria-label": "Record of the step", "aria-valuemin": "0",
    }, this.canvas);
    this.note = makeElement("span", { class: "mpi4dl-faint" });
    this.bar = makeElement("div", { class: "mpi4dl-step-bar" },
      ...(runs.length ? [makeGroup("Run on the ranks", "mpi4dl-step-run", ...this.runButtons)] : []),
      makeGroup("Look at the record", "", this.backButton, this.forwardButton, this.badge),
      makeGroup("", "", this.playButton, this.speed));
    const line = makeElement("div", { class: "mpi4dl-step-line" }, this.title, this.trouble);
    const legend = makeElement("div", { class: "mpi4dl-scrubber-legend" }, ...Object.entries(SIGNS).slice(0, 6).map(
      ([kind, [sign, colour]]) => makeElement("span", { class: "mpi4dl-look" }, makeMark(sign, colour), ` ${kind}`)),
      makeElement("span", { text: "above: forward, below: backward, »: several at once" }), this.note);
    this.element = makeElement("div", { "data-lm-suppress-shortcuts": "true" }, this.bar, line, this.slider, legend);
    /** @type {(x: number) => void} */
    const drag = (x) => this.drag(x);
    listenToDrag(this.slider, { begin: drag, move: drag, hover: (x) => this.name(x) });
  }

  /** @type {(x: number) => void} */
  drag(x) {
    const frames = this.player.store.frames.length;
    if (!frames) return;
    this.player.playing = false;
    this.player.seek(findFrame(x, this.slider.offsetWidth, frames));
    this.update();
  }

  /** Name the frame under the pointer.
   * @type {(x: number) => void} */
  name(x) {
    const { frames } = this.player.store;
    if (frames.length) this.slider.title = frames[findFrame(x, this.slider.offsetWidth, frames.length)].meta.title;
  }

  /** Show where the player is, if anything has changed. */
  update() {
    const { player } = this, { frames, note, last } = player.store, frame = frames[player.index];
    if (!frame) return;
    const { step, title, merged } = frame.meta, { index, playing, waiting } = player, isDone = frames[last].meta.done;
    const state = [step, title, index, last, playing, waiting, note, isDone].join();
    if (state === this.state) return;
    this.state = state;
    this.backButton.setAttribute("aria-disabled", String(index <= 0));
    this.forwardButton.setAttribute("aria-disabled", String(index >= last));
    this.playButton.setAttribute("aria-disabled", String(player.ended));
    for (const button of this.runButtons) {
      // A step that is done can only be begun again.
      button.setAttribute("aria-disabled", String(waiting || (isDone && button.dataset.key !== RESTART)));
    }
    this.playButton.textContent = playing ? "❚❚ Pause" : "▶ Play";
    this.playButton.setAttribute("aria-pressed", String(playing));
    this.badge.textContent = waiting ? "the ranks are running" : player.recorded
      ? `recorded: ${index + 1} of ${last + 1}` : "newest";
    this.badge.classList.toggle("mpi4dl-recorded", player.recorded);
    this.title.textContent = this.title.title = merged ? `${title.replace(/\.?$/, ".")} ${merged}` : title;
    if (index !== this.refusedAt) this.showTrouble("");
    this.note.textContent = note;
    this.slider.setAttribute("aria-valuemax", String(last));
    this.slider.setAttribute("aria-valuenow", String(index));
    const { kind, phase } = summariseFrame(frame.meta);
    const what = kind ? `${phase} ${kind}` : "start";
    this.slider.setAttribute("aria-valuetext", `${index + 1} of ${last + 1}: ${what}`);
  }

  /** Show what was refused in the place of the title, until another frame is shown.
   * @type {(text: string) => void} */
  showTrouble(text) {
    this.refusedAt = this.player.index;
    this.trouble.textContent = text && `⚠ ${text}`;
    this.trouble.title = text;
    this.title.hidden = Boolean(text);
  }

  /** Paint the marks of all frames, and the shown one.
   * @type {(look: Theme) => void} */
  paint(look) {
    const { canvas, player: { store: { frames }, index: shown } } = this, wide = this.slider.clientWidth;
    // While a motion is drawn, frame by frame, the scrubber stays as it is.
    const painted = [wide, shown, frames.length, frames[0]?.meta.step, frames.at(-1)?.meta.number, look.ink].join();
    if (!wide || painted === this.painted) return;
    this.painted = painted;
    const context = fitCanvas(canvas, wide, HIGH), step = getFrameWidth(wide, frames.length), gap = step > 5 ? 1 : 0;
    setLetters(context, `600 11px ${FONT}`, look.line, "center");
    context.fillRect(0, HIGH / 2 - 0.5, wide, 1);
    frames.forEach(({ meta }, index) => {
      const { kind, phase } = summariseFrame(meta), [sign, colour] = SIGNS[kind] ?? SIGNS[""];
      const both = !kind || phase === "update", top = both ? HIGH / 2 - 7 : phase === "forward" ? 1 : HIGH / 2;
      context.fillStyle = colour;
      context.fillRect(index * step + gap / 2, top, step - gap, HIGH / 2 - 1);
      context.fillStyle = DARK;
      if (step >= 10) context.fillText(meta.merged ? "»" : sign, (index + 0.5) * step, top + HIGH / 4);
    });
    const left = shown * step, start = Math.max(1, left), width = Math.max(3, Math.min(step, wide - left) - 1);
    strokeRectangle(context, [1, start, HIGH - 1, start + width], look.ink, 2);
  }
}

/** @type {(name: string, look: string, ...parts: Child[]) => Element} */
function makeGroup(name, look, ...parts) {
  const label = name ? [makeElement("span", { class: "mpi4dl-step-group-name", text: `${name}:`, "aria-hidden": "true" })] : [];
  const role = name ? { role: "group", "aria-label": name } : {};
  return makeElement("div", { class: `mpi4dl-step-group ${look}`.trim(), ...role }, ...label, ...parts);
}

/** @type {(sign: string, colour: string) => Element} */
function makeMark(sign, colour) {
  return makeElement("span", { class: "mpi4dl-mark", text: sign, style: `background: ${colour}` });
}
