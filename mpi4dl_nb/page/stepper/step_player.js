// Which frame of a debugged step is shown, and when the next one is: recorded ones first, then the ranks go on.

import { clamp } from "../shared/numbers.js";

export const SPEEDS = [0.25, 0.5, 1, 2, 4];

/** Goes through the frames of a `FrameStore`.
 *
 * `show(index, moves)` shows a frame, from the beginning of its motion if it `moves`; `ask(key, number)` makes the ranks go
 * on; `tell()` is called when anything else has changed. Nothing is undone on the ranks by going back.
 */
export class StepPlayer {
  /** @param {FrameStore} store
   * @param {PlayerActs} acts */
  constructor(store, { show, ask, tell }) {
    this.store = store;
    this.show = show;
    this.ask = ask;
    this.tell = tell;
    this.index = -1;
    this.asked = 0; // the number of the last question
    this.playing = this.waiting = false;
    this.speed = 0.5; // of a motion of about a second: slow enough to be followed
  }

  /** Whether the shown frame is not the newest one. */
  get recorded() {
    return this.index < this.store.last;
  }

  /** Whether the newest frame is shown and the step is done: there is no next instruction. */
  get ended() {
    return !this.recorded && Boolean(this.store.frames[this.index]?.meta.done);
  }

  /** Show the next recorded frame; at the newest one, let the ranks run the next instruction. */
  step() {
    if (this.recorded) this.seek(this.index + 1, true);
    else if (this.ended) this.pause();
    else this.go("n");
  }

  /** Pause, and step. */
  stepOnce() {
    this.pause();
    this.step();
  }

  /** Let the ranks go on by what a key stands for. What comes is shown.
   * @type {(key: string) => void} */
  go(key) {
    if (this.waiting) return;
    this.waiting = true;
    this.asked = Math.random(); // unlike that of any other question, also of other views of the step
    this.tell();
    this.ask(key, this.asked);
  }

  back() {
    this.pause();
    this.seek(this.index - 1);
  }

  /** Show the next recorded frame, if there is one. */
  forward() {
    this.pause();
    this.seek(this.index + 1, this.recorded);
  }

  /** Show the frame of an index, or the nearest one.
   * @type {(index: number, moves?: boolean) => void} */
  seek(index, moves = false) {
    const wanted = clamp(index, 0, this.store.last);
    if (wanted !== this.index || moves) {
      this.index = wanted;
      this.show(wanted, moves);
    }
  }

  /** Take over a frame that the kernel has sent: it is shown if the newest one was, or the ranks were asked.
   * @type {(meta: FrameMeta, buffer: Bytes) => void} */
  take(meta, buffer) {
    const before = this.store.frames[this.index]?.meta, follows = this.waiting || !this.recorded;
    const index = this.store.add(meta, buffer);
    const repeated = before?.step === meta.step && before.number === meta.number;  // another channel of it
    const asked = this.waiting;
    this.waiting = false;
    if (follows) {
      this.index = index;
      this.show(index, index > 0 && !repeated && (asked || before?.step === meta.step));
    } else {
      /** @type {(frame: StepFrame) => boolean} */
      const isSame = ({ meta: each }) => each.step === before?.step && each.number === before.number;
      const same = this.store.frames.findIndex(isSame);
      this.index = same < 0 ? Math.min(this.index, this.store.last) : same;
      this.show(this.index, false);
    }
  }

  /** Add recorded frames, oldest first, without leaving the frame that is shown.
   * @type {(metas: FrameMeta[], buffers: Bytes[]) => void} */
  takeHistory(metas, buffers) {
    const shown = this.store.frames[this.index]?.meta.number;
    const known = new Set(this.store.frames.map((each) => each.meta.number));
    metas.forEach((meta, at) => { if (!known.has(meta.number)) this.store.add(meta, buffers[at]); });
    this.index = this.store.frames.findIndex((each) => each.meta.number === shown);
    this.tell();
  }

  /** The ranks did not go on. */
  refuse() {
    this.waiting = this.playing = false;
    this.tell();
  }

  /** The kernel has done what was asked by this number. If no frame has come by then, none will.
   * @type {(asked: number) => void} */
  answer(asked) {
    if (this.waiting && asked === this.asked) this.refuse();
  }

  play() {
    this.playing = !this.ended;
    this.tell();
    if (this.playing && !this.waiting) this.step();
  }

  pause() {
    this.playing = false;
    this.tell();
  }

  /** The motion of the shown frame has ended. */
  rest() {
    if (!this.playing) return;
    if (this.ended) this.pause();
    else if (!this.waiting) this.step();
  }
}
