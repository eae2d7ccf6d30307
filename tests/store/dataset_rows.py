"""The rows of a dataset, for tests of whoever makes one."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.store.log import Log


def read_rows(dataset: Path, *splits: str) -> list[dict[str, Any]]:
    """The rows of a dataset's files, with their tokens where there are token files."""
    state = Log.open(dataset).state
    found: list[dict[str, Any]] = []
    for file in [file for split in splits for file in state.split(split)]:
        table = pq.read_table(dataset / file.name)
        if (beside := state.tokens_of(file)) is not None:
            with pa.ipc.open_file(dataset / beside.name) as opened:
                table = table.append_column("tokens", opened.read_all()["tokens"])
        found += table.to_pylist()
    return found
