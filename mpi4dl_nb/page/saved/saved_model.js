// What stands in place of the kernel in a page that was saved: the values of a view, and the answers stored with it.

/** Turns base64 into bytes. */
export function unpackBytes(text) {
  return new DataView(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer);
}

const MARKS = ["asked", "serial"]; // of a message, by which a page knows the answer

/** The model of one view, with what anywidget's models have of it: values, their observers, and messages.
 *
 * `values` are by name. `answers` holds, by the name of a message and then by the value that it asks for (as JSON, or
 * each item of a list), what the kernel would have sent: [content, buffers]. A message without a stored answer is
 * refused in the words of `reason`, unless `handlers` has a function for it: of the value, and of the whole message.
 */
export class SavedModel {
  constructor(values, answers, reason) {
    Object.assign(this, { values: { ...values, unavailable: reason }, answers, handlers: {}, observers: new Map() });
  }

  get(name) {
    return this.values[name];
  }

  set(name, value) {
    if (this.values[name] === value) return;
    this.values[name] = value;
    this.call(`change:${name}`);
  }

  /** Nobody is told: there is no kernel. */
  save_changes() {}

  on(events, observer) {
    for (const event of events.split(" ")) this.observers.set(event, [...(this.observers.get(event) ?? []), observer]);
  }

  off(events, observer) {
    for (const event of events.split(" ")) {
      this.observers.set(event, (this.observers.get(event) ?? []).filter((each) => each !== observer));
    }
  }

  call(event, ...rest) {
    for (const observer of this.observers.get(event) ?? []) observer(...rest);
  }

  /** Answer a message as the kernel would: later, and with a last word if the page waits for one. */
  send(message) {
    setTimeout(() => {
      for (const [name, value] of Object.entries(message)) {
        if (name in this.handlers) this.handlers[name](value, message);
        else if (!MARKS.includes(name)) this.answer(name, value);
      }
      if (message.asked) this.call("msg:custom", { answered: message.asked }, []);
    });
  }

  answer(name, value) {
    for (const item of Array.isArray(value) ? value : [value]) {
      const stored = this.answers[name]?.[JSON.stringify(item)];
      this.call("msg:custom", ...(stored ?? [{ refused: this.values.unavailable }, []]));
    }
  }
}
