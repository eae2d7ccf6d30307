"""Conversations: rows of whole samples, and which of their tokens are trained.

In:    datasets of `penstock conversations`, live or finished, or raw files, which become one
Out:   `TrainingBatch` after batch, with a loss mask and the number of targets over all ranks
Keeps: what every loader keeps; a conversation is never cut, and every row that is no padding has
       a target
Never: renders a row: that was done when the shards were made

Each rank counts the targets of the whole batch by itself: it has the plan of all ranks' rows, and
the trained ranges of all shards of the window are mapped.
"""

from dataclasses import replace
from typing import Any, Final

from penstock.arrays import Bools, Int64s
from penstock.chat.render import ChatConfig
from penstock.errors import BadConfig
from penstock.options import config_of, differences
from penstock.produce.conversations import ChatRecipe
from penstock.stream.plan import PlanConfig, Rows
from penstock.supply.pretrain import RowLoader
from penstock.supply.settings import UNSET, DocumentConfig, LoaderRun, merged_plan
from penstock.supply.sources.open import Paths

_DOCUMENTS: Final = DocumentConfig()
_OF_TEXT: Final = ("bos", "eos", "text_field", "columns")
"""What is said of documents, and would be ignored for conversations."""


class ConversationDataLoader(RowLoader):
    """Rows of `max_length` tokens, each of whole conversations; what is trained is marked."""

    can_lane = False

    def __init__(
        self,
        path: Paths,
        tokenizer: Any,
        max_length: int = 2048,
        chat_template: str = "chatml",
        streaming: bool = True,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        epochs: int | None = UNSET,
        pack: str = UNSET,
        chat: ChatConfig | None = None,
        plan: PlanConfig | None = None,
        documents: DocumentConfig | None = None,
        run: LoaderRun | None = None,
    ) -> None:
        """Where the rows come from and how they are made: docs/conversations.md.

        `batch_size` is the rows of each rank, 16 by default; or give `global_batch_size`, those of
        all ranks. `chat` says more of how raw files are rendered; `max_length` and `chat_template`
        may be given here or there. `epochs` and `pack` may be given here or in `plan`, which also
        has the weights and the seed.
        """
        self._asked = chat is not None
        chat = _merged(chat, max_length, chat_template)
        config = merged_plan(plan, chat.max_length, called="max_length", pack=pack, epochs=epochs)
        if config.pack == "concat" or config.long == "crop":
            raise BadConfig(
                f"pack is {config.pack!r} and long is {config.long!r}",
                why="a conversation that is cut teaches a model never to stop",
                do='give pack="bestfit" or "pad", and long="drop" in plan',
            )
        if config.lanes > 1:
            raise BadConfig(
                f"lanes is {config.lanes} for conversations",
                why="each rank counts the targets of a whole batch, from the shards of all lanes",
                do="give lanes=1: datasets of conversations are small",
            )
        config = replace(config, long="drop")
        documents = config_of("documents", documents, DocumentConfig)
        run = config_of("run", run, LoaderRun)
        for name in _OF_TEXT:
            if getattr(documents, name) != getattr(_DOCUMENTS, name):
                raise BadConfig(
                    f"documents has {name} for conversations",
                    why="the template says what stands where, and their rows are one column",
                    do=f"leave {name} out; ChatConfig says how rows are read and rendered",
                )
        self.recipe = ChatRecipe(tokenizer, chat)
        documents = replace(documents, bos=None, eos=None, other_length=True)
        super().__init__(
            path, self.recipe.tokenizer, streaming, config, batch_size=batch_size,
            global_batch_size=global_batch_size, documents=documents, run=run, recipe=self.recipe,
        )  # fmt: skip
        for source in self.sources:
            self._check(source.url, source.chat)

    def _check(self, url: str, made: dict[str, Any] | None) -> None:
        """Refuse what is not conversations, or was rendered otherwise than was asked for."""
        if made is None:
            raise BadConfig(
                "the dataset holds no conversations",
                where=url,
                do="make it with penstock conversations, or give it to PretrainDataLoader",
            )
        mine = self.recipe.chat.as_json()
        if mine["format"] == "auto":
            mine["format"] = made.get("format")
        longest = int(made.get("max_length", 0))
        if longest > self.config.seq_len:
            raise BadConfig(
                f"rows of {self.config.seq_len:,} tokens from a dataset of conversations of up to "
                f"{longest:,}",
                where=url,
                do=f"give max_length={longest}, or render them again with --max_length "
                f"{self.config.seq_len}",
            )
        asked = mine if self._asked else {"chat_template": mine["chat_template"]}
        asked = {name: value for name, value in asked.items() if name != "max_length"}
        told = "the dataset has {!r}, the loader {!r}"
        if found := differences({name: made.get(name) for name in asked}, asked, told=told):
            raise BadConfig(
                "the conversations were rendered otherwise",
                where=url,
                why="\n".join(found),
                do="give the loader what the dataset has, or render them again",
            )

    def _mark_trained(self, rows: Rows, width: int) -> Bools:
        return self._engine.window.mark_trained(rows, width)

    def _count_trained(self, rows: Rows, count: int) -> Int64s:
        return self._engine.window.count_trained(rows, count)

    def _settings(self) -> dict[str, Any]:
        made = [source.chat for source in self.sources]
        return {**super()._settings(), "chat": [one or {} for one in made]}


def _merged(chat: ChatConfig | None, max_length: int, chat_template: str) -> ChatConfig:
    """The config with what was given beside it; what contradicts is refused."""
    known = config_of("chat", chat, ChatConfig)
    merged = replace(known, max_length=max_length, chat_template=chat_template)
    for name in ("max_length", "chat_template"):
        mine, theirs = getattr(merged, name), getattr(known, name)
        if theirs != mine and theirs != getattr(ChatConfig(), name):
            if mine != getattr(ChatConfig(), name):
                raise BadConfig(
                    f"{name} is {mine!r}, and chat says {name}={theirs!r}",
                    do="give one of the two",
                )
            merged = replace(merged, **{name: theirs})
    return merged
