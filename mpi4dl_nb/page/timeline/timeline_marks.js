// Marks on a timeline, on a canvas of their own above the bars: what is pointed at and what is selected.

import { strokeCasedRectangle } from "../shared/canvas.js";

/** Draw the marks of a scene. The context's unit is a px of the page.
 * @type {(context: Context, scene: DrawnScene) => void} */
export function drawMarks(context, scene) {
  const { layout, theme, cursor, events } = scene;
  context.clearRect(0, 0, layout.width, layout.height);
  context.save();
  context.beginPath();
  context.rect(layout.left - 2, layout.ruler, layout.plot + 4, layout.height - layout.ruler);
  context.clip();
  if (cursor >= layout.left && cursor <= layout.left + layout.plot) {
    context.fillStyle = theme.ink;
    context.globalAlpha = 0.35;
    context.fillRect(Math.round(cursor), layout.ruler, 1, layout.height - layout.ruler);
    context.globalAlpha = 1;
  }
  const partner = scene.hovered >= 0 && scene.hovered < events.measured ? scene.matches[scene.hovered] : -1;
  outlineEvent(context, scene, partner, 1);
  outlineEvent(context, scene, scene.hovered, 1.5);
  outlineEvent(context, scene, scene.selected, 3);
  context.restore();
}

// In ink with an edge of paper, which is seen on bars of any colour.
/** @type {(context: Context, scene: DrawnScene, event: number, width: number) => void} */
function outlineEvent(context, { events, words, layout, span, scroll, theme }, event, width) {
  if (event < 0) return;
  const lane = event >= events.measured ? 2 : words.work[events.kind[event]] ? 0 : 1;
  const scale = layout.plot / (span.end - span.start);
  const left = layout.left + Math.max((events.start[event] - span.start) * scale, -9);
  const right = layout.left + Math.min((events.end[event] - span.start) * scale, layout.plot + 9);
  if (right < layout.left || left > layout.left + layout.plot) return;
  const top = layout.ruler + events.row[event] * layout.rowHeight - scroll + layout.lanes[lane].top;
  const bottom = top + layout.lanes[lane].height;
  strokeCasedRectangle(context, [top, left, bottom, Math.max(right, left + 2)], theme.ink, width, theme.paper);
}
