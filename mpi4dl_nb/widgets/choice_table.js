// A table with a radio button in each row. The arrow keys move the choice, as in any radio group. A summary folds it.
function render({ model, el }) {
  const fold = document.createElement("details"), summary = document.createElement("summary");
  const table = document.createElement("div");
  table.className = "mpi4dl-choice-table";
  const shape = () => {
    summary.textContent = model.get("summary");
    if (!summary.textContent) el.replaceChildren(table);
    else if (!fold.contains(table)) {
      fold.replaceChildren(summary, table);
      el.replaceChildren(fold);
    }
  };
  const group = `choice-${crypto.randomUUID?.() ?? Math.random()}`;

  const inputs = () => [...el.querySelectorAll("input[type=radio]")];
  const mark = () =>
    inputs().forEach((input) => {
      input.checked = Number(input.value) === model.get("index");
    });
  const show = () => {
    const focused = el.contains(document.activeElement);
    table.innerHTML = model.get("html");
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
  shape();
  show();
  model.on("change:summary", shape);
  model.on("change:html", show);
  model.on("change:index", mark);
  el.addEventListener("change", choose);
  return () => {
    model.off("change:summary", shape);
    model.off("change:html", show);
    model.off("change:index", mark);
  };
}

export default { render };
