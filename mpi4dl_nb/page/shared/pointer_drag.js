// A drag: what one pointer does on an element between a press of its main button and its release.

export const DRAG_PX = 4; // a pointer that moves less has clicked

/** Return the place [x, y] of an event in px of an element.
 * @type {(event: MouseEvent, element: Element) => Pair} */
export function locatePointer(event, element) {
  const { left, top } = element.getBoundingClientRect();
  return [event.clientX - left, event.clientY - top];
}

/**
 * Call `begin` when a pointer is pressed on an element, `move` when it moves, and `end` when it is released, with the
 * place (x, y) in px of the element and the event. Other buttons are ignored, and other pointers until then. `hover` is
 * for moves without a drag.
 * @type {(element: HTMLElement, acts: DragActs) => void}
 */
export function listenToDrag(element, { begin, move, end = () => {}, hover = () => {} }) {
  /** @type {number | null} */
  let pointer = null;
  element.addEventListener("pointerdown", (event) => {
    if (event.button || pointer !== null) return;
    pointer = event.pointerId;
    element.setPointerCapture(pointer);
    begin(...locatePointer(event, element), event);
  });
  element.addEventListener("pointermove", (event) => {
    const act = pointer === null ? hover : event.pointerId === pointer ? move : undefined;
    act?.(...locatePointer(event, element), event);
  });
  for (const name of /** @type {const} */ (["pointerup", "pointercancel"])) {
    element.addEventListener(name, (event) => {
      if (event.pointerId !== pointer) return;
      pointer = null;
      end(...locatePointer(event, element), event);
    });
  }
}
