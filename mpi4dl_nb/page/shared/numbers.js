// Numbers: those that the kernel has sent as bytes, and limits.

/** Return a value, or the limit that it exceeds; `high` where the limits cross.
 * @type {(value: number, low: number, high: number) => number} */
export function clamp(value, low, high) {
  return Math.min(Math.max(value, low), high);
}

/** Return a copy of the bytes of a DataView, which may begin at any byte of its buffer, as arrays of numbers may not.
 * @type {(view?: Bytes | null) => ArrayBuffer} */
export function copyBytes(view) {
  return view ? view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength) : new ArrayBuffer(0);
}

/** Return the 32-bit integers of a DataView.
 * @type {(view?: Bytes | null) => Int32Array<ArrayBuffer>} */
export function readIntegers(view) {
  return new Int32Array(copyBytes(view));
}

/** Return the float32 numbers of a DataView.
 * @type {(view?: Bytes | null) => Float32Array<ArrayBuffer>} */
export function readFloats(view) {
  return new Float32Array(copyBytes(view));
}
