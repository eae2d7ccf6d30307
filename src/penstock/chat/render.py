"""Conversations into tokens, and which of them are trained: a column at a time, each verified.

In:    conversations, a tokenizer, a template, what is to be trained
Out:   samples: ids, trained ranges, the role of each token; a reason for each that is refused
Keeps: the ids of a sample are those of its whole text; a trained range begins where a prompt ends
       and ends after a stop token; a sample has at most `max_length` tokens, and a target
Never: trains a header, a tool's result, or what the roles of `train_on` did not say

    Pieces ─▶ encode all runs of text in one call ─▶ assemble (kernel) ─▶ compare with the ids of
    the whole texts ─▶ what is too long is rendered again, with fewer turns
"""

import contextlib
import datetime
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa

from penstock.arrays import Bools, Bytes, Int32s, Int64s, UInt32s, end_to_end, offsets_of
from penstock.chat import render_layout as layout
from penstock.chat.formats import ROLES, Conversation, Message, Unfit, check_format
from penstock.chat.templates import Pieces, Template, trimmed_answer
from penstock.errors import BadConfig, BadDocument
from penstock.kernels import PAD, Kernel
from penstock.options import check_numbers, suggest, whole
from penstock.tokenize.tokenizer import Tokenizer

OVERFLOWS: Final = ("drop_oldest", "split", "truncate", "skip", "error")
HISTORIES: Final = ("samples", "error")
TURNS: Final = ("all", "last")
BRANCHES: Final = ("chosen", "rejected")
REWRITES: Final = "rewrites_history"
SKIPPED: Final = ("too_long", "nothing_to_train")
"""Reasons that say nothing against a conversation: it is left out because of what was asked for."""

_assemble = Kernel(
    "penstock.chat.render_kernel", "assemble", "void(Table, Script, Made)",
    *(layout.Table, layout.Script, layout.Made),
)  # fmt: skip
_join_texts = Kernel(
    "penstock.chat.render_kernel",
    "join_texts",
    "void(Table, int32[::1], int64[::1], uint8[::1], int64[::1], uint8[::1], int64[::1])",
    layout.Table,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatConfig:
    """How conversations become tokens, and which of these are trained."""

    chat_template: str = "chatml"
    """chatml, llama3, qwen, gemma, mistral, nanochat or plain; a Jinja template, its file, or
    "tokenizer" for the one beside the tokenizer."""
    max_length: int = 2048
    """Tokens of a sample at most."""
    train_on: tuple[str, ...] = ("assistant",)
    """Whose turns are trained; `train` or `weight` of a message can take it out."""
    turns: str = "all"
    """Which of them: all, or the last one of a conversation."""
    overflow: str = "drop_oldest"
    """A conversation of more tokens: drop_oldest turns, split it by turns, truncate it after the
    last trained turn that fits, skip it, or stop with an error."""
    history: str = "samples"
    """A template that shows earlier turns otherwise once others follow: one sample for each trained
    turn (samples), or an error."""
    format: str = "auto"
    """auto: what the first row is; or messages, sharegpt, alpaca, prompt_completion, text,
    preference."""
    branch: str = "chosen"
    """Which side of a preference pair is trained: chosen or rejected."""
    strip: bool = False
    """Take white space off both ends of every content."""
    date: str | None = None
    """The day that a template is told if it asks for it, as 2026-01-31; without one it is not."""
    ignore: tuple[str, ...] = ()
    """Fields of messages that are not looked at; any other that is not known is refused."""
    names: dict[str, str] = field(default_factory=dict)
    """What a Jinja template prints by name, such as bos_token; found beside the tokenizer."""

    def __post_init__(self) -> None:
        check_numbers(self, "--")
        whole("--max_length", self.max_length, 2, 1 << 24)
        for name, known in (
            ("overflow", OVERFLOWS), ("history", HISTORIES), ("turns", TURNS), ("branch", BRANCHES),
        ):  # fmt: skip
            value = getattr(self, name)
            if value not in known:
                raise BadConfig(f"--{name} is {value!r}", do=suggest(value, known))
        check_format(self.format)
        if self.date is not None:
            try:
                datetime.date.fromisoformat(self.date)
            except (TypeError, ValueError):
                raise BadConfig(f"--date is {self.date!r}", do="write it as 2026-01-31") from None
        for name in ("train_on", "ignore"):
            given = getattr(self, name)
            plain = (given,) if isinstance(given, str) else tuple(given)
            object.__setattr__(self, name, plain)
        for role in self.train_on:
            if role not in ROLES[:4]:
                raise BadConfig(f"--train_on is {role!r}", do=suggest(role, ROLES[:4]))
        if not self.train_on:
            raise BadConfig("--train_on is empty", do="name a role, assistant for example")
        if not self.chat_template or not isinstance(self.chat_template, str):
            raise BadConfig("--chat_template is empty", do="name a preset or a Jinja template")

    def as_json(self) -> dict[str, Any]:
        """For the log."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_json(cls, known: Mapping[str, Any]) -> "ChatConfig":
        """What `as_json` gave."""
        plain: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in known.items()
        }
        return cls(**plain)


@dataclass(slots=True)
class Samples:
    """What became of some conversations: samples in their order, and the others with reasons."""

    document: Int64s
    """The conversation of each sample."""
    part: Int32s
    parts: Int32s
    tokens: pa.ListArray
    loss_spans: pa.ListArray
    """From, to, from, to …: the trained ranges of each sample."""
    turns: pa.ListArray
    """Role and first token of each turn."""
    trained: Int64s
    """Tokens that are trained."""
    left_out: Int32s
    """Messages of the conversation that are in none of its samples."""
    conversations: list[Conversation]
    refused: dict[int, Unfit]

    def __len__(self) -> int:
        return len(self.document)

    def masks(self) -> list[Bools]:
        """Which tokens are trained, for each sample; for tests and rare paths."""
        found = []
        sizes = self.tokens.value_lengths().to_numpy(zero_copy_only=False)
        for size, spans in zip(sizes.tolist(), self.loss_spans.to_pylist(), strict=True):
            mask = np.zeros(size, np.bool_)
            for first, last in zip(spans[::2], spans[1::2], strict=True):
                mask[first:last] = True
            found.append(mask)
        return found


@dataclass(frozen=True, slots=True)
class _Sample:
    """One conversation, rendered."""

    conversation: Conversation
    ids: UInt32s
    spans: Int32s
    turns: Int32s
    trained: int


_Try = tuple[Conversation, list[bool]]
_Search = Generator[_Try, "_Sample | Unfit", list[_Sample]]
"""Asks for conversations to be rendered, one after the other; answers with samples that fit."""


@dataclass(slots=True)
class _Batch:
    """Conversations that were rendered together."""

    made: layout.Made
    rows: Int64s
    """Which of the conversations that were given each one is."""
    refused: dict[int, Unfit] = field(default_factory=dict)

    def sample(self, row: int, conversation: Conversation) -> _Sample:
        made = self.made
        return _Sample(
            conversation,
            made.ids[made.at[row] : made.at[row + 1]],
            made.spans[made.spans_at[row] : made.spans_at[row + 1]],
            made.turns[made.turns_at[row] : made.turns_at[row + 1]],
            int(made.trained[row]),
        )


class Renderer:
    """Renders conversations by one template."""

    def __init__(self, tokenizer: Tokenizer, template: Template, config: ChatConfig) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.template = template
        self._special = frozenset(tokenizer.special_tokens)
        self._may_train = np.array([role in (*config.train_on, "text") for role in ROLES], np.uint8)
        self._check_tokenizer()

    def _check_tokenizer(self) -> None:
        """Refuse a tokenizer that encodes text after a control token otherwise than alone."""
        probe = Conversation(
            [Message("user", "a b\n c"), Message("assistant", "d é"), Message("user", "e"),
             Message("assistant", "f")]
        )  # fmt: skip
        whole = (True,) * len(ROLES)
        batch = self._make([probe], [[False, True, False, True]], np.array(whole, np.uint8))
        for fault in batch.refused.values():
            if fault.reason == "other_ids":
                raise BadConfig(
                    "the tokenizer encodes text after a control token otherwise than alone",
                    why=fault.why,
                    do="convert the tokenizer so that its control tokens take no white space with "
                    "them and text gets no prefix",
                )

    def render(self, conversations: Sequence[Conversation]) -> Samples:
        """Samples of at most `max_length` tokens, in the order of the conversations."""
        flags: list[list[bool]] = []
        refused: dict[int, Unfit] = {}
        for k, conversation in enumerate(conversations):
            try:
                flags.append(self._flags(conversation))
            except Unfit as error:
                refused[k] = error
                flags.append([])
        kept = [k for k in range(len(conversations)) if k not in refused]
        batch = self._make([conversations[k] for k in kept], [flags[k] for k in kept])
        kept_at = np.array(kept, np.int64)
        rows = kept_at[batch.rows] if len(kept) else batch.rows
        lengths = np.diff(batch.made.at)
        searches: dict[int, _Search] = {}
        for k, fault in batch.refused.items():
            at = kept[k]
            if fault.reason == REWRITES and self.config.history == "samples":
                searches[at] = self._per_turn(conversations[at], flags[at])
            elif fault.reason == REWRITES:
                raise _row_error(
                    at, "the template shows earlier turns otherwise once others follow", fault.why,
                    "give history=samples: one sample for each trained turn",
                )  # fmt: skip
            else:
                refused[at] = fault
        for row in np.flatnonzero(lengths > self.config.max_length).tolist():
            at = int(rows[row])
            searches[at] = self._shorten(conversations[at], flags[at], int(lengths[row]))
        found = self._search(searches, refused)
        return self._gather(conversations, batch, rows, found, refused)

    def _flags(self, conversation: Conversation) -> list[bool]:
        """Which messages are trained."""
        config = self.config
        if conversation.text is not None:
            return [True]
        flags = []
        for k, message in enumerate(conversation.messages):
            if config.strip:
                message.content = message.text.strip()
                if message.role == "assistant" and not (
                    message.content or message.tool_calls or message.reasoning_content
                ):
                    trimmed_answer(message, k)
            wanted = message.role in config.train_on
            if message.train is not None:
                if message.train and not wanted:
                    raise Unfit(
                        "wrong_role", f"messages[{k}].train",
                        f"the {message.role} is not trained: train_on is "
                        f"{', '.join(config.train_on)}",
                    )  # fmt: skip
                wanted = message.train
            flags.append(wanted)
        if config.turns == "last":
            last = max((k for k, wanted in enumerate(flags) if wanted), default=-1)
            flags = [k == last for k in range(len(flags))]
        if True not in flags:
            raise Unfit("nothing_to_train", why="no message of it is to be trained")
        return flags

    def _make(
        self, conversations: Sequence[Conversation], flags: Sequence[Sequence[bool]],
        may_train: Bytes | None = None,
    ) -> _Batch:  # fmt: skip
        """All of them in one go; what a template refuses or a check fails is named."""
        pieces = Pieces()
        answers = self.template.write(conversations, flags, pieces)
        refused = {k: fault for k, fault in enumerate(answers) if fault is not None}
        rows = np.array([k for k, fault in enumerate(answers) if fault is None], np.int64)
        operations = self.template.operations
        table = operations.table()
        ops = np.array(pieces.ops, np.int32)
        at = np.array([0, *pieces.ends], np.int64)
        data, data_at = end_to_end([text.encode() for text in pieces.texts], slack=PAD)
        run_ids, run_at = self.tokenizer.encode_rows(data[: int(data_at[-1])], data_at)
        script = layout.Script(
            ops, at, run_ids, run_at, self._may_train if may_train is None else may_train
        )
        size = len(run_ids) + int(operations.sizes()[ops].sum()) if len(ops) else 0
        count = len(rows)
        made = layout.Made(
            np.empty(size, np.uint32), np.zeros(count + 1, np.int64),
            np.empty(2 * len(ops) + 2, np.int32), np.zeros(count + 1, np.int64),
            np.empty(2 * len(ops) + 2, np.int32), np.zeros(count + 1, np.int64),
            np.zeros(count, np.int64), np.zeros(count, np.uint8),
        )  # fmt: skip
        _assemble(table, script, made)
        for row in np.flatnonzero(made.status).tolist():
            refused[int(rows[row])] = Unfit(
                layout.FAULTS[made.status[row]][0], why=layout.FAULTS[made.status[row]][1]
            )
        for row, why in self._differing(table, ops, at, data, data_at, made):
            refused.setdefault(int(rows[row]), Unfit("other_ids", why=why))
        batch = _Batch(made, rows, refused)
        if refused:
            self._drop(batch)
        return batch

    def _differing(
        self, table: layout.Table, ops: Int32s, at: Int64s, data: Bytes, data_at: Int64s,
        made: layout.Made,
    ) -> Iterator[tuple[int, str]]:  # fmt: skip
        """Conversations whose ids are not those of the whole text, though nothing in it spells a
        control token."""
        texts = np.diff(data_at)
        most = int(texts.sum()) + int((table.text_last - table.text_first)[ops].sum())
        whole, ends = np.empty(most + PAD, np.uint8), np.zeros(len(at), np.int64)
        _join_texts(table, ops, at, data, data_at, whole, ends)
        ids, ids_at = self.tokenizer.encode_rows(
            whole[: int(ends[-1])], ends, allowed_special=self._special
        )
        count = int(made.at[-1])
        if np.array_equal(ids_at, made.at) and np.array_equal(ids, made.ids[:count]):
            return
        special = np.array(sorted(self.tokenizer.special_tokens.values()), np.uint32)
        for row in range(len(at) - 1):
            mine = made.ids[made.at[row] : made.at[row + 1]]
            true = ids[ids_at[row] : ids_at[row + 1]]
            if np.array_equal(mine, true):
                continue
            if np.isin(true, special).sum() > np.isin(mine, special).sum():
                continue  # a text spells a control token: here it stays text
            same = min(len(mine), len(true))
            first = int(np.argmax(np.append(mine[:same] != true[:same], True)))
            yield (
                row,
                (
                    f"token {first} is {mine[first : first + 3].tolist()}, in the whole text "
                    f"{true[first : first + 3].tolist()}"
                ),
            )

    def _drop(self, batch: _Batch) -> None:
        """Leave those out that were refused after all."""
        keep = ~np.isin(batch.rows, np.array(list(batch.refused), np.int64))
        if keep.all():
            return
        made, rows = batch.made, np.flatnonzero(keep)
        ids, at = _taken(made.ids, made.at, rows)
        spans, spans_at = _taken(made.spans, made.spans_at, rows)
        turns, turns_at = _taken(made.turns, made.turns_at, rows)
        batch.made = layout.Made(
            ids, at, spans, spans_at, turns, turns_at, made.trained[rows], made.status[rows]
        )
        batch.rows = batch.rows[rows]

    # What is too long, and what has to be shown turn by turn

    def _search(
        self, searches: dict[int, _Search], refused: dict[int, Unfit]
    ) -> dict[int, list[_Sample]]:
        """Run all searches side by side: what each asks for next is rendered in one go."""
        found: dict[int, list[_Sample]] = {}
        asked: dict[int, _Try] = {}

        def step(k: int, answer: "_Sample | Unfit | None") -> None:
            try:
                asked[k] = next(searches[k]) if answer is None else searches[k].send(answer)
            except StopIteration as end:
                found[k] = end.value
            except Unfit as error:
                refused[k] = error
            except BadDocument as error:
                error.row = k
                raise

        for k in searches:
            step(k, None)
        while asked:
            tries, asked = asked, {}
            numbers = list(tries)
            batch = self._make([tries[k][0] for k in numbers], [tries[k][1] for k in numbers])
            answers: dict[int, _Sample | Unfit] = dict(batch.refused)
            for row, at in enumerate(batch.rows.tolist()):
                answers[at] = batch.sample(row, tries[numbers[at]][0])
            for at, k in enumerate(numbers):
                step(k, answers[at])
        return found

    def _fits(self, answer: "_Sample | Unfit") -> bool:
        if isinstance(answer, Unfit):
            raise answer
        return len(answer.ids) <= self.config.max_length

    def _shorten(self, conversation: Conversation, flags: list[bool], length: int) -> _Search:
        """What is done with a conversation that is too long."""
        policy, most = self.config.overflow, self.config.max_length
        told = f"it has {length:,} tokens, {most:,} are allowed"
        if policy == "error":
            raise _row_error(
                0, "a conversation is too long", told,
                "give more max_length, or overflow=drop_oldest, split, truncate or skip",
            )  # fmt: skip
        found: list[_Sample] = []
        if conversation.text is None and policy != "skip":
            ways = {"drop_oldest": self._drop_oldest, "split": self._split,
                    "truncate": self._truncate}  # fmt: skip
            found = yield from ways[policy](conversation, flags)
        if not found:
            raise Unfit("too_long", why=told)
        return found

    def _drop_oldest(self, conversation: Conversation, flags: list[bool]) -> _Search:
        """The newest turns that fit, behind the system message."""
        starts = _groups(conversation.messages)
        best: list[_Sample] = []
        low, high = 1, len(starts) - 1
        while low <= high:
            middle = (low + high) // 2
            wanted = _cut(conversation, flags, starts[middle], len(flags))
            if True not in wanted[1]:
                high = middle - 1
                continue
            answer = yield wanted
            if self._fits(answer):
                assert isinstance(answer, _Sample)
                best, high = [answer], middle - 1
            else:
                low = middle + 1
        return best

    def _truncate(self, conversation: Conversation, flags: list[bool]) -> _Search:
        """The first turns that fit, up to a trained one."""
        ends = [k + 1 for k, trained in enumerate(flags) if trained]
        best: list[_Sample] = []
        low, high = 0, len(ends) - 1
        while low <= high:
            middle = (low + high) // 2
            answer = yield (
                conversation.part(conversation.messages[: ends[middle]]),
                flags[: ends[middle]],
            )
            if self._fits(answer):
                assert isinstance(answer, _Sample)
                best, low = [answer], middle + 1
            else:
                high = middle - 1
        return best

    def _split(self, conversation: Conversation, flags: list[bool]) -> _Search:
        """As many samples as it takes, each of whole turns behind the system message.

        What is tried first is as much as the sample before had, then twice as much: halves of all
        that is left would be rendered again for each sample.
        """
        starts = [*_groups(conversation.messages), len(flags)]
        found: list[_Sample] = []
        first, reach = 0, 1
        while first < len(starts) - 1:
            best: _Sample | None = None
            low, high, taken = first + 1, len(starts) - 1, first + 1
            while low <= high:
                middle = min((low + high) // 2, first + reach)
                wanted = _cut(conversation, flags, starts[first], starts[middle])
                if True not in wanted[1]:
                    low, reach = middle + 1, 2 * reach
                    continue
                answer = yield wanted
                if self._fits(answer):
                    assert isinstance(answer, _Sample)
                    best, taken, low, reach = answer, middle, middle + 1, 2 * reach
                else:
                    high = middle - 1
            if best is not None:
                found.append(best)
            first, reach = taken, taken - first
        return found

    def _per_turn(self, conversation: Conversation, flags: list[bool]) -> _Search:
        """A sample for each trained turn, as the template shows it when it is the last."""
        found: list[_Sample] = []
        for k, trained in enumerate(flags):
            if not trained:
                continue
            part = conversation.part(conversation.messages[: k + 1])
            only = [False] * k + [True]
            answer = yield part, only
            if self._fits(answer):
                assert isinstance(answer, _Sample)
                found.append(answer)
                continue
            assert isinstance(answer, _Sample)
            with contextlib.suppress(Unfit):
                found += yield from self._shorten(part, only, len(answer.ids))
        if not found:
            raise Unfit("too_long", why="none of its turns fits")
        return found

    def _gather(
        self, conversations: Sequence[Conversation], batch: _Batch, rows: Int64s,
        found: dict[int, list[_Sample]], refused: dict[int, Unfit],
    ) -> Samples:  # fmt: skip
        """All samples in the order of their conversations."""
        made = batch.made
        if not found and not np.isin(rows, list(refused)).any():
            samples = [conversations[k] for k in rows.tolist()]
            count = len(rows)
            lists = (made.ids, made.at), (made.spans, made.spans_at), (made.turns, made.turns_at)
            return self._samples(
                rows, np.zeros(count, np.int32), np.ones(count, np.int32), lists, made.trained,
                np.zeros(count, np.int32), samples, refused,
            )  # fmt: skip
        regular = {k: row for row, k in enumerate(rows.tolist())}
        document, part, parts, left_out = [], [], [], []
        chosen: list[_Sample] = []
        for k, conversation in enumerate(conversations):
            if k in refused:
                continue
            mine = found.get(k)
            if mine is None:
                mine = [batch.sample(regular[k], conversation)]
            shown = {id(message) for one in mine for message in one.conversation.messages}
            lost = sum(id(message) not in shown for message in conversation.messages)
            for number, one in enumerate(mine):
                document.append(k)
                part.append(number)
                parts.append(len(mine))
                left_out.append(lost)
                chosen.append(one)
        empty = np.zeros(0, np.int32)
        lists = (
            _joined([one.ids for one in chosen], np.zeros(0, np.uint32)),
            _joined([one.spans for one in chosen], empty),
            _joined([one.turns for one in chosen], empty),
        )
        return self._samples(
            np.array(document, np.int64), np.array(part, np.int32), np.array(parts, np.int32),
            lists, np.array([one.trained for one in chosen], np.int64),
            np.array(left_out, np.int32), [one.conversation for one in chosen], refused,
        )  # fmt: skip

    def _samples(
        self, document: Int64s, part: Int32s, parts: Int32s, lists: Any, trained: Int64s,
        left_out: Int32s, conversations: list[Conversation], refused: dict[int, Unfit],
    ) -> Samples:  # fmt: skip
        (ids, at), (spans, spans_at), (turns, turns_at) = lists
        dtype = np.dtype(self.tokenizer.dtype)
        return Samples(
            document, part, parts,
            _list_array(ids[: int(at[-1])].astype(dtype, copy=False), at),
            _list_array(spans[: int(spans_at[-1])], spans_at),
            _list_array(turns[: int(turns_at[-1])], turns_at),
            trained, left_out, conversations, dict(sorted(refused.items())),
        )  # fmt: skip

    def close(self) -> None:
        """Let go of what the template holds."""
        self.template.close()


def _groups(messages: Sequence[Message]) -> list[int]:
    """Where each exchange begins: with what a user says; the first with what follows the system
    message."""
    first = int(messages[0].role == "system")
    found = [k for k in range(first, len(messages)) if messages[k].role == "user"]
    if not found or found[0] != first:
        found = [first, *found]
    return found


def _cut(conversation: Conversation, flags: list[bool], first: int, last: int) -> _Try:
    """Messages first..last behind the system message."""
    messages = conversation.messages
    head = int(messages[0].role == "system")
    return conversation.part(messages[:head] + messages[first:last]), flags[:head] + flags[
        first:last
    ]


def _row_error(row: int, what: str, why: str, do: str) -> BadDocument:
    error = BadDocument(what, why=why, do=do)
    error.row = row
    return error


def _taken(values: Any, at: Int64s, rows: Int64s) -> tuple[Any, Int64s]:
    """Some of the lists that lie end to end."""
    parts = [values[at[row] : at[row + 1]] for row in rows.tolist()]
    return _joined(parts, values[:0])


def _joined(parts: list[Any], empty: Any) -> tuple[Any, Int64s]:
    return np.concatenate([empty, *parts]), offsets_of([len(part) for part in parts])


def _list_array(values: Any, at: Int64s) -> pa.ListArray:
    kind = pa.from_numpy_dtype(values.dtype)
    content = pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])
    offsets = pa.py_buffer(at.astype(np.int32))
    return pa.ListArray.from_buffers(
        pa.list_(kind), len(at) - 1, [None, offsets], children=[content]
    )
