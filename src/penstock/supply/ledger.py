"""What became of every token: trained, context, cropped, skipped, or waiting; and what is padding.

read = trained + context + cropped + skipped + waiting      for each source, at every batch
trained + context + padded = places in the rows handed out  over all sources
trained = labels that are not -100 in the batches           over all ranks
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from operator import attrgetter

import numpy as np

from penstock.arrays import Int32s, Int64s
from penstock.stream import plan_layout as layout
from penstock.stream.plan import Plan, Rows


@dataclass(frozen=True, slots=True)
class Ledger:
    """The account of one source, in tokens; those put around documents are counted too."""

    source: str
    documents: int
    read: int
    trained: int
    """Tokens whose labels count."""
    context: int
    """Tokens that are read by the model and are nobody's target: those that begin a document, or
    its continuation, in a row, and those that a conversation takes out of the loss."""
    cropped: int
    skipped: int
    waiting: int
    """Read by the plan, in no batch yet."""
    skipped_documents: int
    padded: int
    """Places without a token in the rows handed out; a row's are those of its first document's
    source, and rows without any, at the end, of the first source."""


_counts_of = attrgetter(*(field.name for field in fields(Ledger)[1:]))


def count_ledger(
    plan: Plan, planned: Rows, names: list[str], dropped: Int64s, masked: Int64s, end_padding: int
) -> list[Ledger]:
    """The ledger before `planned` rows, the last that the plan has given; `dropped` (tokens and
    segments of each source) were given and not used, `masked` (tokens of each) were used and are
    no targets by the word of their shards."""
    ledger = plan.ledger.reshape(-1, layout.LEDGER)
    segments, fills = planned.segments, planned.fills
    ahead = count_segments(segments, len(names))
    placed, context = ledger[:, (layout.PLACED, layout.CONTEXT)].T - ahead - dropped
    context = context + masked
    # a row's padding belongs to the source of its first segment
    first = np.searchsorted(segments[:, 0], np.arange(len(fills)))
    padded_ahead = np.bincount(segments[first, 1], plan.config.seq_len - fills, len(names)).astype(
        np.int64
    )
    padded = ledger[:, layout.PADDED] - padded_ahead
    padded[0] += end_padding
    waiting = plan.waiting() + ahead[0]
    return [
        Ledger(
            source=name,
            documents=int(line[layout.DOCUMENTS]),
            read=int(line[layout.READ]),
            trained=int(placed[k] - context[k]),
            context=int(context[k]),
            cropped=int(line[layout.CROPPED]),
            skipped=int(line[layout.SKIPPED] + dropped[0, k]),
            waiting=int(waiting[k]),
            skipped_documents=int(line[layout.SKIPPED_DOCUMENTS]),
            padded=int(padded[k]),
        )
        for k, (name, line) in enumerate(zip(names, ledger, strict=True))
    ]


def add_ledgers(ledgers: Iterable[list[Ledger]]) -> list[Ledger]:
    """The sum of several accounts of the same sources."""
    found = []
    for lines in zip(*ledgers, strict=True):
        counts = zip(*map(_counts_of, lines), strict=True)
        found.append(Ledger(lines[0].source, *map(sum, counts)))
    return found


def count_segments(segments: Int32s, sources: int) -> Int64s:
    """Tokens of each source in some segments, and how many segments: each begins with a token that
    has no context."""
    tokens = np.bincount(segments[:, 1], segments[:, 6], minlength=sources)
    return np.stack([tokens, np.bincount(segments[:, 1], minlength=sources)]).astype(np.int64)
