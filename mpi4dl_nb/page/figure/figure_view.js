// An image with alt text, which the kernel replaces.

import { followModel, makeRender } from "../shared/view_life.js";

/** @type {(room: Room<FigureValues>) => void} */
function showFigure({ model, el, signal }) {
  const frame = document.createElement("div"), night = document.createElement("i");
  const image = document.createElement("img");
  frame.className = "mpi4dl-drawing";
  image.className = "mpi4dl-figure";
  frame.append(image, night);
  el.classList.add("mpi4dl-figure-room");
  el.append(frame);

  let url = "";
  const show = () => {
    URL.revokeObjectURL(url);
    url = URL.createObjectURL(new Blob([model.get("png")], { type: "image/png" }));
    image.src = url;
    night.style.clipPath = model.get("paper");
  };
  const describe = () => {
    image.alt = model.get("alt");
    image.title = model.get("tip");
  };
  show();
  describe();
  followModel(model, { "change:png change:paper": show, "change:alt change:tip": describe }, signal);
  signal.addEventListener("abort", () => URL.revokeObjectURL(url));
}

export default { render: makeRender(showFigure) };
