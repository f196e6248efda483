// What stands in place of the kernel in a page that was saved: the values of a view, and the answers stored with it.

/** The model of one view, with what anywidget's models have of it: values, their observers, and messages.
 *
 * `values` are by name. `answers` holds, by the name of a message and then by the value that it asks for (as JSON, or
 * each item of a list), what the kernel would have sent: [content, buffers]. A message without a stored answer is
 * refused in the words of `reason`, unless `handlers` has a function for it, of the value.
 */
export class SavedModel {
  /** @param {SavedValues} values
   * @param {Answers} answers
   * @param {string} reason */
  constructor(values, answers, reason) {
    /** @type {SavedValues} */
    this.values = { ...values, unavailable: reason };
    this.answers = answers;
    /** @type {Record<string, MessageHandler>} */
    this.handlers = {};
    /** @type {Map<string, Observer[]>} */
    this.observers = new Map();
  }

  /** @type {<Name extends keyof SavedValues>(name: Name) => SavedValues[Name]} */
  get(name) {
    return this.values[name];
  }

  /** @type {<Name extends keyof SavedValues>(name: Name, value: SavedValues[Name]) => void} */
  set(name, value) {
    if (this.values[name] === value) return;
    this.values[name] = value;
    this.call(`change:${name}`);
  }

  /** Nobody is told: there is no kernel. */
  save_changes() {}

  /** @type {(events: string, observer: Observer) => void} */
  on(events, observer) {
    for (const event of events.split(" ")) this.observers.set(event, [...(this.observers.get(event) ?? []), observer]);
  }

  /** @type {(events: string, observer: Observer) => void} */
  off(events, observer) {
    for (const event of events.split(" ")) {
      this.observers.set(event, (this.observers.get(event) ?? []).filter((each) => each !== observer));
    }
  }

  /** @type {(event: string, content?: object, buffers?: Bytes[]) => void} */
  call(event, content = {}, buffers = []) {
    for (const observer of this.observers.get(event) ?? []) observer(content, buffers);
  }

  /** Answer a message as the kernel would: later, and with a last word if the page waits for one.
   * @type {(message: SavedMessage) => void} */
  send(message) {
    setTimeout(() => {
      for (const [name, value] of Object.entries(message)) {
        if (name in this.handlers) this.handlers[name](value);
        else if (name !== "asked") this.answer(name, value); // a number, by which the page knows the answer
      }
      if (message.asked) this.call("msg:custom", { answered: message.asked }, []);
    });
  }

  /** @type {(name: string, value: unknown) => void} */
  answer(name, value) {
    for (const item of Array.isArray(value) ? value : [value]) {
      const stored = this.answers[name]?.[JSON.stringify(item)];
      this.call("msg:custom", ...(stored ?? [{ refused: this.values.unavailable }, []]));
    }
  }
}
