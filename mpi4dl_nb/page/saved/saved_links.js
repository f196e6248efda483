// The views of one widget in a saved page follow each other, as the kernel lets them in a notebook.

import { SavedPlans } from "./saved_plans.js";

/** Let values of different views be the same: `same` lists them, each as [number of the view, name].
 * @type {(models: SavedModel[], same: [number, string][][]) => void} */
function linkSame(models, same) {
  for (const group of same) {
    for (const [from, name] of group) {
      models[from].on(`change:${name}`, () => {
        for (const [to, other] of group) models[to].set(other, models[from].get(name));
      });
    }
  }
}

/** The selection of a workbench: a rank, shown by its tile on the image, its row in the timeline, and its memory.
 *
 * The models are those of the slicer, of the timeline if the training was `timed`, and of the memory. `ranks` lists the ranks of each layer by tile,
 * `layers` the layer of each event (-1 for none), and `pictures` the memory: of all ranks together, then of each.
 */
class Selection {
  /** @param {SavedModel[]} models
   * @param {SelectionLinks} links */
  constructor(models, { timed, ranks, layers, pictures }) {
    this.ranks = ranks;
    this.layers = layers;
    this.slicer = models[0];
    this.timeline = timed ? models[1] : undefined;
    this.memory = models[models.length - 1];
    this.isFollowing = this.isAsked = false;
    this.pictures = pictures.map(([png, alt, paper]) => ({ png, alt, paper }));
    this.listen(this.slicer, ["layer", "tile"], () => this.followSlicer());
    const { timeline } = this;
    if (timeline) this.listen(timeline, ["selected", "rank"], () => this.followTimeline(timeline));
  }

  /** Call `follow` once after one or more of the values were set by a person, and not by another view.
   * @type {(model: SavedModel, names: string[], follow: () => void) => void} */
  listen(model, names, follow) {
    const observe = () => {
      if (this.isFollowing || this.isAsked) return;
      this.isAsked = true;
      queueMicrotask(() => {
        this.isAsked = false;
        this.isFollowing = true;
        follow();
        this.isFollowing = false;
      });
    };
    for (const name of names) model.on(`change:${name}`, observe);
  }

  followSlicer() {
    const rank = this.ranks[this.slicer.get("layer")][this.slicer.get("tile")];
    this.timeline?.set("rank", rank);
    this.showMemory(rank);
  }

  /** @type {(timeline: SavedModel) => void} */
  followTimeline(timeline) {
    const rank = timeline.get("rank"), event = timeline.get("selected");
    const named = event < 0 ? -1 : this.layers[event], wanted = named < 0 ? this.slicer.get("layer") : named;
    const other = this.ranks.findIndex((each) => each.includes(rank));
    const layer = this.ranks[wanted].includes(rank) || other < 0 ? wanted : other;
    this.slicer.set("layer", layer);
    if (this.ranks[layer].includes(rank)) this.slicer.set("tile", this.ranks[layer].indexOf(rank));
    this.showMemory(rank);
  }

  /** @type {(rank: number) => void} */
  showMemory(rank) {
    for (const [name, value] of Object.entries(this.pictures[rank + 1])) this.memory.set(name, value);
  }
}

/** Link the models of one widget's views, as `links` says.
 * @type {(models: SavedModel[], links: ViewLinks) => void} */
export function linkModels(models, { same, selection, plans }) {
  if (same) linkSame(models, same);
  if (selection) new Selection(models, selection);
  if (plans) new SavedPlans(models[0], plans);
}
