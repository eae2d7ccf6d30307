"""Presets: how a conversation becomes control tokens and text, turn by turn.

In:    conversations; a tokenizer
Out:   operations (constants, runs of text, turns) for the kernel of `render`, and the texts
Keeps: control tokens come from the template alone: text that spells one stays text; what stands
       between two control tokens is one run, so that its ids are those of the whole text
Never: drops a part of a conversation: what a template has no place for is refused

    <|im_start|>  assistant\\n  Paris.  <|im_end|>  \\n
      constant      head       trained   trained   constant

Each preset has a Jinja template beside it, presets/NAME.jinja, which gives the same text and marks
the same ranges: for servers, and for the tests.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock.arrays import Int32s
from penstock.chat import render_layout as layout
from penstock.chat.formats import (
    ASSISTANT,
    SYSTEM,
    TEXT,
    TOOL,
    USER,
    Conversation,
    Message,
    Unfit,
)
from penstock.errors import BadConfig
from penstock.tokenize.tokenizer import Tokenizer

EOS: Final = (
    "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eos|>", "<|im_end|>",
    "<|assistant_end|>",
)  # fmt: skip
"""What ends a document, by the names that tokenizers give it."""
BOS: Final = ("<|bos|>", "<|begin_of_text|>", "<s>", "<bos>", "[BOS]")
_dumps_indented = json.JSONEncoder(ensure_ascii=False, indent=4).encode
_c_make_encoder: Any = getattr(json.encoder, "c_make_encoder", None)
# made once: json.dumps makes one for each call, which is two thirds of its time
_once: Any = _c_make_encoder and _c_make_encoder(
    None, None, json.encoder.encode_basestring, None, ": ", ", ", False, False, True
)


def _dumps(value: Any) -> str:
    """As the tojson of chat templates writes it.

    >>> _dumps({"city": "Köln", "days": [1, 2.0, None]})
    '{"city": "Köln", "days": [1, 2.0, null]}'
    """
    return json.dumps(value, ensure_ascii=False) if _once is None else "".join(_once(value, 0))


def first_of(names: Iterable[str], tokenizer: Tokenizer) -> str:
    """The first of some special tokens that a tokenizer has; "" if it has none."""
    return next((name for name in names if name in tokenizer.special_tokens), "")


class Pieces:
    """Conversations on their way: operations, and the texts that some of them take in turn."""

    __slots__ = ("ends", "ops", "texts")

    def __init__(self) -> None:
        self.ops: list[int] = []
        self.texts: list[str] = []
        self.ends: list[int] = []
        """Operations up to the end of each conversation."""

    def mark(self) -> tuple[int, int]:
        """Where a conversation begins."""
        return len(self.ops), len(self.texts)

    def undo(self, mark: tuple[int, int]) -> None:
        """Forget a conversation that is refused."""
        del self.ops[mark[0] :]
        del self.texts[mark[1] :]


class Operations:
    """All operations that a template has used so far, by number; they are few."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.special = tokenizer.special_tokens
        longest_first = sorted(self.special, key=len, reverse=True)
        pattern = "|".join(map(re.escape, longest_first)) or "(?!)"
        self.controls = re.compile(f"({pattern})")
        """Splits a template's text: every second part is a control token."""
        self._known: dict[tuple[Any, ...], int] = {}
        self._rows: list[tuple[int, int, int, int, int, int]] = []
        self._ids: list[int] = []
        self._text = bytearray()
        self._table: layout.Table | None = None

    def const(self, text: str, *, trained: bool = False, stop: bool = False) -> list[int]:
        """A template's own text that has control tokens, or nothing, on both sides."""
        parts = [part for part in self.controls.split(text) if part]
        found = []
        for k, part in enumerate(parts):
            ends = stop and k == len(parts) - 1
            flags = (layout.TRAINED if trained else 0) | (layout.STOP if ends else 0)
            found.append(self._of(("const", part, flags), layout.CONST, flags, part, part))
        return found

    def control(self, text: str, *, trained: bool = False, stop: bool = False) -> int:
        """A control token."""
        flags = (layout.TRAINED if trained else 0) | (layout.STOP if stop else 0)
        return self._of(("const", text, flags), layout.CONST, flags, text, text)

    def run(self, head: str = "", *, trained: bool = False) -> int:
        """The next text, whose beginning `head` is the template's own and never trained."""
        flags = layout.TRAINED if trained else 0
        return self._of(("run", head, flags), layout.RUN, flags, head if trained else "", "")

    def head(self) -> int:
        """The next two texts, the first of which the second begins with: that part of it."""
        return self._of(("head",), layout.HEAD, 0, "", "")

    def rest(self, *, trained: bool = False) -> int:
        """What is left of a text after its head."""
        flags = layout.TRAINED if trained else 0
        return self._of(("rest", flags), layout.REST, flags, "", "")

    def turn(self, role: int) -> int:
        """Somebody else speaks."""
        key = ("turn", role)
        if key not in self._known:
            self._add(key, (layout.TURN, 0, role, role, 0, 0))
        return self._known[key]

    def _of(self, key: tuple[Any, ...], kind: int, flags: int, coded: str, text: str) -> int:
        if (found := self._known.get(key)) is not None:
            return found
        ids = [self.special[coded]] if coded in self.special else []
        if coded and not ids:
            ids = self.tokenizer.encode(coded).tolist()
        first, at = len(self._ids), len(self._text)
        self._ids += ids
        self._text += text.encode()
        return self._add(key, (kind, flags, first, len(self._ids), at, len(self._text)))

    def _add(self, key: tuple[Any, ...], row: tuple[int, int, int, int, int, int]) -> int:
        self._known[key] = len(self._rows)
        self._rows.append(row)
        self._table = None
        return len(self._rows) - 1

    def table(self) -> layout.Table:
        """The same for the kernels."""
        if self._table is None:
            rows = np.array(self._rows, np.int32).reshape(-1, 6)
            kind, flags, first, last, at, end = (rows[:, k].copy() for k in range(6))
            self._table = layout.Table(
                kind, flags, first, last, np.array(self._ids, np.uint32), at, end,
                np.frombuffer(bytes(self._text) or b"\0", np.uint8).copy(),
            )  # fmt: skip
        return self._table

    def sizes(self) -> Int32s:
        """Tokens that each operation adds beside its text."""
        table = self.table()
        found: Int32s = np.where(table.kind == layout.CONST, table.last - table.first, 0)
        return found


class Turn:
    """What stands around a turn: a prompt, which is never trained, and a stop, which is."""

    def __init__(
        self, operations: Operations, role: int, prompt: str, stop: str = "", after: str = "",
        *, stop_trained: bool = True,
    ) -> None:  # fmt: skip
        parts = operations.controls.split(prompt)
        self.head = parts[-1]
        self._operations = operations
        before = [operations.turn(role), *operations.const("".join(parts[:-1]))]
        self._whole = []
        self._ends = []
        for trained in (False, True):
            ends = trained and stop_trained
            end = [*operations.const(stop, trained=ends, stop=ends), *operations.const(after)]
            self._ends.append(end)
            self._whole.append([*before, operations.run(self.head, trained=trained), *end])
        self._before = before

    def write(self, out: Pieces, text: str, trained: bool = False) -> None:
        """A turn of one text."""
        out.ops += self._whole[trained]
        out.texts.append(self.head + text)

    def write_parts(
        self, out: Pieces, parts: Sequence[tuple[str, bool]], trained: bool = False
    ) -> None:
        """A turn of texts, some of them the template's own, which may be control tokens."""
        operations = self._operations
        out.ops += self._before
        head, text = self.head, self.head
        begun = bool(head)
        for part, is_own in parts:
            pieces = operations.controls.split(part) if is_own else [part]
            text += pieces[0]
            for k in range(1, len(pieces), 2):
                if begun or text:
                    out.ops.append(operations.run(head, trained=trained))
                    out.texts.append(text)
                out.ops.append(operations.control(pieces[k], trained=trained, stop=True))
                head, text, begun = "", pieces[k + 1], False
        if text or begun:
            out.ops.append(operations.run(head, trained=trained))
            out.texts.append(text)
        out.ops += self._ends[trained]


class Template(ABC):
    """What turns conversations into operations."""

    name: str
    operations: Operations

    @abstractmethod
    def write(
        self, conversations: Sequence[Conversation], trained: Sequence[Sequence[bool]], out: Pieces
    ) -> list[Unfit | None]:
        """Add conversations whose messages are trained or not; what is refused adds nothing."""

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """All that decides what it writes, as JSON."""

    def close(self) -> None:  # noqa: B027
        """Let go of what it holds."""


class Preset(Template):
    """A template that is written here, turn by turn."""

    needs: tuple[str, ...] = ()
    """Control tokens without which there is nothing to write."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        for name in self.needs:
            if name not in tokenizer.special_tokens:
                known = ", ".join(tokenizer.special_tokens) or "none"
                raise BadConfig(
                    f"the tokenizer has no special token {name}",
                    why=f"chat_template {self.name!r} needs it; the tokenizer has {known}",
                    do=f"train the tokenizer with --special_tokens {','.join(self.needs)}, choose "
                    'another template, or "plain", which needs none',
                )
        self.operations = Operations(tokenizer)
        self._eos = first_of(EOS, tokenizer)
        self._bos = first_of(BOS, tokenizer)
        self._text_ops = {
            trained: [
                *self.operations.const(self._bos),
                self.operations.turn(TEXT),
                self.operations.run(trained=trained),
                *self.operations.const(self._eos, trained=trained, stop=trained),
            ]
            for trained in (False, True)
        }
        self.bind(self.operations)

    @abstractmethod
    def bind(self, operations: Operations) -> None:
        """Prepare the turns."""

    @abstractmethod
    def compose(self, conversation: Conversation, trained: Sequence[bool], out: Pieces) -> None:
        """Add one conversation, or raise `Unfit`."""

    def write(
        self, conversations: Sequence[Conversation], trained: Sequence[Sequence[bool]], out: Pieces
    ) -> list[Unfit | None]:
        refused: list[Unfit | None] = []
        for conversation, flags in zip(conversations, trained, strict=True):
            mark = out.mark()
            try:
                if conversation.text is not None:
                    self._compose_text(conversation.text, flags[0], out)
                else:
                    self.compose(conversation, flags, out)
            except Unfit as error:
                out.undo(mark)
                refused.append(error)
                continue
            out.ends.append(len(out.ops))
            refused.append(None)
        return refused

    def _compose_text(self, text: str, trained: bool, out: Pieces) -> None:
        if not self._eos:
            raise Unfit("no_stop_token", "text", "the tokenizer has no token that ends a text")
        out.ops += self._text_ops[trained]
        out.texts.append(text)

    def settings(self) -> dict[str, Any]:
        return {"preset": self.name}

    @classmethod
    def jinja(cls) -> str:
        """The same as a Jinja template."""
        return (Path(__file__).parent / "presets" / f"{cls.name}.jinja").read_text("utf-8")


def refuse_thoughts(message: Message, k: int, name: str) -> None:
    """For templates that would drop them."""
    if message.reasoning_content:
        raise Unfit(
            "no_place", f"messages[{k}].reasoning_content", f"{name} has no place for thoughts"
        )


def trimmed_answer(message: Message, k: int) -> str:
    """For templates that take white space off: an answer of nothing else would teach to stop."""
    text = message.text.strip()
    if not text:
        raise Unfit(
            "empty_assistant", f"messages[{k}].content", "the assistant says white space alone"
        )
    return text


def refuse_tools(conversation: Conversation, name: str) -> None:
    """For templates that would drop tools, calls and results, or print them as something else."""
    if conversation.tools:
        raise Unfit("no_place", "tools", f"{name} has no place for tools")
    for k, message in enumerate(conversation.messages):
        if message.tool_calls or message.role == "tool":
            raise Unfit("no_place", f"messages[{k}]", f"{name} has no place for calls and results")


def refuse_order(messages: Sequence[Message], name: str) -> None:
    """For templates in which user and assistant take turns."""
    for k, message in enumerate(messages):
        wanted = "assistant" if k % 2 else "user"
        if message.role != wanted:
            raise Unfit(
                "wrong_order", f"messages[{k}].role",
                f"in {name} user and assistant take turns: {wanted} was to come",
            )  # fmt: skip


_TOOLS_BEFORE: Final = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are "
    "provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_AFTER: Final = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    'within <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": '
    "<args-json-object>}\n</tool_call>"
)


class ChatML(Preset):
    """<|im_start|>role, the text, <|im_end|>; tools and calls as the Qwen family writes them."""

    name = "chatml"
    needs = ("<|im_start|>", "<|im_end|>")
    default_system = ""
    has_thoughts = True

    def bind(self, operations: Operations) -> None:
        self._system, self._user, self._assistant, self._tool = (
            Turn(operations, role, f"<|im_start|>{name}\n", "<|im_end|>", "\n")
            for role, name in ((SYSTEM, "system"), (USER, "user"), (ASSISTANT, "assistant"),
                               (TOOL, "tool"))
        )  # fmt: skip
        own = f"{_TOOLS_BEFORE}{_TOOLS_AFTER}<think></think>"
        self._has_controls = len(operations.controls.split(own)) > 1

    def compose(self, conversation: Conversation, trained: Sequence[bool], out: Pieces) -> None:
        messages = conversation.messages
        first = 0
        system = self.default_system
        if messages[0].role == "system":
            first, system = 1, messages[0].text
        if conversation.tools or first or system:
            self._write_system(system, conversation.tools, bool(first) and trained[0], out)
        for k in range(first, len(messages)):
            message = messages[k]
            role = message.role
            if role == "user":
                self._user.write(out, message.text, trained[k])
            elif role == "assistant":
                if message.tool_calls or message.reasoning_content:
                    self._write_calls(message, k, trained[k], out)
                else:
                    self._assistant.write(out, message.text, trained[k])
            else:
                self._write_result(messages, k, trained, out)

    def _write_system(
        self, system: str, tools: list[dict[str, Any]] | None, trained: bool, out: Pieces
    ) -> None:
        if not tools:
            self._system.write(out, system, trained)
            return
        lines = "".join(f"\n{_dumps(tool)}" for tool in tools)
        joint = "\n\n" if system or self.default_system else ""
        parts = [(system, False), (joint + _TOOLS_BEFORE, True), (lines, False),
                 (_TOOLS_AFTER, True)]  # fmt: skip
        self._write_parts(self._system, parts, trained, out)

    def _write_calls(self, message: Message, k: int, trained: bool, out: Pieces) -> None:
        parts: list[tuple[str, bool]] = []
        if message.reasoning_content:
            if not self.has_thoughts:
                refuse_thoughts(message, k, self.name)
            parts += [("<think>\n", True), (message.reasoning_content, False),
                      ("\n</think>\n\n", True)]  # fmt: skip
        parts.append((message.text, False))
        joint = bool(message.text)
        for name, arguments, _ in message.calls:
            own = '\n<tool_call>\n{"name": "' if joint else '<tool_call>\n{"name": "'
            parts += [(own, True), (f'{name}", "arguments": {_dumps(arguments)}}}', False),
                      ("\n</tool_call>", True)]  # fmt: skip
            joint = True
        self._write_parts(self._assistant, parts, trained, out)

    def _write_parts(
        self, turn: Turn, parts: list[tuple[str, bool]], trained: bool, out: Pieces
    ) -> None:
        if self._has_controls:
            turn.write_parts(out, parts, trained)
        else:
            turn.write(out, "".join([text for text, _ in parts]), trained)

    def _write_result(
        self, messages: Sequence[Message], k: int, trained: Sequence[bool], out: Pieces
    ) -> None:
        self._tool.write(out, messages[k].text, trained[k])


class Qwen(ChatML):
    """Qwen 2.5: results in a user's turn, several in one, and a system message always."""

    name = "qwen"
    default_system = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    has_thoughts = False

    def bind(self, operations: Operations) -> None:
        super().bind(operations)
        first, last = "\n<tool_response>\n", "\n</tool_response>"
        self._response = first, last
        self._has_controls |= len(operations.controls.split(first + last)) > 1
        self._results = Turn(operations, TOOL, "<|im_start|>user", "<|im_end|>", "\n")

    def _write_result(
        self, messages: Sequence[Message], k: int, trained: Sequence[bool], out: Pieces
    ) -> None:
        if messages[k - 1].role == "tool":
            if trained[k] != trained[k - 1]:
                raise Unfit(
                    "no_place", f"messages[{k}].train",
                    "qwen puts results into one turn: all of them are trained, or none",
                )  # fmt: skip
            return  # it was written with the first one
        first, last = self._response
        parts: list[tuple[str, bool]] = []
        flag = trained[k]
        while k < len(messages) and messages[k].role == "tool":
            parts += [(first, True), (messages[k].text, False), (last, True)]
            k += 1
        self._write_parts(self._results, parts, flag, out)


class Llama3(Preset):
    """Llama 3.1 to 3.3: tools in the first user's turn, one call at a time, results as JSON."""

    name = "llama3"
    needs = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")

    def bind(self, operations: Operations) -> None:
        self._begin = operations.const("<|begin_of_text|>")
        self._system, self._user, self._assistant, self._tool = (
            Turn(
                operations, role, f"<|start_header_id|>{name}<|end_header_id|>\n\n", "<|eot_id|>"
            )
            for role, name in ((SYSTEM, "system"), (USER, "user"), (ASSISTANT, "assistant"),
                               (TOOL, "ipython"))
        )  # fmt: skip

    def compose(self, conversation: Conversation, trained: Sequence[bool], out: Pieces) -> None:
        messages, tools = conversation.messages, conversation.tools
        first = int(messages[0].role == "system")
        system = messages[0].text.strip() if first else ""
        out.ops += self._begin
        head = "Environment: ipython\n" if tools else ""
        head += "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
        self._system.write(out, head + system, bool(first) and trained[0])
        if tools:
            if len(messages) == first or messages[first].role != "user":
                raise Unfit("wrong_order", f"messages[{first}].role", "llama3 puts tools into the "
                            "first message of the user, and there is none")  # fmt: skip
            listed = "".join(_dumps_indented(tool) + "\n\n" for tool in tools)
            asked = (
                "Given the following functions, please respond with a JSON for a function call "
                "with its proper arguments that best answers the given prompt.\n\nRespond in the "
                'format {"name": function name, "parameters": dictionary of argument name and its '
                f"value}}.Do not use variables.\n\n{listed}{messages[first].text.strip()}"
            )
            self._user.write(out, asked, trained[first])
            first += 1
        for k in range(first, len(messages)):
            message = messages[k]
            if message.role == "user":
                self._user.write(out, message.text.strip(), trained[k])
            elif message.role == "tool":
                self._tool.write(out, _dumps(message.text), trained[k])
            elif message.tool_calls:
                self._assistant.write(out, self._call(message, k), trained[k])
            else:
                refuse_thoughts(message, k, self.name)
                self._assistant.write(out, trimmed_answer(message, k), trained[k])

    def _call(self, message: Message, k: int) -> str:
        refuse_thoughts(message, k, self.name)
        if len(message.calls) > 1:
            raise Unfit("no_place", f"messages[{k}].tool_calls", "llama3 makes one call at a time")
        if message.text.strip():
            raise Unfit(
                "no_place", f"messages[{k}].content", "llama3 has no place for text beside a call"
            )
        ((name, arguments, _),) = message.calls
        return f'{{"name": "{name}", "parameters": {_dumps(arguments)}}}'


class Gemma(Preset):
    """Gemma to Gemma 3: the system message stands in the first user's turn; no tools."""

    name = "gemma"
    needs = ("<bos>", "<start_of_turn>", "<end_of_turn>")

    def bind(self, operations: Operations) -> None:
        self._begin = operations.const("<bos>")
        self._user = Turn(operations, USER, "<start_of_turn>user\n", "<end_of_turn>", "\n")
        self._model = Turn(operations, ASSISTANT, "<start_of_turn>model\n", "<end_of_turn>", "\n")

    def compose(self, conversation: Conversation, trained: Sequence[bool], out: Pieces) -> None:
        refuse_tools(conversation, self.name)
        messages = conversation.messages
        first = int(messages[0].role == "system")
        refuse_order(messages[first:], self.name)
        before = messages[0].text + "\n\n" if first else ""
        out.ops += self._begin
        for k in range(first, len(messages)):
            message = messages[k]
            if message.role == "user":
                self._user.write(out, before + message.text.strip(), trained[k])
                before = ""
            else:
                refuse_thoughts(message, k, self.name)
                self._model.write(out, trimmed_answer(message, k), trained[k])


class Mistral(Preset):
    """Mistral from its 13th version on: tools before the first user's turn, [ARGS] in calls."""

    name = "mistral"
    needs = ("<s>", "</s>", "[INST]", "[/INST]")

    def bind(self, operations: Operations) -> None:
        self._begin = operations.const("<s>")
        self._user = Turn(operations, USER, "[INST]", "[/INST]")
        self._assistant = Turn(operations, ASSISTANT, "", "</s>")
        self._system = self._optional(SYSTEM, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")
        self._tools = self._optional(SYSTEM, "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
        self._tool = self._optional(TOOL, "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
        self._may_call = {"[TOOL_CALLS]", "[ARGS]"} <= operations.special.keys()

    def _optional(self, role: int, first: str, last: str) -> Turn | None:
        if not {first, last} <= self.operations.special.keys():
            return None
        return Turn(self.operations, role, first, last)

    def compose(self, conversation: Conversation, trained: Sequence[bool], out: Pieces) -> None:
        messages, tools = conversation.messages, conversation.tools
        out.ops += self._begin
        for k, message in enumerate(messages):
            role = message.role
            if role == "user":
                if tools:
                    self._need(self._tools, "tools", "[AVAILABLE_TOOLS]").write(out, _dumps(tools))
                    tools = None
                self._user.write(out, message.text, trained[k])
            elif role == "assistant":
                refuse_thoughts(message, k, self.name)
                if not message.tool_calls:
                    self._assistant.write(out, message.text, trained[k])
                    continue
                if not self._may_call:
                    self._need(None, f"messages[{k}].tool_calls", "[TOOL_CALLS] and [ARGS]")
                parts = [(message.text, False)] if message.text else []
                for name, arguments, _ in message.calls:
                    parts += [("[TOOL_CALLS]", True), (name, False), ("[ARGS]", True),
                              (_dumps(arguments), False)]  # fmt: skip
                self._assistant.write_parts(out, parts, trained[k])
            elif role == "system":
                turn = self._need(self._system, f"messages[{k}]", "[SYSTEM_PROMPT]")
                turn.write(out, message.text, trained[k])
            else:
                turn = self._need(self._tool, f"messages[{k}]", "[TOOL_RESULTS]")
                turn.write(out, message.text, trained[k])
        if tools:
            raise Unfit(
                "wrong_order", "tools", "mistral puts tools before a user, and there is none"
            )

    def _need(self, turn: Turn | None, field: str, name: str) -> Turn:
        if turn is None:
            raise Unfit("no_place", field, f"the tokenizer has no {name}")
        return turn


class Nanochat(Preset):
    """nanochat: calls of Python and what they print stand within the assistant's turn."""

    name = "nanochat"
    needs = (
        "<|bos|>", "<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>",
    )  # fmt: skip

    def bind(self, operations: Operations) -> None:
        self._begin = operations.const("<|bos|>")
        self._user = Turn(operations, USER, "<|user_start|>", "<|user_end|>")
        self._says = Turn(operations, ASSISTANT, "<|assistant_start|>", "<|assistant_end|>")
        # the same turn, opened or left open
        self._opens = Turn(operations, ASSISTANT, "<|assistant_start|>")
        self._ends = Turn(operations, ASSISTANT, "", "<|assistant_end|>")
        self._goes_on = Turn(operations, ASSISTANT, "")
        needed = {"<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>"}
        self._may_call = needed <= operations.special.keys()
        if self._may_call:
            self._output = Turn(operations, TOOL, "<|output_start|>", "<|output_end|>")

    def compose(self, conversation: Conversation, trained: Sequence[bool], out: Pieces) -> None:
        messages = conversation.messages
        if conversation.tools:
            raise Unfit("no_place", "tools", "nanochat has no place for a list of tools")
        first = int(messages[0].role == "system")
        before = ""
        if first:
            before = messages[0].text + "\n\n"
            if len(messages) == 1 or messages[1].role != "user":
                raise Unfit("wrong_order", "messages[1].role", "nanochat puts the system message "
                            "before the first of the user, and there is none")  # fmt: skip
        out.ops += self._begin
        is_open, last = False, "assistant"
        for k in range(first, len(messages)):
            message = messages[k]
            role = message.role
            if role == "user":
                if is_open or last == "user":
                    raise _turns(k, "assistant")
                self._user.write(out, before + message.text, trained[k])
                before = ""
            elif role == "tool":
                if not self._may_call:
                    raise self._no_calls(k)
                self._output.write(out, message.text, trained[k])
                continue
            else:
                refuse_thoughts(message, k, self.name)
                if last != "user" and not is_open:
                    raise _turns(k, "user")
                calls = self._calls(message, k)
                if not calls and not is_open:
                    self._says.write(out, message.text, trained[k])
                elif not calls:
                    self._ends.write(out, message.text, trained[k])
                else:
                    turn = self._goes_on if is_open else self._opens
                    text = [(message.text, False)] if message.text else []
                    turn.write_parts(out, [*text, *calls], trained[k])
                is_open = bool(calls)
            last = role

    def _calls(self, message: Message, k: int) -> list[tuple[str, bool]]:
        parts: list[tuple[str, bool]] = []
        for name, arguments, _ in message.calls:
            if not self._may_call:
                raise self._no_calls(k)
            code = next(iter(arguments.values()), None)
            if name != "python" or len(arguments) != 1 or not isinstance(code, str):
                code = f'{{"name": "{name}", "arguments": {_dumps(arguments)}}}'
            parts += [("<|python_start|>", True), (code, False), ("<|python_end|>", True)]
        return parts

    def _no_calls(self, k: int) -> Unfit:
        return Unfit("no_place", f"messages[{k}]", "the tokenizer has no <|python_start|>")


def _turns(k: int, wanted: str) -> Unfit:
    return Unfit(
        "wrong_order", f"messages[{k}].role",
        f"in nanochat user and assistant take turns: {wanted} was to come",
    )  # fmt: skip


class Plain(Preset):
    """No control tokens but the one that ends a text: "User: …", "Assistant: …"."""

    name = "plain"
    _NAMES: Final = {"system": "System", "user": "User", "tool": "Tool"}
    _ROLES: Final = {"system": SYSTEM, "user": USER, "tool": TOOL}

    def bind(self, operations: Operations) -> None:
        if not self._eos:
            raise BadConfig(
                "the tokenizer has no token that ends a text",
                why=f"it has none of {', '.join(EOS)}",
                do="train the tokenizer with --special_tokens '<|endoftext|>'",
            )
        self._begin = operations.const(self._bos)
        self._says = operations.turn(ASSISTANT)
        self._speaks = {name: operations.turn(role) for name, role in self._ROLES.items()}
        self._head = operations.head()
        self._rest = [operations.rest(), operations.rest(trained=True)]
        self._run = operations.run()
        self._end = [
            operations.const(self._eos),
            operations.const(self._eos, trained=True, stop=True),
        ]

    def compose(self, conversation: Conversation, trained: Sequence[bool], out: Pieces) -> None:
        refuse_tools(conversation, self.name)
        out.ops += self._begin
        text = ""
        for k, message in enumerate(conversation.messages):
            if message.role != "assistant":
                if trained[k]:
                    raise Unfit(
                        "no_stop_token", f"messages[{k}]",
                        f"in plain no token ends what the {message.role} says",
                    )  # fmt: skip
                out.ops.append(self._speaks[message.role])
                text += f"{self._NAMES[message.role]}: {message.text}\n\n"
                continue
            refuse_thoughts(message, k, self.name)
            text += "Assistant:"
            out.texts += [text, f"{text} {message.text}"]
            out.ops += [self._head, self._says, self._rest[trained[k]], *self._end[trained[k]]]
            text = "\n\n"
        if text.strip():
            out.ops.append(self._run)
            out.texts.append(text)


PRESETS: Final[dict[str, type[Preset]]] = {
    preset.name: preset for preset in (ChatML, Llama3, Qwen, Gemma, Mistral, Nanochat, Plain)
}
