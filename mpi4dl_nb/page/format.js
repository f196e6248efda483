// Numbers for people, as engines/formatting.py writes them.

const BYTE_UNITS = ["KB", "MB", "GB", "TB"];

/** Return a number of bytes with a binary unit: "12 bytes", "3.0 KB". */
export function formatBytes(count) {
  if (count < 1024) return `${count} bytes`;
  let size = count / 1024;
  let unit = 0;
  while (size >= 1000 && unit < BYTE_UNITS.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${size.toFixed(1)} ${BYTE_UNITS[unit]}`;
}

/** Return a length in micrometres with its unit: "3.49 µm", "1.11 mm". */
export function formatMicrons(microns) {
  return microns < 1000 ? `${Number(microns.toPrecision(3))} µm` : `${Number((microns / 1000).toPrecision(3))} mm`;
}

/** Return rows × columns in pixels of the picture, and in micrometres if a pixel's size is known. */
export function formatExtent(rows, columns, microns) {
  const size = `${rows.toLocaleString("en")} × ${columns.toLocaleString("en")} px`;
  return microns ? `${size} (${formatMicrons(rows * microns)} × ${formatMicrons(columns * microns)})` : size;
}

/** Return [length, label] of a scale bar: the longest round length of at most `room` px of the screen. */
export function chooseScaleBar(scale, room, microns) {
  const unit = microns ?? 1; // of one pixel of the picture
  const most = (room / scale) * unit;
  const power = 10 ** Math.floor(Math.log10(most));
  const value = [5, 2, 1].map((digit) => digit * power).find((each) => each <= most) ?? power;
  return [(value / unit) * scale, microns ? formatMicrons(value) : `${value.toLocaleString("en")} px`];
}
