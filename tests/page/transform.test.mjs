import assert from "node:assert/strict";
import test from "node:test";

import { fitRectangle, fitTransform, getVisible, keepInView, panBy, toScene, toScreen, zoomAt }
  from "../../mpi4dl_nb/page/slicer/transform.js";

const close = (found, wanted) => found.forEach((value, at) => assert.ok(Math.abs(value - wanted[at]) < 1e-9, `${found}`));

test("the scene under the pointer stays in place while zooming", () => {
  let transform = { scale: 0.37, x: -120.5, y: 44 };
  const before = toScene(transform, 301, 77);
  for (const factor of [1.2, 3, 0.1]) transform = zoomAt(transform, 301, 77, factor, [0.01, 64]);
  close(toScene(transform, 301, 77), before);
});

test("zooming stops at its limits and does not move there", () => {
  const transform = zoomAt({ scale: 8, x: 3, y: 5 }, 100, 100, 1000, [0.1, 8]);
  assert.deepEqual(transform, { scale: 8, x: 3, y: 5 });
});

test("a picture fits into a view in both directions", () => {
  for (const view of [[800, 300], [200, 900]]) {
    const transform = fitTransform([640, 480], view);
    const [left, top] = toScreen(transform, 0, 0);
    const [right, bottom] = toScreen(transform, 640, 480);
    assert.ok(left >= -1e-9 && top >= -1e-9 && right <= view[0] + 1e-9 && bottom <= view[1] + 1e-9);
    assert.ok(Math.abs(left) < 1e-9 || Math.abs(top) < 1e-9);
  }
});

test("a rectangle of the scene is centred", () => {
  const transform = fitRectangle([50, 100, 60, 120], [400, 400], 10);
  close(toScreen(transform, 110, 55), [200, 200]);
  const [top, left] = getVisible(transform, [400, 400]);
  close([left, top], toScene(transform, 0, 0));
});

test("panning cannot lose the scene", () => {
  const lost = panBy(fitTransform([100, 100], [500, 500]), 1e6, -1e6);
  const kept = keepInView(lost, [100, 100], [500, 500]);
  const [left, top] = toScreen(kept, 0, 0);
  const [right, bottom] = toScreen(kept, 100, 100);
  assert.ok(left <= 250 && right >= 250 && top <= 250 && bottom >= 250);
});
