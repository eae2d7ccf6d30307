"""Token files: what was written is what is mapped, and anything else is refused."""

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.tokenize.token_file import Tokens, read_token_file, write_token_file

ROWS = st.lists(st.lists(st.integers(0, 60_000), max_size=20), max_size=30)


def written(rows: list[list[int]], dtype: str = "uint16") -> bytes:
    file = io.BytesIO()
    kind = pa.list_(pa.type_for_alias(dtype))
    doc_id = pa.array(range(len(rows)), pa.uint64())
    write_token_file(file, pa.array(rows, kind), doc_id, "abc", dtype)
    return file.getvalue()


def read(data: bytes, rows: int, **options: Any) -> Tokens:
    return read_token_file(pa.py_buffer(data), rows=rows, **{"vocab_size": 1 << 16, **options})


@given(ROWS, st.sampled_from(["uint16", "uint32"]))
@settings(max_examples=100)
def test_what_is_read_is_what_was_written(rows: list[list[int]], dtype: str) -> None:
    found = read(written(rows, dtype), len(rows), tokenizer="abc")
    assert found.values.dtype == (np.dtype(dtype) if rows and any(rows) else found.values.dtype)
    pairs = zip(found.at[:-1].tolist(), found.at[1:].tolist(), strict=True)
    assert [found.values[a:b].tolist() for a, b in pairs] == rows
    assert found.doc_id is not None
    assert found.doc_id.tolist() == list(range(len(rows)))


def test_any_arrow_reader_opens_it() -> None:
    table = pa.ipc.open_file(written([[1, 2], [3]])).read_all()
    assert table.column("tokens").to_pylist() == [[1, 2], [3]]


def test_the_ids_are_not_copied() -> None:
    data = pa.py_buffer(written([[1, 2], [3]]))
    found = read_token_file(data, rows=2, vocab_size=10)
    at = found.values.__array_interface__["data"][0]
    assert data.address <= at < data.address + data.size


def sliced(rows: list[list[int]]) -> bytes:
    sink = io.BytesIO()
    batch = pa.ipc.open_file(written(rows)).get_batch(0)
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch.slice(0, 1))
        writer.write_batch(batch.slice(1))
    return sink.getvalue()


def compressed(rows: list[list[int]]) -> bytes:
    sink = io.BytesIO()
    batch = pa.ipc.open_file(written(rows)).get_batch(0)
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def unmarked(rows: list[list[int]]) -> bytes:
    sink = io.BytesIO()
    batch = pa.ipc.open_file(written(rows)).get_batch(0).replace_schema_metadata({})
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


@pytest.mark.parametrize(
    ("data", "options", "said"),
    [
        (sliced([[1], [2]]), {}, "more than one record batch"),
        (compressed([list(range(5000))] * 2), {}, "it is compressed"),
        (unmarked([[1], [2]]), {}, "does not say that it holds tokens"),
        (written([[1], [2], [3]]), {}, "it has 3 rows, not 2"),
        (written([[1], [9]]), {"vocab_size": 9}, "token 9, the vocabulary ends at 8"),
        (written([[1], [2]]), {"tokenizer": "xyz"}, "its tokens are those of abc"),
    ],
)
def test_other_files_are_refused(data: bytes, options: dict[str, Any], said: str) -> None:
    with pytest.raises(pa.ArrowInvalid, match=said):
        read(data, 2, **options)


def test_offsets_that_lie_are_refused() -> None:
    whole = bytearray(written([[1, 2, 3], [4, 5, 6]]))
    at = bytes(np.array([0, 3, 6], np.int64))
    first = whole.index(at)
    for offsets, said in (
        ([0, 9, 6], "go back"),
        ([0, 3, 7], "shorter|end where|[Ll]ength|spanned"),
        ([1, 3, 6], "end where no ids are"),
        ([0, -1, 6], "go back|[Nn]egative"),
    ):
        whole[first : first + 24] = bytes(np.array(offsets, np.int64))
        with pytest.raises(pa.ArrowInvalid, match=said):
            read(bytes(whole), 2)
