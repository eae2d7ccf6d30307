"""Every exception that penstock raises on purpose.

PenstockError
├── BadConfig            an option is wrong, or is not the one the dataset was made with
├── BadInput             what was given to read
│   ├── InputMissing
│   ├── InputReplaced    truncated, or another file under the old name
│   ├── InputDamaged     a compressed file that ends early, is corrupt, or is a bomb
│   ├── TooManyRejects   more lines refused than --max-rejects allows
│   ├── BadDocument      a document that the tokenizer cannot encode
│   ├── BadRollout       a rollout that cannot be trained on
│   ├── BadBatch         a batch, or a file of batches, that its schema does not describe
│   └── BadTokenizer     a tokenizer file that is damaged or that penstock cannot read
├── BadDataset           what the log says, or what is there instead
│   ├── NoDataset
│   ├── LogDamaged       broken chain, wrong hash, unknown format, unsafe name
│   ├── ShardMismatch    a file is not what the log says
│   └── AlreadySealed
├── Fenced               another writer has taken the dataset over
├── ProducerStalled      unsealed, and no sign of life from its writer
├── StateMismatch        a saved state is of other data or other settings
├── MemoryLimit          what a loader holds would exceed what it may
├── WorkerFailed         a worker process died or broke
├── StageFailed          a stage of a pipeline ended with an error
└── StoreFailed          the disk or the bucket refused
    ├── StoreBusy        for now; it may work later
    └── NoConditionalPut the bucket does not create once

Each says what failed, where, why, and what to do; the four are attributes too.
"""

import re


def without_users(text: str) -> str:
    """A text without the users and passwords of its addresses.

    >>> without_users("could not read http://me:secret@host:9000/x")
    'could not read http://…@host:9000/x'
    """
    return re.sub(r"(?<=://)[^\s/]*@", "…@", text)


class PenstockError(Exception):
    """Base of every error that penstock raises on purpose. No password of an address is in it."""

    def __init__(self, what: str, *, where: str = "", why: str = "", do: str = "") -> None:
        what, where, why, do = map(without_users, (what, where, why, do))
        super().__init__(what)
        self.what = what
        self.where = where
        self.why = why
        self.do = do

    def __str__(self) -> str:
        lines = [self.what]
        for label, text in (("where:", self.where), ("why:  ", self.why), ("do:   ", self.do)):
            if text:
                lines.append(f"  {label} " + text.replace("\n", "\n         "))
        return "\n".join(lines)


class BadConfig(PenstockError):
    """An option is wrong, or is not the one the dataset was made with."""


class BadInput(PenstockError):
    """Something is wrong with what was given to read."""


class InputMissing(BadInput):
    """An input is not there."""


class InputReplaced(BadInput):
    """An input was truncated, or another file stands under its name."""


class InputDamaged(BadInput):
    """A compressed input ends early, is corrupt, or inflates beyond reason."""


class TooManyRejects(BadInput):
    """More documents were refused than allowed."""


class BadDocument(BadInput):
    """A document that the tokenizer cannot encode."""

    row: int = -1
    """Which of the texts that were given, where it is known."""


class BadRollout(BadInput):
    """A rollout that cannot be trained on."""

    row: int = -1
    """Which of those that were given."""
    field: str = ""
    reason: str = ""


class BadBatch(BadInput):
    """A batch, or a file of batches, is not what the schema of its queue says."""


class BadTokenizer(BadInput):
    """A tokenizer's file is damaged, or of a kind that penstock cannot read."""


class BadDataset(PenstockError):
    """A dataset is not what its log says, or has no log."""


class NoDataset(BadDataset):
    """There is no log where a dataset was expected."""


class LogDamaged(BadDataset):
    """A record breaks the chain, has the wrong hash, an unknown format or an unsafe name."""


class ShardMismatch(BadDataset):
    """A file is missing, or is not what was written."""


class AlreadySealed(BadDataset):
    """The dataset has ended; nothing can be added."""


class Fenced(PenstockError):
    """Another writer has taken the dataset over; this one stops."""


class ProducerStalled(PenstockError):
    """The dataset is not sealed, and its writer gives no sign of life."""


class StateMismatch(PenstockError):
    """A saved state was made under other data or other settings than those given now."""


class MemoryLimit(PenstockError):
    """What a loader holds would exceed what it may."""


class WorkerFailed(PenstockError):
    """A worker process died, or met an error that is not one of ours."""


class StageFailed(PenstockError):
    """A stage of a pipeline ended with an error, or was killed."""


class StoreFailed(PenstockError):
    """The disk or the bucket refused an operation."""


class StoreBusy(StoreFailed):
    """The store did not answer, or asked to be left alone for a while: it may work later."""


class NoConditionalPut(StoreFailed):
    """The bucket lets a second create succeed, so two writers could not be kept apart."""
