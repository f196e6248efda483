// The script of a saved page: unpacks the parts that the page contains, and shows each with the code that also draws it
// in a notebook.

import { makeElement } from "../shared/elements.js";
import { unpackTables } from "../shared/tables.js";
import { SavedModel } from "./saved_model.js";
import { linkModels } from "./saved_links.js";

const DARK_SCHEME = "(prefers-color-scheme: dark)";

/** Return the object in a packed text: compressed, in base64. Throws if a byte of it is not what was saved.
 * @type {(text: string) => Promise<PackedPart>} */
async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return unpackTables(new DataView(await new Response(stream).arrayBuffer()));
}

/** Show a part of the page in its section. A part that is damaged says so, and the others are shown.
 * @type {(section: Element, makers: MakeView[], reason: string) => Promise<void>} */
async function showPart(section, makers, reason) {
  const room = /** @type {Element} */ (section.querySelector(".mpi4dl-saved-views"));
  try {
    const { views, links } = await unpack(section.querySelector("script")?.textContent ?? "");
    const models = views.map(({ values, answers }) => new SavedModel(values, answers, reason));
    linkModels(models, links);
    for (const [index, { code }] of views.entries()) {
      const el = makeElement("div");
      room.append(el); // first: before it is in the page, a view has no size
      await makers[code]().render({ model: models[index], el });
    }
  } catch (error) {
    const why = error instanceof Error ? error.message : error;
    const text = `⚠ This part of the page is damaged, and cannot be shown (${why}). Ask for the file again.`;
    room.replaceChildren(makeElement("p", { role: "alert", class: "mpi4dl-saved-damaged", text }));
  }
}

/** Resolve once the page has a size. In a notebook's frame it has none while the widget is live beside it.
 * @type {() => Promise<void>} */
async function awaitSize() {
  if (!innerWidth) await new Promise((resolve) => { addEventListener("resize", resolve, { once: true }); });
}

/** Show all parts of the page. `makers` are functions that return the module of a view, by its number.
 * @type {(makers: MakeView[], reason: string) => Promise<void>} */
async function showPage(makers, reason) {
  await awaitSize();
  const dark = matchMedia(DARK_SCHEME);
  const follow = () => document.body.setAttribute("data-jp-theme-light", String(!dark.matches));
  follow();
  dark.addEventListener("change", follow); // views draw anew when this attribute changes
  for (const section of document.querySelectorAll(".mpi4dl-saved-part")) await showPart(section, makers, reason);
  document.body.setAttribute("data-shown", "true");
}

export default { showPage };
