"""Find documents that hold items of a benchmark.

In:    files of benchmark items; `Documents`
Out:   for each document: the item that it has most of, and how much of it
Keeps: verdicts a function of the document and the items alone
Never: reads a file, but for `load_contaminants`

An item is what its shingles of `contamination_shingle` tokens are, hashed as for dedup.
"""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from penstock.arrays import Bools, Floats, Int64s, UInt64s, end_to_end, offsets_of
from penstock.errors import BadConfig, BadInput, InputMissing
from penstock.kernels import PAD, Kernel
from penstock.prepare.dedup import DEFAULTS, DedupConfig, token_scratch
from penstock.prepare.dedup_layout import Items, Scratch, Seen
from penstock.records import Documents

_ITEMS_OF_SHINGLE: Final = 16

_kernel = functools.partial(Kernel, "penstock.prepare.dedup_kernel")
_I, _U, _B = "int64[::1]", "uint64[::1]", "uint8[::1]"
_shingle_hashes = _kernel(
    "shingle_hashes", f"void({_B}, {_I}, int64, uint64, Scratch, {_U}, {_I})", Scratch
)
_fill_set = _kernel("fill_set", f"void({_U}, {_I}, {_U})")
_find_items = _kernel(
    "find_items",
    f"void({_B}, {_I}, int64, uint64, Scratch, Items, int64, Seen, float64[::1], {_I})",
    *(Scratch, Items, Seen),
)


class Contaminants:
    """The shingles of benchmark items: what training data must not have. Not for many threads."""

    def __init__(self, names: Sequence[str], hashes: UInt64s, at: Int64s, shingle: int, seed: int):
        self.names = tuple(names)
        self._shingle, self._seed = shingle, seed
        item_of = np.repeat(np.arange(len(names)), np.diff(at))
        pairs = np.unique(np.stack([hashes, item_of.astype(np.uint64)], 1), axis=0)
        keys, begin, counts = np.unique(pairs[:, 0], return_index=True, return_counts=True)
        # a phrase of many items counts for the first only: it bounds the time, and says little
        listed = np.minimum(counts, _ITEMS_OF_SHINGLE)
        rank = np.arange(len(pairs)) - np.repeat(begin, counts)
        items = pairs[rank < _ITEMS_OF_SHINGLE, 1].astype(np.int64)
        slots = 1 << max(2 * len(keys), 64).bit_length()
        self._items = Items(
            keys=keys,
            slots=np.zeros(slots, np.int64),
            bitmap=np.zeros(slots // 4, np.uint64),  # 16 bits a slot: 1 in 30 passes by chance
            items_at=offsets_of(listed),
            items=items,
            sizes=np.bincount(items, minlength=len(names)).astype(np.int64),
        )
        _fill_set(self._items.keys, self._items.slots, self._items.bitmap)
        self._stamp = 1
        self._seen = Seen(*(np.zeros(n, np.int64) for n in (len(keys), *[len(names)] * 2)))

    @classmethod
    def from_texts(
        cls, names: Sequence[str], documents: Documents, config: DedupConfig = DEFAULTS
    ) -> "Contaminants":
        """Of these texts; names[k] is the benchmark (and item, if one likes) that text k is of."""
        assert len(names) == len(documents)
        shingle = config.contamination_shingle
        out = np.empty(int(documents.at[-1] - documents.at[0]) + 1, np.uint64)
        at = np.zeros(len(documents) + 1, np.int64)
        _shingle_hashes(
            documents.data, documents.at, shingle, config.seed, token_scratch(), out, at
        )
        return cls(names, out[: at[-1]], at, shingle, config.seed)

    @property
    def too_short(self) -> int:
        """Items that cannot be found: of fewer tokens than a shingle, or the same as many."""
        return int((self._items.sizes == 0).sum())

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True, slots=True)
class Contamination:
    """What of a benchmark is in some documents."""

    flags: Bools
    """Which documents have `contamination_share` or more of an item."""
    shares: Floats
    """Share of the item's distinct shingles that the document has."""
    items: Int64s
    """The item it has most of, the first of several; -1 if it has nothing of any."""


def contaminated(
    documents: Documents, contaminants: Contaminants, config: DedupConfig
) -> Contamination:
    """How much of a benchmark item each document has, by the shingles it was read with."""
    shares = np.zeros(len(documents), np.float64)
    items = np.full(len(documents), -1, np.int64)
    c = contaminants
    _find_items(
        documents.data, documents.at, c._shingle, c._seed, token_scratch(), c._items, c._stamp,
        c._seen, shares, items,
    )  # fmt: skip
    c._stamp += len(documents)
    return Contamination((items >= 0) & (shares >= config.contamination_share), shares, items)


def load_contaminants(
    paths: Sequence[Path], config: DedupConfig = DEFAULTS, *, field: str = "text"
) -> Contaminants:
    """Items from .jsonl files, one in each line's `field`, or from the lines of other files.

    The name of an item is that of its file without the suffix, "#", and the number of its line.
    """
    names: list[str] = []
    texts: list[bytes] = []
    for path in paths:
        if not Path(path).is_file():
            raise InputMissing("a benchmark is not there", where=str(path), do="correct its path")
        lines = Path(path).read_bytes().split(b"\n")
        for number, line in enumerate(lines, 1):
            if line.strip():
                is_json = Path(path).suffix in (".jsonl", ".ndjson", ".json")
                texts.append(_item(line, field, f"{path}:{number}") if is_json else line)
                names.append(f"{Path(path).stem}#{number}")
    items = Contaminants.from_texts(names, _documents(texts), config)
    if items.too_short == len(items):
        raise BadConfig(
            "no item of the benchmark can be found in a document",
            where=", ".join(map(str, paths)),
            why=f"{len(items):,} items, none of 13 words and marks or more",
            do="give items as JSON lines, or one to a line",
        )
    return items


def _item(line: bytes, field: str, where: str) -> bytes:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise BadInput("a line of a benchmark is not JSON", where=where, why=str(error)) from None
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        why = f"it has {', '.join(record) if isinstance(record, dict) else type(record).__name__}"
        what = f"a line of a benchmark has no text in {field!r}"
        raise BadInput(what, where=where, why=why, do="name the field that holds the item's text")
    return text.encode("utf-8", "replace")


def _documents(texts: Sequence[bytes]) -> Documents:
    data, at = end_to_end(texts, PAD)
    return Documents(data, at, at[:-1], at[1:])
