import assert from "node:assert/strict";
import test from "node:test";

import { chooseScaleBar, formatBytes, formatExtent } from "../../mpi4dl_nb/page/shared/format.js";
import { countPixels } from "../../mpi4dl_nb/page/shared/rectangles.js";
import { listGridLines, widenPiece } from "../../mpi4dl_nb/page/slicer/halo_shapes.js";
import { cutLayer, scalePosition } from "../../mpi4dl_nb/page/slicer/layer_sections.js";
import { LayerTable } from "../../mpi4dl_nb/page/slicer/layer_table.js";
import { describePlace, listTileLines } from "../../mpi4dl_nb/page/slicer/slicer_words.js";
import { VolumeTissue } from "../../mpi4dl_nb/page/slicer/volume_tissue.js";
import { TILE_PX, TileCache, chooseLevel, getTileRectangle, listTiles } from "../../mpi4dl_nb/page/slicer/pyramid.js";

test("bytes are written as the kernel writes them", () => {
  assert.deepEqual([12, 3072, 1 << 20, 1023 * 1024].map(formatBytes), ["12 bytes", "3.0 KB", "1.0 MB", "1.0 MB"]);
});

test("a scale bar has a round length and fits", () => {
  for (const scale of [0.001, 0.37, 1, 55]) {
    for (const microns of [null, 0.499]) {
      const [length, label] = chooseScaleBar(scale, 150, microns ?? undefined);
      assert.ok(length <= 150 && length > 50, `${length} ${label}`);
      assert.match(label, /^[125][0,]*(\.\d+)? |^0\.0*[125] /);
    }
  }
  assert.equal(formatExtent(2, 3, 0.5), "2 × 3 px (1 µm × 1.5 µm)");
});

test("a thin halo grows away from its tile, until it can be seen", () => {
  const own = [0, 0, 100, 100];
  assert.deepEqual(widenPiece([0, 100, 100, 100.5], own), { edges: [0, 100, 100, 103], enlarged: 6 });
  assert.deepEqual(widenPiece([-0.5, -0.5, 0, 0], own), { edges: [-3, -3, 0, 0], enlarged: 6 });
  assert.equal(widenPiece([0, 100, 100, 140], own).enlarged, 1);
});

test("the level of a view has a pixel for each pixel of the screen", () => {
  assert.deepEqual([8, 1, 0.51, 0.5, 0.26, 0.001].map((scale) => chooseLevel(6, scale)), [0, 0, 0, 1, 1, 5]);
});

test("the tiles of a view cover it, once, from the middle on", () => {
  const size = [1000, 700];
  const visible = [100, -50, 720, 900];
  const tiles = listTiles(0, size, visible);
  const area = tiles.map((tile) => countPixels(getTileRectangle(tile, size))).reduce((sum, count) => sum + count, 0);
  assert.equal(area, 1000 * 700);
  assert.equal(new Set(tiles.map(String)).size, tiles.length);
  assert.deepEqual(tiles[0].slice(1), [1, 1]);
  assert.equal(TILE_PX, 256);
});

test("a cache asks once, keeps what was used last, and finds coarser tiles", () => {
  const asked = [];
  const cache = new TileCache((tiles) => asked.push(...tiles), 2);
  cache.want([[0, 5, 3], [1, 2, 1]]);
  cache.want([[0, 5, 3]]);
  assert.equal(asked.length, 2);
  cache.put([1, 2, 1], "coarse");
  assert.equal(cache.findAncestor([0, 5, 3], 4).image, "coarse");
  cache.put([0, 0, 0], "one");
  cache.get([1, 2, 1]);
  cache.put([0, 0, 1], "two");
  assert.equal(cache.get([0, 0, 0]), undefined);
  assert.equal(cache.get([1, 2, 1]), "coarse");
});

test("a tile that cannot be read is asked for again only on request", () => {
  const asked = [], cache = new TileCache((tiles) => asked.push(...tiles));
  cache.want([[0, 0, 0], [0, 0, 1]]);
  cache.fail([0, 0, 0]);
  cache.want([[0, 0, 0], [0, 0, 1]]);
  assert.equal(asked.length, 2);
  cache.retry();
  cache.want([[0, 0, 0], [0, 0, 1]]);
  assert.deepEqual(asked.slice(2), [[0, 0, 0]]);
});

/** Two tiles beside each other on 2 x 4 pixels, each borrowing a column; outputs see one pixel around them. */
function makeTable(more = {}) {
  const facts = { ranks: [3, 4], out_rows: 2, out_columns: 4, rows: 2, columns: 4, ...more };
  return new LayerTable(facts, {
    owned: [0, 0, 2, 2, 0, 2, 2, 4], windows: [0, 0, 2, 3, 0, 1, 2, 4],
    sources: [1, 0], targets: [0, 1], pieces: [0, 2, 2, 3, 0, 1, 2, 2],
    seen: [0, 0, 4, 6, 0, 2, 4, 8], fields: [[0, 3, 1, 4], [0, 2, 0, 3, 1, 4, 2, 4]],
  });
}

test("a layer knows owners, borrowers, widths and fields", () => {
  const table = makeTable();
  assert.deepEqual([table.findOwner(1, 1), table.findOwner(0, 2), table.findOwner(2, 0)], [0, 1, -1]);
  assert.deepEqual([table.findBorrowers(0, 2), table.findBorrowers(0, 1), table.findBorrowers(0, 0)], [[0], [1], []]);
  assert.deepEqual(table.get("windows", 1), [0, 1, 2, 4]);
  assert.deepEqual(table.getField(1, 3), [1, 2, 4, 4]);
  assert.deepEqual(table.get("seen", 1), [0, 2, 4, 8]);
});

test("a place is told with its owner, its borrowers and what its output depends on", () => {
  const place = { at: [1, 2], values: [7, 8, 9], names: ["row", "column"], pixel: [0, 2], out: [1, 3] };
  const axes = ["rows", "columns"];
  const table = makeTable({ operator: "conv2d", pixel_bytes: 12 });
  assert.deepEqual(describePlace({ microns: 0.5, axes }, table, place), [
    "picture: row 1, column 2 (0.5 µm, 1 µm)", "red, green, blue: 7, 8, 9", "layer: row 0, column 2",
    "owner: tile 1, rank 4", "borrowed by rank 3: 12 bytes", "the output here depends on 3 × 2 px (1.5 µm × 1 µm)",
  ]);
  const alone = describePlace({ microns: null, axes }, table, { ...place, values: null, pixel: [0, 0] });
  assert.deepEqual(alone.slice(0, 4), [
    "picture: row 1, column 2", "layer: row 0, column 0", "owner: tile 0, rank 3", "no tile borrows it"]);
  const computed = makeTable({ operator: "conv2d", computed: true });
  assert.equal(describePlace({ axes }, computed, place)[4], "computed again by rank 3");
});

test("remarks on a tile are those of the stage of its layer", () => {
  const remarks = { 0: [["first stage"], []], 1: [["second stage"], []] };
  const lines = [0, 1].map((stage) => listTileLines(makeTable({ stage, words: [["owns"], []] }), 0, "layer", remarks));
  assert.deepEqual(lines, [["owns", "first stage"], ["owns", "second stage"]]);
});

test("grid lines lie within what is shown", () => {
  assert.deepEqual(listGridLines(10, 25, 25, 56), [25, 35, 45, 55]);
  assert.deepEqual(listGridLines(10, -25, 0, 26), [5, 15, 25]);
});

/** Two tiles of a volume of 4 x 2 x 6 pixels, the second behind the first; each borrows a plane of the other. */
const VOLUME = {
  facts: { ranks: [0, 1], sizes: [4, 2, 6], out_sizes: [4, 2, 6], moves: ["one", "two"] },
  numbers: {
    owned: [0, 0, 0, 2, 2, 6, 2, 0, 0, 4, 2, 6], windows: [0, 0, 0, 3, 2, 6, 1, 0, 0, 4, 2, 6],
    sources: [1, 0], targets: [0, 1], pieces: [2, 0, 0, 3, 2, 6, 1, 0, 0, 2, 2, 6],
    seen: [0, 0, 0, 6, 4, 12, 2, 0, 0, 8, 4, 12], fields: [[0, 1], [2, 3], [4, 5]].map((each) => Int32Array.from(each)),
  },
};

/** Return the section along two axes at a position of the volume, which is half as large as the picture. */
function cut(axes, at) {
  const section = { axes, across: [0, 1, 2].filter((axis) => !axes.includes(axis)) };
  return cutLayer(VOLUME.facts, VOLUME.numbers, section, at, at.map((px) => 2 * px), [8, 4, 12]);
}

test("a section of a volume has the rectangles of the boxes that it meets", () => {
  const plane = cut([1, 2], [1, 0, 0]);
  assert.deepEqual([plane.facts.rows, plane.facts.columns, plane.facts.whole], [2, 6, [4, 12]]);
  assert.deepEqual([plane.get("owned", 0), plane.get("owned", 1)], [[0, 0, 2, 6], [0, 0, 0, 0]]);
  assert.deepEqual([plane.findOwner(1, 5), plane.findBorrowers(1, 5)], [0, [1]]);
  assert.deepEqual(plane.getBorrowed(1).map(({ rectangle, text }) => [rectangle, text]), [[[0, 0, 2, 6], "two"]]);
  assert.deepEqual(plane.getField(0, 0), [2, 4, 3, 5]);
  const upright = cut([0, 2], [1, 1, 0]);
  assert.deepEqual([upright.get("owned", 0), upright.get("owned", 1)], [[0, 0, 2, 6], [2, 0, 4, 6]]);
  assert.deepEqual(upright.get("seen", 1), [2, 0, 8, 12]);
});

test("a signal is one row", () => {
  const numbers = { ...VOLUME.numbers, owned: [0, 3, 3, 6], windows: [0, 4, 2, 6], pieces: [3, 4, 2, 3], seen: [0, 4, 2, 6] };
  const facts = { ranks: [0, 1], sizes: [6], out_sizes: [] };
  const table = cutLayer(facts, numbers, { axes: [0], across: [] }, [0], [0], [6]);
  assert.deepEqual([table.get("owned", 1), table.findOwner(0, 4), table.facts.out_rows], [[0, 3, 1, 6], 1, 0]);
});

test("a position is that of the same place in a layer of another size", () => {
  assert.deepEqual(scalePosition([9, 0, 27], [20, 40, 56], [10, 20, 28]), [4, 0, 13]);
});

test("about which number is read from the grey of a volume", () => {
  const tissue = new VolumeTissue([2, 2, 2], Uint8Array.from([0, 0, 0, 0, 0, 255, 0, 51]));
  assert.deepEqual([[1, 0, 1], [1, 1, 1], [0, 0, 0]].map((at) => tissue.read(at, [-1, 4])), [4, 0, -1]);
  assert.deepEqual([tissue.isExact([2, 2, 2]), tissue.isExact([4, 2, 2])], [true, false]);
});
