// Fills of bars whose kinds are told apart by texture as well as by colour: the hatches of the figures, as patterns.

import { DARK, getContext, WHITE } from "./canvas.js";

const TILE = 8; // px

/** @type {Record<string, (draw: HatchStrokes) => void>} */
const SHAPES = {
  "/": (draw) => draw.line(-2, 10, 10, -2, -2, 2, 2, -2, 6, 10, 10, 6),
  "\\": (draw) => draw.line(-2, -2, 10, 10, -2, 6, 2, 10, 6, -2, 10, 2),
  "|": (draw) => draw.line(2, 0, 2, 8, 6, 0, 6, 8),
  "-": (draw) => draw.line(0, 2, 8, 2, 0, 6, 8, 6),
  "+": (draw) => draw.line(4, 0, 4, 8, 0, 4, 8, 4),
  x: (draw) => draw.line(0, 0, 8, 8, 8, 0, 0, 8),
  ".": (draw) => draw.dots(0.9, 2, 2, 6, 6),
  o: (draw) => draw.rings(1.8, 4, 4),
  "*": (draw) => draw.dots(1.2, 4, 4),
};

/** Return whether a colour of a figure is its paper, which on a page has the colour of the page.
 * @type {(colour: string) => boolean} */
export function isPaper(colour) {
  return colour.toLowerCase() === "#ffffff";
}

/** Return the colour of marks and letters on a colour `#rrggbb`: dark or light, whichever has more contrast.
 * @type {(colour: string) => string} */
export function pickInk(colour) {
  const [red, green, blue] = [1, 3, 5].map((at) => (parseInt(colour.slice(at, at + 2), 16) / 255) ** 2.2);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? DARK : WHITE;
}

/** Draw one tile of a hatch into a context whose unit is a px: `colour` below, the hatch in `ink`.
 * @type {(context: Context, hatch: string, colour: string, ink: string) => void} */
function drawTile(context, hatch, colour, ink) {
  context.fillStyle = colour;
  context.fillRect(0, 0, TILE, TILE);
  context.strokeStyle = context.fillStyle = ink;
  context.lineWidth = 0.9;
  /** @type {(paint: () => void) => (radius: number, ...places: number[]) => void} */
  const circles = (paint) => (radius, ...places) => {
    for (let at = 0; at < places.length; at += 2) {
      context.beginPath();
      context.arc(places[at], places[at + 1], radius, 0, 7);
      paint();
    }
  };
  /** @type {(...ends: number[]) => void} */
  const line = (...ends) => {
    context.beginPath();
    for (let at = 0; at < ends.length; at += 4) {
      context.moveTo(ends[at], ends[at + 1]);
      context.lineTo(ends[at + 2], ends[at + 3]);
    }
    context.stroke();
  };
  SHAPES[hatch[0]]?.({ line, dots: circles(() => context.fill()), rings: circles(() => context.stroke()) });
}

/** Return the tile of a look { colour, hatch }, `scale` pixels per px; `paper` and `ink` are the page's colours.
 * @type {(look: Look, paper: string, ink: string, scale: number) => HTMLCanvasElement} */
function makeTile(look, paper, ink, scale) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = Math.round(TILE * scale);
  const context = getContext(tile);
  context.scale(tile.width / TILE, tile.height / TILE);
  const marks = isPaper(look.colour) ? ink : pickInk(look.colour);
  drawTile(context, look.hatch, isPaper(look.colour) ? paper : look.colour, fadeInk(marks));
  return tile;
}

// Marks are softer than the figure's, which is looked at from farther away than a page.
/** @type {(colour: string) => string} */
function fadeInk(colour) {
  return `color-mix(in srgb, ${colour} 55%, transparent)`;
}

/** Fills for all looks, made again only if the page's colours or its pixels per px change. */
export class Textures {
  /** @param {Look[]} looks */
  constructor(looks) {
    this.looks = looks;
    this.made = "";
    /** @type {string[]} */
    this.plain = [];
    /** @type {CanvasPattern[]} */
    this.filled = [];
    this.size = TILE;
  }

  /** Return [fills with texture, plain fills], by look, whose texture is moved by `shift` px.
   * @type {(context: Context, theme: Theme, scale: number, shift: number) => [CanvasPattern[], string[]]} */
  prepare(context, theme, scale, shift) {
    const wanted = `${theme.paper} ${theme.ink} ${scale}`;
    if (wanted !== this.made) {
      this.made = wanted;
      this.plain = this.looks.map(({ colour }) => (isPaper(colour) ? theme.paper : colour));
      const tiles = this.looks.map((look) => makeTile(look, theme.paper, theme.ink, scale));
      this.size = tiles[0].width;
      // Only of a canvas without pixels there is none.
      this.filled = tiles.map((tile) => /** @type {CanvasPattern} */ (context.createPattern(tile, "repeat")));
    }
    const matrix = new DOMMatrix([TILE / this.size, 0, 0, TILE / this.size, shift % TILE, 0]);
    for (const fill of this.filled) fill.setTransform(matrix);
    return [this.filled, this.plain];
  }
}

/** Return the CSS background of a look, for a legend.
 * @type {(look: Look, paper: string, ink: string) => string} */
export function makeSwatch(look, paper, ink) {
  return `url(${makeTile(look, paper, ink, 2).toDataURL()}) 0 0 / ${TILE}px ${TILE}px`;
}
