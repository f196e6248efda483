// A table with a radio button in each row. The arrow keys move the choice, as in any radio group.
function render({ model, el }) {
  el.className = "mpi4dl-choice-table";
  const group = `choice-${crypto.randomUUID?.() ?? Math.random()}`;

  const inputs = () => [...el.querySelectorAll("input[type=radio]")];
  const mark = () =>
    inputs().forEach((input) => {
      input.checked = Number(input.value) === model.get("index");
    });
  const show = () => {
    const focused = el.contains(document.activeElement);
    el.innerHTML = model.get("html");
    inputs().forEach((input) => {
      input.name = group;
      input.setAttribute("data-lm-suppress-shortcuts", "true"); // else JupyterLab handles the arrow keys
    });
    mark();
    if (focused) inputs().find((input) => input.checked)?.focus();
  };
  const choose = (event) => {
    model.set("index", Number(event.target.value));
    model.save_changes();
  };
  show();
  model.on("change:html", show);
  model.on("change:index", mark);
  el.addEventListener("change", choose);
  return () => {
    model.off("change:html", show);
    model.off("change:index", mark);
  };
}

export default { render };
