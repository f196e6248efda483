// Numbers for people, as engines/formatting.py writes them.

/** @type {[string, number][]} */
const BYTE_UNITS = ["KB", "MB", "GB", "TB"].map((name, at) => [name, 1024 ** (at + 1)]);

/** Return [name, bytes] of the binary unit in which a number of bytes is written.
 * @type {(count: number) => [string, number]} */
export function chooseByteUnit(count) {
  if (count < 1024) return ["bytes", 1];
  return BYTE_UNITS.find(([, bytes]) => count < 1000 * bytes) ?? BYTE_UNITS[BYTE_UNITS.length - 1];
}

/** Return a number of bytes with a binary unit: "12 bytes", "3.0 KB".
 * @type {(count: number) => string} */
export function formatBytes(count) {
  const [name, bytes] = chooseByteUnit(count);
  return `${bytes === 1 ? count : (count / bytes).toFixed(1)} ${name}`;
}

/** Return a length in micrometres with its unit: "3.49 µm", "1.11 mm".
 * @type {(microns: number) => string} */
export function formatMicrons(microns) {
  return microns < 1000 ? `${Number(microns.toPrecision(3))} µm` : `${Number((microns / 1000).toPrecision(3))} mm`;
}

/** Return rows × columns in pixels of the picture, and in micrometres if a pixel's size is known.
 * @type {(rows: number, columns: number, microns?: number | null) => string} */
export function formatExtent(rows, columns, microns) {
  const size = `${rows.toLocaleString("en")} × ${columns.toLocaleString("en")} px`;
  return microns ? `${size} (${formatMicrons(rows * microns)} × ${formatMicrons(columns * microns)})` : size;
}

/** Return [length, label] of a scale bar: the longest round length of at most `room` px of the screen.
 * @type {(scale: number, room: number, microns?: number | null) => [number, string]} */
export function chooseScaleBar(scale, room, microns) {
  const unit = microns ?? 1; // of one pixel of the picture
  const most = (room / scale) * unit;
  const power = 10 ** Math.floor(Math.log10(most));
  const value = [5, 2, 1].map((digit) => digit * power).find((each) => each <= most) ?? power;
  return [(value / unit) * scale, microns ? formatMicrons(value) : `${value.toLocaleString("en")} px`];
}

/** The units of times, each with its seconds.
 * @type {[string, number][]} */
export const TIME_UNITS = [["s", 1], ["ms", 1e-3], ["µs", 1e-6]];

/** Return a duration with three digits and a unit: `12.3 ms`.
 * @type {(seconds: number) => string} */
export function formatDuration(seconds) {
  if (seconds === 0) return "0 s";
  const [unit, size] = TIME_UNITS.find(([, each]) => Math.abs(seconds) >= each) ?? TIME_UNITS[2];
  const value = seconds / size;
  return `${value.toFixed(Math.max(0, 3 - String(Math.trunc(Math.abs(value))).length))} ${unit}`;
}

/** Return a fraction as a percentage; a small positive one is not rounded to 0%.
 * @type {(share: number) => string} */
export function formatShare(share) {
  return share > 0 && share < 0.005 ? "under 1%" : `${Math.round(share * 100)}%`;
}
