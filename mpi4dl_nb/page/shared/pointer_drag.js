// A drag: what one pointer does on an element between a press of its main button and its release.

export const DRAG_PX = 4; // a pointer that moves less has clicked

/**
 * Call `begin(event)` when a pointer is pressed on an element, `move(event)` when it moves, and `end(event)` when it is
 * released. Other buttons are ignored, and other pointers until then. `hover(event)` is for moves without a drag.
 * @type {(element: HTMLElement, acts: DragActs) => void}
 */
export function listenToDrag(element, { begin, move, end = () => {}, hover = () => {} }) {
  /** @type {number | null} */
  let pointer = null;
  element.addEventListener("pointerdown", (event) => {
    if (event.button || pointer !== null) return;
    pointer = event.pointerId;
    element.setPointerCapture(pointer);
    begin(event);
  });
  element.addEventListener("pointermove", (event) => {
    if (pointer === null) hover(event);
    else if (event.pointerId === pointer) move(event);
  });
  for (const name of /** @type {const} */ (["pointerup", "pointercancel"])) {
    element.addEventListener(name, (event) => {
      if (event.pointerId !== pointer) return;
      pointer = null;
      end(event);
    });
  }
}
