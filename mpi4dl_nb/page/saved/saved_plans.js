// A configurator in a saved page: the plans that were computed when it was saved, in place of those of a kernel.

const OF_GRID = ["slice_method", "num_spatial_parts"];

/** The plans of a page. `rows` hold what the view shows of each: `values` are the texts of its controls by name. */
export class SavedPlans {
  /** @param {SavedModel} model
   * @param {PlanRow[]} rows */
  constructor(model, rows) {
    this.model = model;
    this.rows = rows;
    this.at = 0;
    model.handlers.set = (texts) => this.set(/** @type {PlanSettings} */ (texts));
    this.show(0);
  }

  /** What distinguishes a plan from others: its grid stands for the options that can say the same in several ways.
   * @type {(values: PlanSettings) => [string, PlanValue][]} */
  describe(values) {
    return Object.entries(values).filter(([name]) => !OF_GRID.includes(name));
  }

  /** The numbers of the plans that differ from the shown one in no other control than `name`.
   * @type {(name: string) => number[]} */
  findVariants(name) {
    const shown = this.describe(this.rows[this.at].values);
    /** @type {(values: PlanSettings) => boolean} */
    const isSame = (values) => shown.every(([other, text]) => other === name || String(values[other]) === String(text));
    return this.rows.map((_, number) => number).filter((number) => isSame(this.rows[number].values));
  }

  /** Show the plan with other values of some controls, or say which values there are.
   * @type {(texts: PlanSettings) => void} */
  set(texts) {
    for (const [name, text] of Object.entries(texts)) {
      const variants = this.findVariants(name);
      const wanted = variants.find((number) => String(this.rows[number].values[name]) === String(text));
      if (wanted === undefined) this.refuse(name, variants);
      else this.show(wanted);
    }
  }

  /** @type {(name: string, variants: number[]) => void} */
  refuse(name, variants) {
    const offered = [...new Set(variants.map((number) => this.format(this.rows[number].values[name])))];
    const text = `This page has ${name} ${offered.join(", ")} with the rest of this plan, and no others.`;
    this.model.set("status", { words: text });
    this.model.set("values", { ...this.model.get("values") }); // the control goes back
  }

  /** @type {(text: PlanValue) => string} */
  format(text) {
    return Array.isArray(text) ? text.join("x") : text === "" ? "none" : String(text);
  }

  /** @type {(number: number) => void} */
  show(number) {
    const { values, shape, blocks, loads, rank_groups: groups, gauges } = this.rows[number];
    const before = this.model.get("gauges").now ?? [];
    this.at = number;
    // What is drawn comes first, and its description last, as from a kernel.
    this.model.set("rank_groups", groups);
    this.model.set("blocks", blocks);
    this.model.set("shape", shape);
    this.model.set("loads", loads);
    this.model.set("gauges", { ...gauges, before });
    this.model.set("status", {});
    this.model.set("values", { ...this.model.get("values"), ...values });
    this.model.set("locked", this.findLocked());
  }

  /** The controls that lead to no plan of the page from the shown one, each with the reason.
   * @type {() => Record<string, string>} */
  findLocked() {
    const names = this.model.get("options").map(({ name }) => name);
    const reason = `${this.model.get("unavailable")} It has no plan with another value here and the rest of this plan.`;
    return Object.fromEntries(names.filter((name) => this.findVariants(name).length < 2).map((name) => [name, reason]));
  }
}
