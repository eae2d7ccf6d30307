"""Make a dataset of conversations: rendered and masked ahead of time.

In:    JSON lines in one of six formats, finished or still growing; a tokenizer, a template
Out:   a live dataset: messages as JSON text, tokens and trained ranges in token files
Keeps: rows = samples; a conversation is kept, or refused with file, row, field and reason
Never: stores messages as Arrow structures, whose union of all fields invents nulls
"""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from penstock.chat.render import ChatConfig
from penstock.errors import BadConfig
from penstock.ingest.inputs import ReadConfig
from penstock.options import config_of
from penstock.prepare.conversations import complete_config, resolve_template
from penstock.prepare.steps import plan_of
from penstock.produce.dataset import FollowConfig, Outcome, follow_lines, lines_job, make_dataset
from penstock.produce.guards import lines_given
from penstock.produce.writer import ShardConfig
from penstock.tokenize.tokenizer import Tokenizer
from penstock.work.events import Events

_CHAT_BYTES: Final = 2 << 20
"""Conversations that are rendered together: each is a few Python objects while it is."""


def shard_conversations(
    inputs: Sequence[str | os.PathLike[str]],
    parquet_dir: str | os.PathLike[str],
    chat: ChatConfig | None = None,
    config: ShardConfig | None = None,
    follow: FollowConfig | None = None,
    *,
    tokenizer: Any,
    workers: int = 1,
    events: Events | None = None,
) -> Outcome:
    """Render the conversations of `inputs` into the dataset at `parquet_dir`, from wherever an
    earlier run left off: messages as JSON, tokens and trained ranges beside them.

    `chat` says how; the format of the rows is that of the first one.
    """
    config = config_of("config", config, ShardConfig)
    follow = config_of("follow", follow, FollowConfig)
    chat = config_of("chat", chat, ChatConfig)
    if not os.fspath(parquet_dir):
        raise BadConfig("--parquet_dir is empty", do="name a directory or a bucket address")
    names = lines_given(inputs)
    loaded = Tokenizer.load(tokenizer)
    read = ReadConfig(
        max_document_bytes=config.max_line_bytes,
        piece_bytes=_CHAT_BYTES,
        whole_lines=True,
        order="path",
    )
    chat = complete_config(chat, loaded, tokenizer, names, follow_lines(read, follow))
    plan = plan_of(read, [chat], has_tokenizer=True)
    job = lines_job(
        names, read, replace(config, text_field="text", prepare=plan), follow, tokenizer=loaded,
        tokens=True, given=tokenizer, steps=[chat], workers=workers,
    )  # fmt: skip
    return make_dataset(job, parquet_dir, events or Events("conversations"))


class ChatRecipe:
    """Makes a dataset of conversations of raw files, for loaders."""

    def __init__(self, tokenizer: Any, chat: ChatConfig) -> None:
        """`tokenizer` is what a loader was given; `chat` may name a template beside it."""
        self.tokenizer = Tokenizer.load(tokenizer)
        self.chat = resolve_template(chat, self.tokenizer, tokenizer)

    @property
    def about(self) -> str:
        """All that decides what is made."""
        chat = json.dumps(self.chat.as_json(), sort_keys=True)
        return f" conversations {self.tokenizer.fingerprint} {chat}"

    def make(self, paths: Sequence[str], folder: str) -> None:
        """Make the dataset, or go on with it."""
        follow = FollowConfig(complete=True)
        shard_conversations(paths, folder, self.chat, follow=follow, tokenizer=self.tokenizer)
