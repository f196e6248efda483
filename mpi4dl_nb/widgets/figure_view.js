// An image that sends the position of a click, as fractions of its width and height, and each accepted key that is pressed.
function render({ model, el }) {
  const image = document.createElement("img");
  image.className = "mpi4dl-figure";
  image.setAttribute("data-lm-suppress-shortcuts", "true"); // else JupyterLab handles the arrow keys
  el.append(image);

  let url = "";
  const show = () => {
    URL.revokeObjectURL(url);
    url = URL.createObjectURL(new Blob([model.get("png")], { type: "image/png" }));
    image.src = url;
  };
  const tell = () => {
    image.alt = model.get("alt");
    const keys = model.get("accepts");
    image.tabIndex = keys.length ? 0 : -1;
    image.title = model.get("tip") || (keys.length ? `keys: ${keys.join(" ")}` : "");
  };
  show();
  tell();
  model.on("change:png", show);
  model.on("change:alt change:accepts change:tip", tell);

  image.addEventListener("click", (event) => {
    const box = image.getBoundingClientRect();
    model.send({ point: [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height] });
  });
  image.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !model.get("accepts").includes(event.key)) return;
    event.preventDefault();
    event.stopPropagation();
    model.send({ key: event.key });
  });
  return () => {
    model.off("change:png", show);
    model.off("change:alt change:accepts change:tip", tell);
    URL.revokeObjectURL(url);
  };
}

export default { render };
