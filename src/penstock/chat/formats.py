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
from collections.abc import Callable, Collection
from typing import Any, Final

import msgspec

from penstock.errors import BadConfig, BadInput
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
MAX_CONTENT: Final = 8 << 20
"""Characters of one message: what is longer is a file, not a turn."""


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
_Tools = list[dict[str, Any]] | str | None


class _Messages(msgspec.Struct):
    messages: list[Message]
    tools: _Tools = None


class _Conversations(msgspec.Struct):
    """OpenAI's messages under the name that ShareGPT's have."""

    conversations: list[Message]
    tools: _Tools = None


class _Said(msgspec.Struct, forbid_unknown_fields=True):
    speaker: str = msgspec.field(name="from")
    value: str | None = None
    weight: int | float | None = None
    train: bool | None = None


class _ShareGPT(msgspec.Struct):
    conversations: list[_Said]
    system: str | None = None
    tools: _Tools = None


class _Alpaca(msgspec.Struct):
    instruction: str
    output: str
    input: str | None = None
    system: str | None = None
    history: list[tuple[str, str]] | None = None


class _Pair(msgspec.Struct):
    prompt: str | list[Message]
    completion: str | list[Message]
    tools: _Tools = None


class _Text(msgspec.Struct):
    text: str


class _Preference(msgspec.Struct):
    chosen: str | list[Message]
    rejected: str | list[Message]
    prompt: str | list[Message] | None = None
    tools: _Tools = None


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
        self._decode: Callable[[Any], Any] = msgspec.json.Decoder(_ROWS[format]).decode
        self._read: Callable[[Any], Conversation] = getattr(self, f"_read_{format}")

    def read(self, line: bytes | memoryview) -> Conversation:
        """The conversation of a row; raises `Unfit`."""
        try:
            row = self._decode(line)
        except (ValueError, RecursionError):
            row = self._read_again(bytes(line))
        return self._read(row)

    def _read_again(self, line: bytes) -> Any:
        """What is wrong with a row, unless it is only written in another way."""
        try:
            plain = json.loads(line)
        except RecursionError:
            raise Unfit("nested_too_deep", why="it is nested too deeply") from None
        except UnicodeDecodeError as fault:
            raise Unfit("invalid_utf8", why=str(fault)) from None
        except ValueError as fault:
            raise Unfit("invalid_json", why=str(fault)) from None
        if not isinstance(plain, dict):
            raise Unfit("not_an_object", why=f"it is a {type(plain).__name__}, not an object")
        if (found := sniff_format(plain)) != self._format:
            told = f"it is of format {found}" if found else f"it has {', '.join(plain)[:200]}"
            raise Unfit("other_format", why=f"{told}; the first row was of {self._format}")
        if (field := _surrogate(plain)) is not None:
            raise Unfit("lone_surrogate", field, "half of a surrogate pair is no character")
        kind = _ROWS[self._format]
        if self._format == "sharegpt" and _has_roles(plain["conversations"]):
            kind = _Conversations
        try:
            return msgspec.convert(_without(plain, self._ignore), kind, strict=True)
        except (ValueError, RecursionError) as fault:
            raise _unfit(fault) from None

    def _read_messages(self, row: _Messages) -> Conversation:
        return Conversation(_checked(row.messages, "messages"), _tools(row.tools))

    def _read_sharegpt(self, row: _ShareGPT | _Conversations) -> Conversation:
        if isinstance(row, _Conversations):
            return Conversation(_checked(row.conversations, "conversations"), _tools(row.tools))
        messages = [Message("system", row.system)] if row.system else []
        for k, said in enumerate(row.conversations):
            role = _SPEAKERS.get(said.speaker)
            if role is None:
                raise Unfit(
                    "unknown_role", f"conversations[{k}].from",
                    f"{said.speaker!r}: {suggest(said.speaker, _SPEAKERS)}",
                )  # fmt: skip
            message = Message(role, said.value or "", train=said.train, weight=said.weight)
            if role == "call":
                message = _as_call(said.value or "", f"conversations[{k}].value")
            messages.append(message)
        # some write calls into the text: what answers them is no answer to nothing
        return Conversation(
            _checked(messages, "conversations", written_calls=True), _tools(row.tools)
        )

    def _read_alpaca(self, row: _Alpaca) -> Conversation:
        messages = [Message("system", row.system)] if row.system else []
        for asked, answered in row.history or ():
            messages += [Message("user", asked), Message("assistant", answered)]
        asked = f"{row.instruction}\n\n{row.input}" if row.input else row.instruction
        messages += [Message("user", asked), Message("assistant", row.output)]
        return Conversation(_checked(messages, "output"))

    def _read_prompt_completion(self, row: _Pair) -> Conversation:
        return self._joined(row.prompt, row.completion, "completion", row.tools)

    def _read_text(self, row: _Text) -> Conversation:
        if not row.text:
            raise Unfit("empty_text", "text", "it is empty")
        if len(row.text) > MAX_CONTENT:
            raise _too_long("text", len(row.text))
        return Conversation(text=row.text)

    def _read_preference(self, row: _Preference) -> Conversation:
        taken = row.chosen if self._branch == "chosen" else row.rejected
        if isinstance(taken, list) and row.prompt is None:
            return Conversation(_checked(taken, self._branch), _tools(row.tools))
        return self._joined(row.prompt, taken, self._branch, row.tools)

    def _joined(
        self, prompt: str | list[Message] | None, answer: str | list[Message], field: str,
        tools: _Tools,
    ) -> Conversation:  # fmt: skip
        if prompt is None:
            raise Unfit("wrong_type", "prompt", f"there is none, and {field} is a text")
        before = [Message("user", prompt)] if isinstance(prompt, str) else prompt
        if isinstance(answer, str):
            answer = [Message("assistant", answer)]
        elif answer[: len(before)] == before and before:
            before = []  # some repeat the prompt at the beginning of the answer
        for message in before:
            if message.role == "assistant" and message.train is None and message.weight is None:
                message.train = False  # a prompt is what was there before
        return Conversation(_checked([*before, *answer], field), _tools(tools))


def _checked(messages: list[Message], where: str, *, written_calls: bool = False) -> list[Message]:
    """The messages with texts as texts, arguments as objects, roles by one name each."""
    if not messages:
        raise Unfit("no_messages", where, "there are none")
    split = False
    called: list[str] | None = None  # ids of calls that wait for their results
    for k, message in enumerate(messages):
        role = message.role
        if role not in ROLES[:4]:
            role = message.role = _role(role, f"{where}[{k}].role")
        content = message.content
        if not isinstance(content, str):
            if content is None:
                message.content = ""
            elif role == "assistant" and any(part.get("type") in _PYTHON for part in content):
                split = True
                continue
            else:
                message.content = _text_of(content, f"{where}[{k}].content")
            content = message.text
        if len(content) > MAX_CONTENT:
            raise _too_long(f"{where}[{k}].content", len(content))
        if role == "assistant":
            called = _read_assistant(message, f"{where}[{k}]")
        elif message.tool_calls or message.function_call or message.reasoning_content:
            raise Unfit(
                "unknown_field", f"{where}[{k}]", f"a {role} makes no calls and no thoughts"
            )
        elif role == "tool":
            if not called and not (written_calls and k and messages[k - 1].role != "user"):
                raise Unfit("result_without_call", f"{where}[{k}]", "no call waits for a result")
            if called:
                given = message.tool_call_id
                if given and any(called) and given not in called:
                    raise Unfit(
                        "result_without_call", f"{where}[{k}].tool_call_id",
                        f"{given!r} is not among the calls {called}",
                    )  # fmt: skip
                called.remove(given if given and given in called else called[0])
        elif role == "system":
            if k:
                two = messages[0].role == "system"
                raise Unfit(
                    "two_systems" if two else "system_not_first", f"{where}[{k}].role",
                    "a conversation has one system message, its first",
                )  # fmt: skip
        else:
            called = None
        if message.weight is not None:
            _weigh(message, f"{where}[{k}].weight")
        message.id = message.annotations = None
    if split:
        return _checked(_split_parts(messages), where)
    return messages


_PYTHON: Final = ("python", "python_output")


def _split_parts(messages: list[Message]) -> list[Message]:
    """Calls of Python and what they printed, written as parts of a turn, as turns of their own."""
    found: list[Message] = []
    for message in messages:
        content = message.content
        if message.role != "assistant" or not isinstance(content, list):
            found.append(message)
            continue
        turn: Message | None = None
        for part in content:
            kind, text = part.get("type"), part.get("text")
            if turn is None or (kind == "text" and turn.tool_calls):
                turn = Message("assistant", "", train=message.train, weight=message.weight)
                found.append(turn)
            if kind == "python":
                call = ToolCall(Function("python", {"code": text}))
                turn.tool_calls = [*(turn.tool_calls or []), call]
            elif kind == "python_output":
                found.append(Message("tool", text))
                turn = None
            else:
                turn.content = turn.text + _text_of([part], "content")
    return found


def _read_assistant(message: Message, where: str) -> list[str]:
    """Bring an assistant's turn into one form; the ids of its calls, "" where there is none."""
    if message.function_call is not None:
        message.tool_calls = [*(message.tool_calls or []), ToolCall(message.function_call)]
        message.function_call = None
    if message.reasoning_content is None:
        message.reasoning_content = message.reasoning or message.thinking
    message.reasoning_content = message.reasoning_content or None
    message.reasoning = message.thinking = None
    calls = message.tool_calls
    if not calls:
        message.tool_calls = None
        if not message.content and not message.reasoning_content:
            raise Unfit("empty_assistant", f"{where}.content", "the assistant says nothing")
        return []
    for k, call in enumerate(calls):
        function = call.function
        if function is None:
            if not call.name:
                raise Unfit(
                    "wrong_type", f"{where}.tool_calls[{k}]", "it does not say what is called"
                )
            function = call.function = Function(call.name, call.arguments)
            call.name = call.arguments = None
        arguments = function.arguments
        if arguments is None:
            function.arguments = {}
        elif type(arguments) is str:
            at = f"{where}.tool_calls[{k}].function.arguments"
            function.arguments = _object(arguments, at)
        call.type = "function"
        call.index = None
    return [call.id or "" for call in calls]


def _object(text: str, where: str) -> dict[str, Any]:
    """Arguments that were written as a text of JSON: written so once more they would be a text
    within a text."""
    try:
        found = msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        raise Unfit("arguments_not_json", where, str(error)) from None
    if not isinstance(found, dict):
        raise Unfit("arguments_not_json", where, f"a {type(found).__name__}, not an object")
    return found


def _as_call(text: str, where: str) -> Message:
    """ShareGPT's function_call: the call as JSON."""
    try:
        found = msgspec.json.decode(text, type=list[Function] | Function)
    except (ValueError, RecursionError) as error:
        raise Unfit("arguments_not_json", where, str(error)) from None
    calls = found if isinstance(found, list) else [found]
    return Message("assistant", "", tool_calls=[ToolCall(call) for call in calls])


def _role(role: str, where: str) -> str:
    if role not in _ALIASES:
        raise Unfit("unknown_role", where, f"{role!r}: {suggest(role, _ALIASES)}")
    return _ALIASES[role]


def _text_of(parts: list[dict[str, Any]], where: str) -> str:
    """Content that is given in parts."""
    texts = []
    for k, part in enumerate(parts):
        kind, text = part.get("type"), part.get("text")
        if kind not in ("text", "input_text", "output_text") or not isinstance(text, str):
            raise Unfit("unknown_part", f"{where}[{k}]", f"a part of type {kind!r} is not a text")
        texts.append(text)
    return "".join(texts)


def _weigh(message: Message, where: str) -> None:
    """OpenAI's weight, 0 or 1, as `train`."""
    if message.weight not in (0, 1):
        raise Unfit("bad_weight", where, f"{message.weight}: choose 0 or 1")
    if message.train is not None and message.train != bool(message.weight):
        raise Unfit("bad_weight", where, f"{message.weight}, and train says {message.train}")
    message.train, message.weight = bool(message.weight), None


def _tools(tools: _Tools) -> list[dict[str, Any]] | None:
    if isinstance(tools, str):
        try:
            tools = msgspec.json.decode(tools, type=list[dict[str, Any]] | None)
        except (ValueError, RecursionError) as error:
            raise Unfit("wrong_type", "tools", str(error)) from None
    return tools or None


def _too_long(where: str, size: int) -> Unfit:
    return Unfit("content_too_long", where, f"{size:,} characters, {MAX_CONTENT:,} are allowed")


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
    if isinstance(error, RecursionError):
        return Unfit("nested_too_deep", why="it is nested too deeply")
    said, _, path = str(error).partition(" - at `$")
    field = path.rstrip("`").removeprefix(".")
    reason = "unknown_field" if "unknown field" in said else "wrong_type"
    return Unfit(reason, field, said.replace("`", ""))
