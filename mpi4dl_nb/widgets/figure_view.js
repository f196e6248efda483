// An image with alt text, which the kernel replaces.
function render({ model, el }) {
  const image = document.createElement("img");
  image.className = "mpi4dl-figure";
  el.append(image);

  let url = "";
  const show = () => {
    URL.revokeObjectURL(url);
    url = URL.createObjectURL(new Blob([model.get("png")], { type: "image/png" }));
    image.src = url;
  };
  const describe = () => {
    image.alt = model.get("alt");
    image.title = model.get("tip");
  };
  show();
  describe();
  model.on("change:png", show);
  model.on("change:alt change:tip", describe);
  return () => {
    model.off("change:png", show);
    model.off("change:alt change:tip", describe);
    URL.revokeObjectURL(url);
  };
}

export default { render };
