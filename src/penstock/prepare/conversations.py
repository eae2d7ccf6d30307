"""The step that turns rows of conversations into tokens and trained ranges.

In:    documents that are JSON lines as they stand; what is to be trained
Out:   samples, and a reason for each row that is none
Keeps: the format of the first row for all of them; a config that says all of a template, so that
       every worker renders the same
Never: looks at an input beyond its first row to find its format
"""

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from penstock.chat.formats import Conversation, RowReader, Unfit, find_format
from penstock.chat.jinja import make_template
from penstock.chat.jinja import resolve_template as resolve_template
from penstock.chat.render import SKIPPED, Renderer, Samples
from penstock.chat.render import ChatConfig as ChatConfig
from penstock.errors import BadConfig, BadDocument, BadInput
from penstock.ingest.formats import Piece, ReadConfig, read_parts
from penstock.ingest.inputs import Input, Waiting
from penstock.records import Documents
from penstock.tokenize.tokenizer import Tokenizer

_POLL_S: Final = 0.1


class Conversations:
    """Reads rows of one format and renders them."""

    skipped = SKIPPED
    """Reasons that say nothing against a row."""

    def __init__(self, tokenizer: Tokenizer, config: ChatConfig) -> None:
        self._reader = RowReader(config.format, branch=config.branch, ignore=config.ignore)
        self._renderer = Renderer(tokenizer, make_template(config, tokenizer), config)

    @classmethod
    def among(cls, steps: Sequence[Any], tokenizer: Tokenizer | None) -> "Conversations | None":
        """That of the steps which renders, if one does."""
        for step in steps:
            if isinstance(step, ChatConfig):
                assert tokenizer is not None, "conversations become tokens"
                return cls(tokenizer, step)
        return None

    def render(self, documents: Documents) -> Samples:
        """What the documents become; those that are no conversations are among the refused."""
        found: list[Conversation] = []
        rows: list[int] = []
        refused: dict[int, Unfit] = {}
        for k, row in enumerate(self._reader.read_all(documents.data, documents.at)):
            if isinstance(row, Unfit):
                refused[k] = row
            else:
                found.append(row)
                rows.append(k)
        try:
            samples = self._renderer.render(found)
        except BadDocument as error:
            error.row = rows[error.row]
            raise
        at = np.array(rows, np.int64)
        samples.document = at[samples.document] if len(at) else samples.document
        samples.refused = refused | {rows[k]: fault for k, fault in samples.refused.items()}
        return samples


def complete_config(
    config: ChatConfig, tokenizer: Tokenizer, source: Any, inputs: Sequence[str],
    open_one: Callable[[str, int], Input],
) -> ChatConfig:  # fmt: skip
    """The config with the text of its template and the format of the first row.

    `source` is what the tokenizer was loaded from. An input that is still empty is waited for.
    """
    config = resolve_template(config, tokenizer, source)
    if config.format == "auto":
        config = replace(config, format=first_format(inputs, open_one))
    if config.branch != "chosen" and config.format != "preference":
        raise BadConfig(
            f"--branch is {config.branch!r}, and the rows are of format {config.format}",
            where=", ".join(os.path.basename(name) for name in inputs),
            why="only preference pairs have branches",
            do="give --format preference if the rows have chosen and rejected beside what the "
            "format was found by, or leave --branch out",
        )
    return config


def first_format(inputs: Sequence[str], open_one: Callable[[str, int], Input]) -> str:
    """The format of the first row that is JSON."""
    for number, name in enumerate(inputs):
        opened = open_one(name, number)
        try:
            for piece in opened.follow(0):
                if isinstance(piece, Waiting):
                    time.sleep(_POLL_S)
                    continue
                if found := _format_in(piece, opened.config, name):
                    return found
        finally:
            opened.close()
    names = ", ".join(os.path.basename(name) for name in inputs)
    raise BadInput(
        "there is no conversation", where=names, why="no row is JSON", do="give rows of JSON"
    )


def _format_in(piece: Piece, config: ReadConfig, name: str) -> str:
    for _, read in read_parts(piece, config, name):
        documents = read.documents
        for k in range(len(documents)):
            line = documents.text(k)
            try:
                json.loads(line)
            except (ValueError, RecursionError):
                continue  # it will be refused, and says nothing of the others
            where = f"{name}, bytes {int(documents.start[k]):,} to {int(documents.end[k]):,}"
            return find_format(line, where)
    return ""
