"""The column of the text of a shard that anybody may have written, as strings.

In:    a column of strings, of a dictionary or of views of them, of UTF-8 bytes, of nulls
Out:   strings; an empty one for a null
Never: takes numbers or lists for text: the error names the file and the type
"""

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import ShardMismatch


def as_text(column: pa.ChunkedArray, name: str, where: str) -> pa.ChunkedArray:
    """A column of any type that can hold text as one of strings.

    >>> as_text(pa.chunked_array([["a", None, "a"]]).dictionary_encode(), "text", "").to_pylist()
    ['a', '', 'a']
    """
    kind, types = column.type, pa.types
    try:
        if types.is_dictionary(kind):
            column = column.cast(kind.value_type)
        if not types.is_string(column.type) and not types.is_large_string(column.type):
            if not _is_texty(column.type):
                raise ShardMismatch(
                    f"column {name!r} is of {kind}, which is no text",
                    where=where,
                    do="name the column of the text with text_field, or write it as strings",
                )
            wide = types.is_large_binary(column.type)
            column = column.cast(pa.large_string() if wide else pa.string())
    except pa.ArrowException as error:
        raise ShardMismatch(
            f"column {name!r} of {kind} cannot be read as text",
            where=where,
            why=str(error).splitlines()[0][:200],
            do="write the column as strings of UTF-8",
        ) from None
    return pc.fill_null(column, "")


def _is_texty(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_null(kind)
        or types.is_string_view(kind)
        or types.is_binary_view(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
    )
