"""Tables of numbers: a page reads what the kernel has packed, wherever their bytes begin."""

from __future__ import annotations

import json

import numpy as np

from mpi4dl_nb.draw.packed_tables import pack_columns, pack_tables
from mpi4dl_nb.widgets.page_modules import FOLDER
from tests.page.test_page_modules import run_node
from tests.unpacking import unpack_tables

READ = """
import assert from "node:assert/strict";
import {{ unpackTables }} from {module};
const bytes = Uint8Array.from({packed});
const [named, last, plain] = unpackTables(new DataView(bytes.buffer, 3));
assert.deepEqual(named.rows, Int32Array.from([1, 2, 3, 4, 5, 6]));
assert.deepEqual(named.times, Float64Array.from([0.1, -2]));
assert.deepEqual([plain.getUint8(1), plain.byteLength], [8, 2]);
assert.deepEqual([named.words, named.none.length, last], ["µ", 0, Float32Array.from([NaN, Infinity])]);
"""


def test_a_page_reads_what_was_packed():
    named = {"rows": np.array([[1, 2, 3], [4, 5, 6]], "i4"), "times": np.array([0.1, -2.0]), "words": "µ"}
    packed = pack_tables([named | {"none": np.zeros(0, "u1")}, np.array([np.nan, np.inf], "f4"), b"\7\10"])
    module = json.dumps(FOLDER.joinpath("shared/tables.js").as_uri())
    run_node("--input-type=module", "-", given=READ.format(module=module, packed=[0, 0, 0, *packed]))
    assert unpack_tables(packed)[0]["rows"].tolist() == [1, 2, 3, 4, 5, 6]
    assert unpack_tables(packed)[2] == b"\7\10"


def test_rows_are_packed_column_by_column():
    columns = unpack_tables(pack_columns({"at": "i4", "share": "f8"}, [(1, 0.5), (2, 0.25)]))
    assert {name: column.tolist() for name, column in columns.items()} == {"at": [1, 2], "share": [0.5, 0.25]}
