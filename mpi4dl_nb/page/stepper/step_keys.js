// The keys of a debugged step: those that go through the record, and those with which the ranks go on.

/** The keys with which the record is looked at.
 * @type {[string, string][]} */
export const RECORD_KEYS = [
  ["← →", "back and forward in the record; at its end, → is the next instruction on the ranks"],
  ["Home End", "the first, the newest frame"], ["PageUp PageDown", "ten frames"], ["space", "play or pause"],
  ["[ ]", "which message"], ["Shift + arrows", "from pixel to pixel"],
];

/** @type {Record<string, Pair>} */
const MOVES = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

/** Return the action of each key. `turn(by)` chooses another message; the keys that `model` accepts go to the ranks.
 * @type {(player: StepPlayer, model: Model<StepperValues>, turn: (by: number) => void) => KeyActions} */
export function makeKeyActions(player, model, turn) {
  /** @type {(index: number) => void} */
  const jump = (index) => {
    player.pause();
    player.seek(index);
  };
  /** @type {KeyActions} */
  const actions = {
    ArrowLeft: () => player.back(),
    ArrowRight: () => player.stepOnce(),
    Home: () => jump(0),
    End: () => jump(player.store.last),
    PageUp: () => jump(player.index - 10),
    PageDown: () => jump(player.index + 10),
    " ": () => player.playing ? player.pause() : player.play(),
    "[": () => turn(-1),
    "]": () => turn(1),
    g: () => model.send({ key: "g" }),  // it only shows something else of where the ranks are
  };
  for (const key of model.get("accepts")) {
    actions[key] ??= () => {
      player.pause();
      player.go(key);
    };
  }
  return actions;
}

/** Do what a key stands for: one of the actions or, with Shift, `moveCursor(down, across)`. Return whether it is one.
 * @type {(event: KeyboardEvent, actions: KeyActions, moveCursor: (down: number, across: number) => void) => boolean} */
export function handleStepKey(event, actions, moveCursor) {
  const { key, shiftKey } = event, { tagName } = /** @type {Element} */ (event.target);
  if (tagName === "SELECT" || (key === " " && ["BUTTON", "SUMMARY"].includes(tagName))) return false;
  const action = shiftKey && MOVES[key] ? () => moveCursor(...MOVES[key]) : actions[key];
  action?.();
  return Boolean(action);
}
