"""What a log is made of: operations, records, folds, and their bytes.

In:    operations, records as values
Out:   one line of JSON that ends in the sha256 of what stands before it, and back
Keeps: strictness: a wrong hash, an unknown format, a field too many or too few is an error
"""

import base64
import hashlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar

import msgspec

from penstock.errors import LogDamaged, ShardMismatch

if TYPE_CHECKING:
    from penstock.arrays import UInt64s

FORMAT: Final = 1
NEWER_FORMAT: Final = 2
"""Of records with operations that the first version does not know: it then says so itself."""

HASH: Final = re.compile("[0-9a-f]{64}")
"""A sha256 as it is written."""

Split = Literal["train", "val", "tokens", "rejects", "about"]
WITH_ROWS: Final = ("train", "val", "rejects")
"""Splits whose files hold the rows that documents became, or the documents that were dropped."""
Count = Annotated[int, msgspec.Meta(ge=0)]


class Open(msgspec.Struct, frozen=True, tag="open", forbid_unknown_fields=True):
    """A writer takes the dataset: from here on it is the only one."""

    config: dict[str, Any]
    inputs: list[str]
    writer: str
    tokenizer: str | None = None


class Add(msgspec.Struct, frozen=True, tag="add", forbid_unknown_fields=True, omit_defaults=True):
    """A file belongs to the dataset.

    Only files of "train", "val" and "rejects" hold rows of the dataset. Those of "tokens" hold the
    ids of a shard's rows, in its order; those of "about" say something of the inputs.
    """

    name: str
    sha256: str
    bytes: Count
    rows: Count
    tokens: Count | None
    split: Split
    xxh3: str = ""
    """Of token files: a checksum that a loader computes at 33 GB/s, where sha256 takes 1.8."""
    keys: str = ""
    """Of files whose rows have ids: a hash of each row's id and one of its content, 8 bytes each,
    all in base64. By them a writer sees that a row is there already."""


def encode_keys(keys: "UInt64s") -> str:
    """Pairs of hashes, end to end, as the log has them."""
    return base64.b64encode(keys.astype("<u8").tobytes()).decode()


def decode_keys(text: str) -> "UInt64s":
    """The same back.

    >>> import numpy as np
    >>> decode_keys(encode_keys(np.array([1, 2], np.uint64))).tolist()
    [1, 2]
    """
    import numpy as np

    return np.frombuffer(base64.b64decode(text), "<u8").astype(np.uint64)


_OTHER: Final = "(?:-[0-9a-f]{8})?"
"""What a name has in it that was taken by other bytes."""
_VAL: Final = "(?:val_shard|_val/val_[0-9]+)"
_NAMES: Final = {
    "train": re.compile(rf"shard_[0-9]+{_OTHER}\.parquet"),
    "val": re.compile(rf"{_VAL}{_OTHER}\.parquet"),
    "tokens": re.compile(rf"(?:shard_[0-9]+|{_VAL})\.tokens{_OTHER}\.arrow"),
    "rejects": re.compile(rf"_rejects/rejects_[0-9]+{_OTHER}\.jsonl"),
    "about": re.compile(rf"_(?:dedup|features)/[0-9]+{_OTHER}"),
}


def is_name_of(split: str, name: str) -> bool:
    """Whether files of a split are called so.

    >>> is_name_of("train", "shard_00000.parquet"), is_name_of("train", "_log/0.json")
    (True, False)
    """
    return bool(_NAMES[split].fullmatch(name))


def stem_of(name: str) -> str:
    """What a shard and its token file have in common.

    >>> stem_of("shard_00000-0a1b2c3d.parquet"), stem_of("_val/val_00000.tokens-0a1b2c3d.arrow")
    ('shard_00000', '_val/val_00000')
    """
    return name.partition(".")[0].partition("-")[0]


def token_name(name: str) -> str:
    """What the token file of a shard is called.

    >>> token_name("shard_00000-0a1b2c3d.parquet")
    'shard_00000.tokens.arrow'
    """
    return f"{stem_of(name)}.tokens.arrow"


def differs(file: Add, url: str, why: str) -> ShardMismatch:
    """The error for a file that is not the one of the log."""
    return ShardMismatch(
        f"{file.name} is not what was written",
        where=f"{url}/{file.name}",
        why=why,
        do="restore the file from a copy, or make the dataset again in a new directory",
    )


def check_file(file: Add, where: str) -> None:
    """Refuse a file that is not called as files of its split are.

    Files are written, and removed when they retire: a log that named _log/…, _COMPLETE or a file of
    the user's would have them replaced or removed in a mirror.
    """
    if not is_name_of(file.split, file.name):
        raise LogDamaged(
            f"the log names {file.name!r}, which is not a name of a file of its split",
            where=where,
            why=f"no writer gives such names to files of {file.split!r}",
            do="do not use this dataset; ask whoever made it",
        )


class Progress(msgspec.Struct, frozen=True, tag="progress", forbid_unknown_fields=True):
    """How far an input has been read, and what became of what was read."""

    input: str
    start: Count = msgspec.field(name="from")
    to: Count
    read: Count
    kept: Count
    dropped: dict[str, Count]
    blank: Count = 0
    """Lines without a document on them; they are not read, kept or dropped."""
    proof: dict[str, str | int] = {}
    """What shows later that the input is still the same file."""
    end: str | None = None
    """How the end of the input was known, in the record that reached it."""
    rows: Count | None = None
    """Rows that the kept documents became, where those are chunks and not documents."""

    @property
    def accounted(self) -> int:
        """Rows of files that this accounts for: of data for what was kept, of rejects for the
        rest."""
        return self.read if self.rows is None else self.rows + self.read - self.kept


class Beat(msgspec.Struct, frozen=True, tag="beat", forbid_unknown_fields=True, omit_defaults=True):
    """The writer is alive and has nothing to add."""

    input: str = ""
    """What it waits for more of."""
    silent_s: Count = 0
    """How long that input has not grown, on the writer's own clock."""


class Retire(msgspec.Struct, frozen=True, tag="retire", forbid_unknown_fields=True):
    """A file no longer belongs to the dataset; its rows are in one added in the same record."""

    name: str


class Seal(msgspec.Struct, frozen=True, tag="seal", forbid_unknown_fields=True):
    """The dataset has ended; these are its totals."""

    shards: Count
    rows: Count
    bytes: Count
    head: str
    """Hash of the record before the seal."""


Op = Open | Add | Progress | Beat | Retire | Seal


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One slot of the log. Its sha256 is over the bytes that stand before that field."""

    format: int
    dataset: str
    n: int
    prev: str
    epoch: int
    commit_id: str
    time: str
    """Wall clock, for people; nothing is decided by it."""
    ops: list[Op]
    sha256: str


class Fold(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sum of records first..last, written once all of them stand."""

    format: int
    dataset: str
    first: int
    last: int
    prev: str
    head: str
    epoch: int
    time: str
    ops: list[Op]
    sha256: str


class Merged(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Files that a mirror does not have, since its source had merged them into others by then.

    The record that retires them follows. The mirror holds this until it is sealed.
    """

    format: int
    dataset: str
    files: list[str]
    sha256: str


class Only(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A mirror was filled with the files of one split alone; the others were left out."""

    format: int
    dataset: str
    split: Split
    sha256: str


def format_of(ops: Sequence[Op]) -> int:
    """The format of a record of these operations: the earliest that knows all that they say."""
    for op in ops:
        if isinstance(op, Add) and (op.split == "tokens" or op.keys):
            return NEWER_FORMAT
        if isinstance(op, Beat) and (op.input or op.silent_s):
            return NEWER_FORMAT
    return FORMAT


def sum_ops(ops: Sequence[Op]) -> list[Op]:
    """The same effect in fewer operations: one progress for each input, no beats."""
    merged: list[Op] = []
    progress: dict[str, Progress] = {}
    for op in ops:
        if isinstance(op, Progress):
            earlier = progress.get(op.input)
            if earlier is None:
                progress[op.input] = op
                continue
            dropped = dict(earlier.dropped)
            for reason, count in op.dropped.items():
                dropped[reason] = dropped.get(reason, 0) + count
            progress[op.input] = Progress(
                input=op.input,
                start=earlier.start,
                to=op.to,
                read=earlier.read + op.read,
                kept=earlier.kept + op.kept,
                dropped=dropped,
                blank=earlier.blank + op.blank,
                proof=op.proof or earlier.proof,
                end=op.end or earlier.end,
                rows=None if op.rows is None else (earlier.rows or 0) + op.rows,
            )
        elif not isinstance(op, Beat):
            merged.append(op)
    seal = [op for op in merged if isinstance(op, Seal)]
    return [*(op for op in merged if not isinstance(op, Seal)), *progress.values(), *seal]


def record_name(n: int) -> str:
    """Where record n stands.

    >>> record_name(7)
    '_log/00000000000000000007.json'
    """
    return f"_log/{n:020d}.json"


def fold_name(number: int) -> str:
    """Where the sum of the number-th FOLD_EVERY records stands."""
    return f"_fold/{number:020d}.json"


MERGED: Final = "_merged.json"
"""Where a mirror says which files it does not have."""

ONLY: Final = "_only.json"
"""Where a mirror says that it was filled with the files of one split alone."""

_SEAM = b',"sha256":"'
_T = TypeVar("_T", Record, Fold, Merged, Only)


def encode(value: Record | Fold | Merged | Only) -> bytes:
    """One line of JSON that ends in the hash of what stands before it."""
    body, _, _ = msgspec.json.encode(value).rpartition(_SEAM)
    return body + _SEAM + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


def decode(data: bytes, kind: type[_T], where: str) -> _T:
    """Check the hash and the format, then the fields."""
    body, seam, tail = data.rpartition(_SEAM)
    if not seam or not tail.endswith(b'"}\n'):
        raise damaged(
            "this is not a record", where, f"{len(data):,} bytes without a hash at the end"
        )
    found = hashlib.sha256(body).hexdigest()
    if tail[:-3] != found.encode():
        raise damaged(
            "the record is not what was written",
            where,
            f"sha256 {found[:12]}…, it says {tail[:12].decode('latin-1')}…",
        )
    try:
        version = msgspec.json.decode(data, type=_Version).format
        if version not in (FORMAT, NEWER_FORMAT):
            raise LogDamaged(
                f"the record is of format {version}",
                where=where,
                why=f"this penstock reads formats {FORMAT} and {NEWER_FORMAT}",
                do="install the penstock that wrote it, or a newer one",
            )
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise damaged(
            "the record has fields that it should not have, or lacks some", where, str(error)
        ) from None
    except RecursionError:
        raise damaged("the record nests values too deep", where) from None


class _Version(msgspec.Struct):
    format: int


def damaged(what: str, where: str, why: str = "") -> LogDamaged:
    """The error for a record that cannot be believed."""
    return LogDamaged(
        what,
        where=where,
        why=why,
        do="restore the file from a copy, or use the dataset up to the record before",
    )
