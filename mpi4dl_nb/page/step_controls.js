// The bar above a debugged step: back, play, step, speed, and a scrubber over all recorded frames.
import { DARK, FONT, fitCanvas } from "./canvas.js";
import { makeButton, makeElement } from "./elements.js";
import { clamp } from "./numbers.js";
import { listenToDrag } from "./pointer_drag.js";
import { SPEEDS } from "./step_player.js";
import { summariseFrame } from "./step_frames.js";

const SIGNS = {
  compute: ["c", "#56b4e9"], halo: ["h", "#009e73"], stage: ["s", "#cc79a7"], "all-reduce": ["Σ", "#f0e442"],
  update: ["u", "#9e9e9e"], "": ["·", "#d9d9d9"],
};
const HIGH = 30;

/** Return the index of the frame at x of a scrubber `wide` px wide with `count` frames. */
export function findFrame(x, wide, count) {
  return clamp(Math.floor(x / getFrameWidth(wide, count)), 0, count - 1);
}

/** Return the width of a frame's mark, in px: frames get narrower only when the bar is full. */
export function getFrameWidth(wide, count) {
  return Math.min(20, wide / Math.max(1, count));
}

/** The buttons, the badge and the scrubber of a `StepPlayer`. */
export class StepControls {
  constructor(player) {
    this.player = player;
    this.backButton = makeButton("◀ Back", "Back to what was recorded (left arrow)", () => player.back());
    this.playButton = makeButton("▶ Play", "Play or pause (space)",
      () => player.playing ? player.pause() : player.play());
    const step = "The next recorded instruction; at the newest one, the ranks run the next (right arrow)";
    this.stepButton = makeButton("Step ▶▏", step, () => player.stepOnce());
    const speeds = SPEEDS.map(
      (speed) => makeElement("option", { value: speed, text: `${speed} ×`, selected: speed === player.speed }));
    this.speed = makeElement("select", { "aria-label": "Speed", title: "Speed" }, ...speeds);
    this.speed.addEventListener("change", () => { player.speed = Number(this.speed.value); });
    this.badge = makeButton("", "To the newest instruction", () => player.seek(player.store.last));
    this.badge.className = "mpi4dl-badge";
    this.title = makeElement("span", { class: "mpi4dl-step-title" });
    this.canvas = makeElement("canvas", { "aria-hidden": "true" });
    this.slider = makeElement("div", {
      class: "mpi4dl-scrubber", tabindex: "0", role: "slider", "aria-label": "Recorded instructions",
      "aria-valuemin": "0",
    }, this.canvas);
    this.note = makeElement("span", { class: "mpi4dl-faint" });
    const bar = makeElement("div", { class: "mpi4dl-step-bar" },
      this.backButton, this.playButton, this.stepButton, this.speed, this.badge, this.title);
    const legend = makeElement("div", { class: "mpi4dl-scrubber-legend" }, ...Object.entries(SIGNS).slice(0, 5).map(
      ([kind, [sign, colour]]) => makeElement("span", { class: "mpi4dl-look" }, makeMark(sign, colour), ` ${kind}`)),
      makeElement("span", { text: "above: forward, below: backward" }), this.note);
    this.element = makeElement("div", { "data-lm-suppress-shortcuts": "true" }, bar, this.slider, legend);
    const drag = (event) => this.drag(event);
    listenToDrag(this.slider, { begin: drag, move: drag, hover: (event) => this.name(event) });
  }

  drag(event) {
    const { left, width } = this.slider.getBoundingClientRect(), frames = this.player.store.frames.length;
    if (!frames) return;
    this.player.playing = false;
    this.player.seek(findFrame(event.clientX - left, width, frames));
    this.update();
  }

  /** Name the frame under the pointer. */
  name(event) {
    const { left, width } = this.slider.getBoundingClientRect(), { frames } = this.player.store;
    if (frames.length) this.slider.title = frames[findFrame(event.clientX - left, width, frames.length)].meta.title;
  }

  /** Show where the player is, if anything has changed. */
  update() {
    const { player } = this, { frames, note, last } = player.store, frame = frames[player.index];
    if (!frame) return;
    const { step, title } = frame.meta, { index, playing, waiting } = player;
    const state = [step, title, index, last, playing, waiting, note].join();
    if (state === this.state) return;
    this.state = state;
    this.backButton.setAttribute("aria-disabled", player.index <= 0);
    for (const button of [this.stepButton, this.playButton]) button.setAttribute("aria-disabled", player.ended);
    this.playButton.textContent = player.playing ? "❚❚ Pause" : "▶ Play";
    this.playButton.setAttribute("aria-pressed", String(player.playing));
    this.badge.textContent = player.waiting ? "the ranks are running" : player.recorded
      ? `recorded: ${player.index + 1} of ${last + 1}` : "newest";
    this.badge.classList.toggle("mpi4dl-recorded", player.recorded);
    this.title.textContent = title;
    this.note.textContent = note;
    this.slider.setAttribute("aria-valuemax", last);
    this.slider.setAttribute("aria-valuenow", player.index);
    const { kind, phase } = summariseFrame(frame.meta);
    const what = kind ? `${phase} ${kind}` : "start";
    this.slider.setAttribute("aria-valuetext", `${player.index + 1} of ${last + 1}: ${what}`);
  }

  /** Paint the marks of all frames, and the shown one. */
  paint(look) {
    const { canvas, player: { store: { frames } } } = this, wide = this.slider.clientWidth;
    if (!wide) return;
    const context = fitCanvas(canvas, wide, HIGH), step = getFrameWidth(wide, frames.length), gap = step > 5 ? 1 : 0;
    context.clearRect(0, 0, wide, HIGH);
    context.font = `600 11px ${FONT}`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillStyle = look.line;
    context.fillRect(0, HIGH / 2 - 0.5, wide, 1);
    frames.forEach(({ meta }, index) => {
      const { kind, phase } = summariseFrame(meta), [sign, colour] = SIGNS[kind] ?? SIGNS[""];
      const both = !kind || phase === "update", top = both ? HIGH / 2 - 7 : phase === "forward" ? 1 : HIGH / 2;
      context.fillStyle = colour;
      context.fillRect(index * step + gap / 2, top, step - gap, HIGH / 2 - 1);
      context.fillStyle = DARK;
      if (step >= 10) context.fillText(sign, (index + 0.5) * step, top + HIGH / 4);
    });
    const left = this.player.index * step;
    context.strokeStyle = look.ink;
    context.lineWidth = 2;
    context.strokeRect(Math.max(1, left), 1, Math.max(3, Math.min(step, wide - left) - 1), HIGH - 2);
  }
}

function makeMark(sign, colour) {
  const mark = makeElement("span", { class: "mpi4dl-mark", text: sign });
  mark.style.background = colour;
  return mark;
}
