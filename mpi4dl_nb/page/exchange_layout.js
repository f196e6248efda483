// Where the ranks of a step, and the values that they hold, are drawn: rectangles are [left, top, width, height] in px.

const BOX_GAP = 44, BOX_HEAD = 24, CELL_HEAD = 17, CELL_GAP = 7;

/** Return `{ high, boxes, cells }`: a box for each stage, and in it a cell for each rank, arranged as in the image.
 *
 * `setup` is what the kernel tells of the step; the boxes fill `wide` px, or `most` px of height if these are less.
 */
export function placeRanks(setup, wide, most) {
  const aspect = Math.min(Math.max(setup.size[1] / setup.size[0], 0.5), 2.2);
  const count = setup.boxes.length;
  const replicas = 1 + Math.max(...setup.boxes.map((box) => box.replica));
  let best = { size: -1 };
  for (let across = 1; across <= count; across++) {
    if (replicas > 1 && across % (count / replicas) && (count / replicas) % across) continue;
    const rows = Math.ceil(count / across);
    const room = [(wide - BOX_GAP * (across - 1)) / across, most / rows - BOX_HEAD];
    const size = Math.min(room[0] / aspect, room[1]);
    if (size > best.size) best = { size, across, rows };
  }
  const high = Math.max(60, best.size), box = [high * aspect, high];
  const used = best.across * box[0] + (best.across - 1) * BOX_GAP;
  const boxes = setup.boxes.map((each, index) => [
    (wide - used) / 2 + (index % best.across) * (box[0] + BOX_GAP),
    Math.floor(index / best.across) * (high + BOX_HEAD) + BOX_HEAD,
    ...box,
  ]);
  const cells = setup.ranks.map(({ box: index, row, col }) => {
    const [left, top, width, height] = boxes[index];
    const { rows, cols } = setup.boxes[index];
    const gap = Math.min(CELL_GAP, width / cols / 6, height / rows / 6);
    return [
      left + (width / cols) * col + gap / 2, top + (height / rows) * row + gap / 2,
      width / cols - gap, height / rows - gap,
    ];
  });
  return { high: best.rows * (high + BOX_HEAD) + 6, boxes, cells };
}

/** Return the height of the line above a cell's values that names its rank; 0 where the cell is too small for it. */
export function getCellHead(cell) {
  return cell[3] > 46 ? CELL_HEAD : 0;
}

/** Return for each rank that shows values `{ rectangle, scale: [x, y], group, panel }`; other ranks are undefined.
 *
 * The panels of a group have one scale, so that their tiles read as one picture.
 */
export function placePanels(meta, cells) {
  const placed = [];
  for (const group of meta.groups) {
    const rooms = group.panels.map((panel) => getRoom(cells[panel.rank]));
    const sizes = group.panels.map(({ held }) => [held[3] - held[1], held[2] - held[0]]);
    const shared = Math.min(...group.panels.map((panel, at) => fitRoom(sizes[at], rooms[at])));
    group.panels.forEach((panel, at) => {
      const [left, top, width, height] = rooms[at], [wide, high] = sizes[at];
      const scale = panel.square ? [shared, shared] : [width / wide, Math.min(height / high, 0.5 * height)];
      const size = [wide * scale[0], high * scale[1]];
      const rectangle = [left + (width - size[0]) / 2, top + (height - size[1]) / 2, ...size];
      placed[panel.rank] = { rectangle, scale, group, panel };
    });
  }
  return placed;
}

function getRoom([left, top, width, height]) {
  const head = getCellHead([left, top, width, height]), rim = Math.min(4, width / 12);
  return [left + rim, top + head + rim / 2, width - 2 * rim, height - head - rim];
}

function fitRoom([wide, high], [, , width, height]) {
  return Math.min(width / wide, height / high);
}

/** Return where the tile [top, left, bottom, right] of a value is drawn on a rank: within its panel's scale, also
 * beyond what it holds. A rank that shows another value has the tile in the middle of its cell.
 */
export function locateTile(place, cell, tile, size) {
  const [top, left, bottom, right] = tile;
  if (place && place.group.size.length === 2 && fitsValue(tile, place.group.size)
      && (!size || size.join() === place.group.size.join())) {
    const { rectangle, scale, panel } = place;
    return [
      rectangle[0] + (left - panel.held[1]) * scale[0], rectangle[1] + (top - panel.held[0]) * scale[1],
      (right - left) * scale[0], (bottom - top) * scale[1],
    ];
  }
  const room = getRoom(cell), wide = Math.max(1, right - left), high = Math.max(1, bottom - top);
  const scale = 0.5 * fitRoom([wide, high], room);
  const box = [Math.max(8, wide * scale), Math.max(8, high * scale)];
  return [room[0] + (room[2] - box[0]) / 2, room[1] + (room[3] - box[1]) / 2, ...box];
}

function fitsValue([top, left, bottom, right], [high, wide]) {
  return top >= 0 && left >= 0 && bottom <= high && right <= wide;
}

/** Return `{ rank, row, col }` of the pixel of a value under a point; null where there is none. */
export function findPixel(placed, x, y) {
  for (const [rank, place] of placed.entries()) {
    if (!place) continue;
    const { rectangle: [left, top, width, height], scale, panel } = place;
    if (x < left || y < top || x >= left + width || y >= top + height) continue;
    return {
      rank,
      row: panel.held[0] + Math.floor((y - top) / scale[1]),
      col: panel.held[1] + Math.floor((x - left) / scale[0]),
    };
  }
  return null;
}

/** Whether the pixel (row, col) lies in a tile [top, left, bottom, right]. */
export function isInside([top, left, bottom, right], row, col) {
  return row >= top && row < bottom && col >= left && col < right;
}

/** Return what is beside `own` in `held`, as tiles: above and below over the whole width, then left and right. */
export function cutHalo(held, own) {
  const tiles = [
    [held[0], held[1], own[0], held[3]], [own[2], held[1], held[2], held[3]],
    [own[0], held[1], own[2], own[1]], [own[0], own[3], own[2], held[3]],
  ];
  return tiles.filter(([top, left, bottom, right]) => bottom > top && right > left);
}

/** Return the middle [x, y] of the cells of some ranks. */
export function findMiddle(cells, ranks) {
  const sums = ranks.map((rank) => cells[rank]).reduce(
    ([x, y], [left, top, width, height]) => [x + left + width / 2, y + top + height / 2], [0, 0]);
  return sums.map((sum) => sum / ranks.length);
}
