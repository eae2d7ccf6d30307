"""Conversations as people store them, made one kind of conversation, strictly.

In:    a row of JSON in one of six formats, the one that the first row has
Out:   a `Conversation`: roles in order, texts as texts, arguments of calls as objects
Keeps: every field that is trained on as it was written; order and types within arguments
Never: guesses: a row that is of another format, or says two things, is refused with its field

    messages            {"messages": [{"role": …, "content": …, "tool_calls": …}], "tools": […]}
    sharegpt            {"conversations": [{"from": "human", "value": …}]}
    alpaca              {"instruction": …, "input": …, "output": …}
    prompt_completion   {"prompt": …, "completion": …}
    text                {"text": …}
    preference          {"chosen": …, "rejected": …, "prompt": …}
"""

import json
import math
from collections.abc import Callable, Collection, Iterator
from itertools import pairwise
from typing import Any, Final

import msgspec
import numpy as np

from penstock.arrays import Bytes, Int64s
from penstock.errors import BadConfig, BadInput
from penstock.kernels import Kernel
from penstock.options import suggest

ROLES: Final = ("system", "user", "assistant", "tool", "text")
"""Who speaks, by number. "text" is a document that nobody speaks."""
SYSTEM, USER, ASSISTANT, TOOL, TEXT = range(5)
_ALIASES: Final = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant",
    "tool": "tool", "function": "tool",
}  # fmt: skip
_SPEAKERS: Final = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant",
    "assistant": "assistant", "chatgpt": "assistant", "model": "assistant", "bing": "assistant",
    "bard": "assistant", "tool": "tool", "observation": "tool", "function_response": "tool",
    "ipython": "tool", "function_call": "call",
}  # fmt: skip
_SAID: Final = {".role": ".from", ".content": ".value"}
"""What ShareGPT calls parts of messages."""
MAX_CONTENT: Final = 8 << 20
"""Characters of one message: what is longer is a file, not a turn."""
MAX_DEPTH: Final = 100
"""Levels of lists and objects in arguments and tools."""


class Unfit(Exception):
    """A row that is not a conversation, or that a template has no place for: which field, why."""

    def __init__(self, reason: str, field: str = "", why: str = "") -> None:
        super().__init__(reason, field, why)
        self.reason, self.field, self.why = reason, field, why

    def __str__(self) -> str:
        return ": ".join(part for part in (self.field, self.why or self.reason) if part)


class Function(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """What is called, and with what."""

    name: str
    arguments: dict[str, Any] | str | None = None


class ToolCall(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A call as OpenAI writes it; some leave `function` out and put its fields here."""

    function: Function | None = None
    id: str | None = None
    type: str | None = None
    index: int | None = None
    name: str | None = None
    arguments: dict[str, Any] | str | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """One turn. Once it is read, `content` is a text and `arguments` are objects."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    train: bool | None = None
    """Whether it is trained, where the row says so itself."""
    weight: int | float | None = None
    reasoning: str | None = None
    thinking: str | None = None
    function_call: Function | None = None
    refusal: None = None
    audio: None = None
    annotations: list[Any] | None = None
    id: str | None = None

    @property
    def text(self) -> str:
        """The content, once it is read."""
        return self.content  # type: ignore[return-value]

    @property
    def calls(self) -> list[tuple[str, dict[str, Any], str]]:
        """Name, arguments and id of each call, once it is read."""
        found = []
        for call in self.tool_calls or ():
            assert call.function is not None
            assert isinstance(call.function.arguments, dict)
            found.append((call.function.name, call.function.arguments, call.id or ""))
        return found


class Conversation(msgspec.Struct, omit_defaults=True, gc=False):
    """What was said, and the tools that were there; or a text that nobody says."""

    messages: list[Message] = []
    tools: list[dict[str, Any]] | None = None
    text: str | None = None

    def as_json(self) -> bytes:
        """As a row of the format `messages`, or `text`."""
        return _ENCODER.encode(self)

    def part(self, messages: list[Message]) -> "Conversation":
        """The same tools with some of the messages."""
        return Conversation(messages, self.tools)


_ENCODER: Final = msgspec.json.Encoder()
_may_repeat = Kernel(
    "penstock.chat.formats_kernel",
    "may_repeat",
    "void(uint8[::1], int64[::1], uint64[::1], int32[::1], uint8[::1])",
)
_Tools = list[dict[str, Any]] | str | None


class _Row(msgspec.Struct, kw_only=True):
    """What may stand beside the messages of every format and means something; any other field
    beside them (a number, a score) is not looked at."""

    system: str | None = None
    tools: _Tools = None
    functions: _Tools = None
    """OpenAI's older name for what its tools hold."""


class _Messages(_Row):
    messages: list[Message]


class _Conversations(_Row):
    """OpenAI's messages under the name that ShareGPT's have."""

    conversations: list[Message]


class _Said(msgspec.Struct, forbid_unknown_fields=True):
    speaker: str = msgspec.field(name="from")
    value: str | None = None
    weight: int | float | None = None
    train: bool | None = None


class _ShareGPT(_Row):
    conversations: list[_Said]


class _Alpaca(_Row):
    instruction: str
    output: str
    input: str | None = None
    history: list[tuple[str, str]] | None = None


class _Pair(_Row):
    prompt: str | list[Message]
    completion: str | list[Message]


class _Text(msgspec.Struct):
    text: str


class _Preference(_Row):
    chosen: str | list[Message]
    rejected: str | list[Message]
    prompt: str | list[Message] | None = None


FORMATS: Final = ("messages", "sharegpt", "alpaca", "prompt_completion", "text", "preference")
_ROWS: Final[dict[str, type]] = {
    "messages": _Messages,
    "conversations": _Conversations,
    "sharegpt": _ShareGPT,
    "alpaca": _Alpaca,
    "prompt_completion": _Pair,
    "text": _Text,
    "preference": _Preference,
}
_KEYS: Final = (
    ("messages", {"messages"}),
    ("sharegpt", {"conversations"}),
    ("preference", {"chosen", "rejected"}),
    ("prompt_completion", {"prompt", "completion"}),
    ("alpaca", {"instruction", "output"}),
    ("text", {"text"}),
)


def sniff_format(row: Any) -> str:
    """The format of a row that was parsed; "" if it is none of them.

    >>> sniff_format({"prompt": "1 + 1", "completion": "2"}), sniff_format({"body": "2"})
    ('prompt_completion', '')
    """
    if not isinstance(row, dict):
        return ""
    return next((name for name, keys in _KEYS if keys <= row.keys()), "")


def check_format(name: str) -> str:
    """A format as a user names it."""
    if name not in ("auto", *FORMATS):
        raise BadConfig(f"format is {name!r}", do=suggest(name, ["auto", *FORMATS]))
    return name


def find_format(line: bytes, where: str) -> str:
    """The format that the first row of an input has."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadInput(
            "the first row is not JSON", where=where, why=str(error), do="give JSON lines"
        ) from None
    if found := sniff_format(row):
        return found
    keys = ", ".join(map(repr, row)) if isinstance(row, dict) else f"a {type(row).__name__}"
    raise BadInput(
        "the first row is no conversation of a known format",
        where=where,
        why=f"it has {keys or 'no fields'}",
        do="give rows with "
        + "; ".join(" and ".join(sorted(fields)) for _, fields in _KEYS)
        + "; or rename the fields",
    )


class RowReader:
    """Reads the rows of one format."""

    def __init__(
        self, format: str, *, branch: str = "chosen", ignore: Collection[str] = ()
    ) -> None:
        """Of preference pairs one `branch` is taken; fields of messages in `ignore` are not
        looked at."""
        assert format in FORMATS
        self._format = format
        self._branch = branch
        self._ignore = frozenset(ignore)
        self._ignores_known = bool(self._ignore & {*Message.__struct_fields__, "from", "value"})
        self._decode: Callable[[Any], Any] = msgspec.json.Decoder(_ROWS[format]).decode
        self._read: Callable[[Any], Conversation] = getattr(self, f"_read_{format}")

    def read(self, line: bytes | memoryview) -> Conversation:
        """The conversation of a row; raises `Unfit`."""
        line = bytes(line)
        try:
            row = self._row(line)
        except RecursionError:
            raise _too_deep() from None
        found = self._read(row)
        # as deep as it has brackets at most, if none of them is hidden in an escape
        if line.count(b"{") + line.count(b"[") + line.count(b"\\u00") > MAX_DEPTH:
            _check_depth(found)
        return found

    def read_all(self, data: Bytes, at: Int64s) -> Iterator[Conversation | Unfit]:
        """The conversations of rows that lie end to end, or what is wrong with each."""
        repeats = np.zeros(len(at) - 1, np.uint8)
        _may_repeat(data, at, np.empty(4096, np.uint64), np.empty(MAX_DEPTH, np.int32), repeats)
        rows = data.data
        for (first, last), may_repeat in zip(pairwise(at.tolist()), repeats.tolist(), strict=True):
            try:
                if may_repeat:
                    _check_keys(bytes(rows[first:last]))
                found: Conversation | Unfit = self.read(rows[first:last])
            except Unfit as fault:
                found = fault
            yield found

    def _row(self, line: bytes) -> Any:
        if self._ignores_known:  # the decoder would take it
            return self._read_again(line)
        try:
            return self._decode(line)
        except (ValueError, RecursionError):
            return self._read_again(line)

    def _read_again(self, line: bytes) -> Any:
        """What is wrong with a row, unless it is only written in another way."""
        try:
            plain = json.loads(line, parse_constant=_no_constant, parse_float=_finite)
        except UnicodeDecodeError as fault:
            raise Unfit("invalid_utf8", why=str(fault)) from None
        except ValueError as fault:
            raise Unfit("invalid_json", why=str(fault)) from None
        if not isinstance(plain, dict):
            raise Unfit("not_an_object", why=f"it is a {type(plain).__name__}, not an object")
        if not dict(_KEYS)[self._format] <= plain.keys():
            found = sniff_format(plain)
            told = f"it is of format {found}" if found else f"it has {', '.join(plain)[:200]}"
            raise Unfit("other_format", why=f"{told}; the first row was of {self._format}")
        if (field := _surrogate(plain)) is not None:
            raise Unfit("lone_surrogate", field, "half of a surrogate pair is no character")
        kind = _ROWS[self._format]
        if self._format == "sharegpt" and _has_roles(plain["conversations"]):
            kind = _Conversations
        try:
            return msgspec.convert(_without(plain, self._ignore), kind, strict=True)
        except ValueError as fault:
            raise _unfit(fault) from None

    def _read_messages(self, row: _Messages) -> Conversation:
        return _conversation(row, row.messages, "messages")

    def _read_sharegpt(self, row: _ShareGPT | _Conversations) -> Conversation:
        if isinstance(row, _Conversations):
            return _conversation(row, row.conversations, "conversations")
        messages = []
        for k, said in enumerate(row.conversations):
            role = _SPEAKERS.get(said.speaker)
            if role is None:
                raise Unfit(
                    "unknown_role", f"conversations[{k}].from",
                    f"{said.speaker!r}: {suggest(said.speaker, _SPEAKERS)}",
                )  # fmt: skip
            if role == "call":
                message = _as_call(said.value or "", f"conversations[{k}].value")
            else:
                message = Message(role, said.value or "")
            message.train, message.weight = said.train, said.weight
            messages.append(message)

        def name(k: int, part: str) -> str:
            return f"conversations[{k}]{_SAID.get(part, part)}"

        # some write calls into the text: what answers them is no answer to nothing
        return _conversation(row, messages, name, written_calls=True)

    def _read_alpaca(self, row: _Alpaca) -> Conversation:
        messages = []
        for asked, answered in row.history or ():
            messages += [Message("user", asked), Message("assistant", answered)]
        past = len(messages)
        asked = f"{row.instruction}\n\n{row.input}" if row.input else row.instruction
        messages += [Message("user", asked), Message("assistant", row.output)]

        def name(k: int, _: str) -> str:
            if k < past:
                return f"history[{k // 2}][{k % 2}]"
            return "output" if k > past else "instruction"

        return _conversation(row, messages, name)

    def _read_prompt_completion(self, row: _Pair) -> Conversation:
        return self._joined(row, row.prompt, row.completion, "completion")

    def _read_text(self, row: _Text) -> Conversation:
        if not row.text:
            raise Unfit("empty_text", "text", "it is empty")
        if len(row.text) > MAX_CONTENT:
            raise _too_long("text", len(row.text))
        return Conversation(text=row.text)

    def _read_preference(self, row: _Preference) -> Conversation:
        taken = row.chosen if self._branch == "chosen" else row.rejected
        if isinstance(taken, list) and row.prompt is None:
            return _conversation(row, taken, self._branch)
        return self._joined(row, row.prompt, taken, self._branch)

    def _joined(
        self, row: _Row, prompt: str | list[Message] | None, answer: str | list[Message],
        field: str,
    ) -> Conversation:  # fmt: skip
        if prompt is None:
            raise Unfit("wrong_type", "prompt", f"there is none, and {field} is a text")
        before = [Message("user", prompt)] if isinstance(prompt, str) else prompt
        given = answer if isinstance(answer, list) else [Message("assistant", answer)]
        if isinstance(answer, list) and before and answer[: len(before)] == before:
            given = answer[len(before) :]  # some repeat the prompt at the beginning of the answer
        if not given:
            raise Unfit("no_messages", field, "there are none")
        if before and before[-1].role == given[0].role == "user":
            raise Unfit(
                "other_prompt", field, "it begins with a user, as the prompt ends, not alike"
            )
        for message in before:
            if message.role == "assistant" and message.train is None and message.weight is None:
                message.train = False  # a prompt is what was there before
        first, repeated = len(before), isinstance(answer, list) and given is not answer

        def name(k: int, part: str) -> str:
            if k < first:
                return "prompt" if isinstance(prompt, str) else f"prompt[{k}]{part}"
            at = k if repeated else k - first
            return field if isinstance(answer, str) else f"{field}[{at}]{part}"

        return _conversation(row, [*before, *given], name)


_Name = Callable[[int, str], str]
"""What a row calls its message k, and a part of it."""


def _conversation(
    row: _Row, messages: list[Message], name: str | _Name, *, written_calls: bool = False
) -> Conversation:
    """The messages of a row, and what stands beside them; `name` is that of their list, or says
    what each is called."""
    if not messages:
        raise Unfit("no_messages", name if isinstance(name, str) else "", "there are none")
    lead = 0
    if row.system:
        messages, lead = [Message("system", row.system), *messages], 1

    def named(k: int, part: str) -> str:
        if k < lead:
            return "system"
        return f"{name}[{k - lead}]{part}" if isinstance(name, str) else name(k - lead, part)

    return Conversation(_checked(messages, named, written_calls), _tools(row))


def _checked(messages: list[Message], name: _Name, written_calls: bool) -> list[Message]:
    """The messages with texts as texts, arguments as objects, roles by one name each."""
    places: list[int] | None = None
    if list in [type(message.content) for message in messages]:
        messages, places = _split_parts(messages, name)
    called: list[str] | None = None  # ids of calls that wait for their results
    k = 0
    try:
        for k, message in enumerate(messages):
            role = message.role
            if role not in ROLES[:4]:
                role = message.role = _role(role)
            content = message.content
            if not isinstance(content, str):
                message.content = content = "" if content is None else _text_of(content)
            if len(content) > MAX_CONTENT:
                raise _too_long(".content", len(content))
            if role == "assistant":
                called = _read_assistant(message)
            elif (
                message.tool_calls or message.function_call or message.reasoning_content
                or message.reasoning or message.thinking
            ):  # fmt: skip
                raise Unfit("unknown_field", "", f"a {role} makes no calls and no thoughts")
            elif role == "tool":
                is_written = written_calls and k > 0 and messages[k - 1].role != "user"
                if not called and not is_written:
                    raise Unfit("result_without_call", "", "no call waits for a result")
                if called:
                    _answer(message, called)
            elif role == "system":
                if k:
                    two = messages[0].role == "system"
                    raise Unfit(
                        "two_systems" if two else "system_not_first", ".role",
                        "a conversation has one system message, its first",
                    )  # fmt: skip
            else:
                called = None
            if message.weight is not None:
                _weigh(message)
            message.id = message.annotations = None
    except Unfit as fault:
        at = k if places is None else places[k]
        raise Unfit(fault.reason, name(at, fault.field), fault.why) from None
    return messages


def _answer(message: Message, called: list[str]) -> None:
    """Take a result's call off those that wait."""
    given = message.tool_call_id
    if given and any(called) and given not in called:
        raise Unfit(
            "result_without_call", ".tool_call_id", f"{given!r} is not among the calls {called}"
        )
    called.remove(given if given and given in called else called[0])


_PYTHON: Final = ("python", "python_output")


def _split_parts(messages: list[Message], name: _Name) -> tuple[list[Message], list[int]]:
    """Calls of Python and what they printed, written as parts of a turn, as turns of their own;
    and which message each of all turns was."""
    found: list[Message] = []
    places: list[int] = []
    for k, message in enumerate(messages):
        content = message.content
        if (
            message.role != "assistant"
            or not isinstance(content, list)
            or not any(part.get("type") in _PYTHON for part in content)
        ):
            found.append(message)
            places.append(k)
            continue
        if message.tool_calls or message.function_call:
            raise Unfit("unknown_part", name(k, ".content"), "calls stand in it and beside it")
        turn: Message | None = None
        thoughts = _thoughts(message)
        for at, part in enumerate(content):
            kind, text = part.get("type"), part.get("text")
            if kind in _PYTHON and not isinstance(text, str):
                raise Unfit("unknown_part", name(k, f".content[{at}]"), f"{kind} without a text")
            if turn is None or (kind == "text" and turn.tool_calls):
                turn = Message(
                    "assistant", "", thoughts, train=message.train, weight=message.weight
                )
                thoughts = None
                found.append(turn)
            if kind == "python":
                call = ToolCall(Function("python", {"code": text}))
                turn.tool_calls = [*(turn.tool_calls or []), call]
            elif kind == "python_output":
                found.append(Message("tool", text))
                turn = None
            else:
                turn.content = turn.text + _text_of([part])
        places += [k] * (len(found) - len(places))
    return found, places


def _read_assistant(message: Message) -> list[str]:
    """Bring an assistant's turn into one form; the ids of its calls, "" where there is none."""
    if message.function_call is not None:
        if message.tool_calls:
            raise Unfit("two_calls", ".function_call", "tool_calls are there too")
        message.tool_calls = [ToolCall(message.function_call)]
        message.function_call = None
    thoughts = _thoughts(message)
    if thoughts and len(thoughts) > MAX_CONTENT:
        raise _too_long(".reasoning_content", len(thoughts))
    message.reasoning_content, message.reasoning, message.thinking = thoughts, None, None
    calls = message.tool_calls
    if not calls:
        message.tool_calls = None
        if not message.content and not message.reasoning_content:
            raise Unfit("empty_assistant", ".content", "the assistant says nothing")
        return []
    for k, call in enumerate(calls):
        function = call.function
        if function is None:
            if not call.name:
                raise Unfit("wrong_type", f".tool_calls[{k}]", "it does not say what is called")
            function = call.function = Function(call.name, call.arguments)
            call.name = call.arguments = None
        elif call.name is not None or call.arguments is not None:
            raise Unfit("two_calls", f".tool_calls[{k}]", "what is called stands in it twice")
        name = function.name
        if not name or not name.isprintable() or not _NAME.isdisjoint(name):
            raise Unfit(
                "bad_name", f".tool_calls[{k}].function.name",
                f"{name[:80]!r}: a name has no quotes, and nothing that cannot be printed",
            )  # fmt: skip
        arguments = function.arguments
        if arguments is None:
            function.arguments = {}
        elif type(arguments) is str:
            function.arguments = _object(arguments, f".tool_calls[{k}].function.arguments")
        call.type = "function"
        call.index = None
    return [call.id or "" for call in calls]


_NAME: Final = frozenset('"\\')


def _thoughts(message: Message) -> str | None:
    """What was thought, by whichever of its names."""
    found = message.reasoning_content or None
    for other in (message.reasoning, message.thinking):
        if other and found and other != found:
            raise Unfit("two_thoughts", ".reasoning_content", "two fields of thoughts differ")
        found = found or other or None
    return found


def _object(text: str, where: str) -> dict[str, Any]:
    """Arguments that were written as a text of JSON: written so once more they would be a text
    within a text."""
    try:
        found = msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        raise Unfit("arguments_not_json", where, str(error)) from None
    if not isinstance(found, dict):
        raise Unfit("arguments_not_json", where, f"a {type(found).__name__}, not an object")
    _check_text(text, found, where)
    return found


def _as_call(text: str, where: str) -> Message:
    """ShareGPT's function_call: the call as JSON."""
    try:
        found = msgspec.json.decode(text, type=list[Function] | Function)
    except (ValueError, RecursionError) as error:
        raise Unfit("arguments_not_json", where, str(error)) from None
    _check_text(text, found, where)
    calls = found if isinstance(found, list) else [found]
    return Message("assistant", "", tool_calls=[ToolCall(call) for call in calls])


def _role(role: str) -> str:
    if role not in _ALIASES:
        raise Unfit("unknown_role", ".role", f"{role!r}: {suggest(role, _ALIASES)}")
    return _ALIASES[role]


def _text_of(parts: list[dict[str, Any]]) -> str:
    """Content that is given in parts."""
    texts = []
    for k, part in enumerate(parts):
        kind, text = part.get("type"), part.get("text")
        if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
            raise Unfit("unknown_part", f".content[{k}]", f"a part of type {kind!r} is not a text")
        texts.append(text)
    return "".join(texts)


def _weigh(message: Message) -> None:
    """OpenAI's weight, 0 or 1, as `train`."""
    if message.weight not in (0, 1):
        raise Unfit("bad_weight", ".weight", f"{message.weight}: choose 0 or 1")
    if message.train is not None and message.train != bool(message.weight):
        raise Unfit("bad_weight", ".weight", f"{message.weight}, and train says {message.train}")
    message.train, message.weight = bool(message.weight), None


def _tools(row: _Row) -> list[dict[str, Any]] | None:
    if row.functions is None and not isinstance(row.tools, str):
        return row.tools or None
    tools, functions = _listed(row.tools, "tools"), _listed(row.functions, "functions")
    if tools and functions:
        raise Unfit("two_lists_of_tools", "functions", "tools are listed too")
    return tools or [{"type": "function", "function": one} for one in functions] or None


def _listed(tools: _Tools, field: str) -> list[dict[str, Any]]:
    if isinstance(tools, str):
        try:
            found = msgspec.json.decode(tools, type=list[dict[str, Any]] | None)
        except (ValueError, RecursionError) as error:
            raise Unfit("wrong_type", field, str(error)) from None
        _check_text(tools, found, field)
        tools = found
    return tools or []


def _too_long(where: str, size: int) -> Unfit:
    return Unfit("content_too_long", where, f"{size:,} characters, {MAX_CONTENT:,} are allowed")


def _check_depth(conversation: Conversation) -> None:
    """Refuse what is nested so deeply that whoever writes it runs out of stack."""
    level: list[Any] = [conversation.tools or []]
    for message in conversation.messages:
        level += [arguments for _, arguments, _ in message.calls]
    for _ in range(MAX_DEPTH):
        level = [
            one
            for many in level
            for one in (many.values() if isinstance(many, dict) else many)
            if isinstance(one, dict | list)
        ]
        if not level:
            return
    raise _too_deep()


class _Pairs(list[tuple[str, Any]]):
    """An object as it is written."""


def _check_keys(line: bytes, where: str = "") -> None:
    """Refuse a row in which an object has a key twice: readers of JSON take the last, in silence.
    What is no JSON is refused by whoever reads it."""
    try:
        field = _repeated(json.loads(line, object_pairs_hook=_Pairs), where)
    except (ValueError, RecursionError):
        return
    if field is not None:
        raise Unfit("repeated_key", field, "it is there twice")


def _check_text(text: str, found: Any, where: str) -> None:
    """The same for a text of JSON within a row, of which `found` was read."""
    written = msgspec.json.encode(found).count(b":")  # as many as there were, or a key is lost
    if written != text.count(":") or "\\u" in text:
        _check_keys(text.encode(), where)


def _repeated(value: Any, where: str) -> str | None:
    """The first field that an object has twice."""
    items: list[tuple[str, Any]] = []
    if isinstance(value, _Pairs):
        items = [(f"{where}.{key}" if where else key, one) for key, one in value]
        known = set()
        for name, _ in items:
            if name in known:
                return name
            known.add(name)
    elif isinstance(value, list):
        items = [(f"{where}[{k}]", one) for k, one in enumerate(value)]
    for name, one in items:
        if (found := _repeated(one, name)) is not None:
            return found
    return None


def _too_deep() -> Unfit:
    return Unfit("nested_too_deep", why=f"it is nested too deeply: {MAX_DEPTH} levels are allowed")


def _no_constant(name: str) -> None:
    """Python reads NaN and Infinity, and writes them; JSON has neither."""
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    """A number of JSON that a float can hold: others would be written as Infinity."""
    found = float(text)
    if not math.isfinite(found):
        raise ValueError(f"{text[:40]} is out of range")
    return found


def _has_roles(messages: Any) -> bool:
    return isinstance(messages, list) and any(isinstance(m, dict) and "role" in m for m in messages)


def _surrogate(value: Any, where: str = "") -> str | None:
    """The field of a text that holds half of a surrogate pair."""
    if isinstance(value, str):
        return where if any("\ud800" <= letter <= "\udfff" for letter in value) else None
    items: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        items = [(f"{where}.{key}" if where else str(key), one) for key, one in value.items()]
        if any((found := _surrogate(key, where)) is not None for key in value):
            return found
    elif isinstance(value, list):
        items = [(f"{where}[{k}]", one) for k, one in enumerate(value)]
    for name, one in items:
        if (found := _surrogate(one, name)) is not None:
            return found
    return None


def _without(row: dict[str, Any], ignored: frozenset[str]) -> dict[str, Any]:
    """A row whose messages lack these fields, and those that are null."""

    def clean(message: Any) -> Any:
        if not isinstance(message, dict):
            return message
        return {k: v for k, v in message.items() if k not in ignored and v is not None}

    return {
        key: [clean(one) for one in value] if isinstance(value, list) and key != "tools" else value
        for key, value in row.items()
    }


def _unfit(error: Exception) -> Unfit:
    """What msgspec found wrong, by its field."""
    said, _, path = str(error).partition(" - at `$")
    field = path.rstrip("`").removeprefix(".")
    reason = "unknown_field" if "unknown field" in said else "wrong_type"
    return Unfit(reason, field, said.replace("`", ""))
