// Tables that the kernel has sent, as mpi4dl_nb/draw/packed_tables.py writes them.

/** @type {Record<string, new (bytes: ArrayBuffer, start: number, count: number) => object>} */
const VIEWS = { f4: Float32Array, f8: Float64Array, i4: Int32Array, u1: Uint8Array, bytes: DataView };

/** Return the lists and objects that were packed, with typed arrays of numbers and views of bytes.
 * @type {<Tables>(view: Bytes) => Tables} */
export function unpackTables(view) {
  // Its bytes may begin anywhere in their buffer, but the numbers of an array only at a multiple of their size.
  const bytes = view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength);
  const [length] = new Uint32Array(bytes, 0, 1), start = 8 + length;
  /** @type {(_: string, value: PackedArray | null) => unknown} */
  const revive = (_, value) => (value?.packed ? new VIEWS[value.packed](bytes, start + value.at, value.count) : value);
  return JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 8, length)), revive);
}
