"""Any Jinja chat template: what it prints, cut into control tokens, text and trained ranges.

In:    a Hugging Face template, with {% generation %} blocks or without; conversations
Out:   operations as a preset gives them
Keeps: a range is trained from where the generation prompt ends to its stop token, whatever white
       space a block takes in beside; text that spells a control token stays text
Never: believes a template: a block must hold what the assistant said, and nothing of a tool

Without blocks, each trained turn is found by printing the conversation up to it: what is printed
for the turns before it, with a generation prompt, must be the beginning of the whole.
"""

import functools
import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from penstock.chat.formats import ASSISTANT, TEXT, USER, Conversation, Message, Unfit
from penstock.chat.render import REWRITES, ChatConfig
from penstock.chat.sandbox import CLOSE, OPEN, Limits, Sandbox
from penstock.chat.templates import (
    BOS,
    EOS,
    PRESETS,
    Operations,
    Pieces,
    Template,
    first_of,
)
from penstock.errors import BadConfig
from penstock.options import suggest
from penstock.tokenize.tokenizer import Tokenizer

_HIDE: Final = "\ufdd2"
"""Put into text that spells a control token, and taken out of what is printed."""
_RESERVED: Final = re.compile("[\ufdd0-\ufdd2]")
_GENERATION: Final = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_SLACK: Final = " \t\r\n"
_ANSWER: Final = "axolotl"
_SAID: Final = ("content", "reasoning_content", "arguments")
"""Fields of a message that no template compares with words of its own."""
_LONG_RESULT: Final = 24
"""Characters of a tool's text that are looked for among what is trained: less may be chance, such
as "<tool_call>". The audit looks for any."""


class JinjaTemplate(Template):
    """A template in a process of its own."""

    name = "jinja"

    def __init__(
        self, template: str, tokenizer: Tokenizer, names: dict[str, str] | None = None,
        *, date: str | None = None, limits: Limits | None = None,
    ) -> None:  # fmt: skip
        self.text = template
        self.operations = Operations(tokenizer)
        self._hider = _Hider(self.operations, template)
        self.has_blocks = bool(_GENERATION.search(template))
        self.names = names if names is not None else find_names(tokenizer)
        self._date = date
        self._sandbox = Sandbox(template, self.names, date=date, limits=limits)
        self._bos, self._eos = self.names.get("bos_token", ""), self.names.get("eos_token", "")

    def settings(self) -> dict[str, Any]:
        return {"jinja": self.text, "names": self.names, "date": self._date}

    def close(self) -> None:
        self._sandbox.close()

    @functools.cached_property
    def prompt(self) -> str:
        """What the template prints where the model is to go on."""
        without, with_prompt, _ = self._probed
        return with_prompt.removeprefix(without) if with_prompt.startswith(without) else ""

    @functools.cached_property
    def _header(self) -> str:
        """What would be trained before an answer, of a template that prints no generation prompt:
        nothing says where the header ends."""
        _, before, after = self._probed
        text, blocks = _blocks(after)
        if self.prompt or not text.startswith(before):
            return ""
        first = blocks[-1][0] if blocks else len(before)
        return text[first:].partition(_ANSWER)[0].strip()

    @functools.cached_property
    def _probed(self) -> list[str]:
        """What is printed for a user, with a generation prompt or without, and for an answer."""
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _ANSWER}]
        request = {"messages": messages, "cuts": [[1, False], [1, True], [2, False]]}
        (found,) = self._sandbox.render([json.dumps(request).encode()])
        return ["", "", ""] if isinstance(found, Unfit) else found

    def print(self, conversation: Conversation, cuts: Sequence[tuple[int, bool]]) -> list[str]:
        """What is printed for the first messages of a conversation, with a prompt or without."""
        (found,) = self._printed([self._request(conversation, cuts)])
        if isinstance(found, Unfit):
            raise found
        return found

    def _printed(self, requests: Sequence[list[bytes]]) -> Iterator[list[str] | Unfit]:
        """What is printed for each: with what spells control tokens hidden and, if there is
        some, once more as it is. A template that takes texts apart may then print another."""
        answers = self._sandbox.render([one for request in requests for one in request])
        for request in requests:
            found, *plain = (next(answers) for _ in request)
            if plain and not isinstance(found, Unfit):
                told = plain[0]
                if isinstance(told, Unfit) or told != [one.replace(_HIDE, "") for one in found]:
                    found = Unfit(
                        "control_text_changed", "chat_template",
                        "a text that spells a control token is printed otherwise than others",
                    )  # fmt: skip
            yield found

    def print_raw(self, request: dict[str, Any]) -> str:
        """What is printed for messages as they are, which nobody has looked at."""
        (found,) = self._sandbox.render([json.dumps(request).encode()])
        if isinstance(found, Unfit):
            raise found
        return found[0]

    def write(
        self, conversations: Sequence[Conversation], trained: Sequence[Sequence[bool]], out: Pieces
    ) -> list[Unfit | None]:
        requests, asked = [], []
        answers: list[Unfit | None] = [None] * len(conversations)
        for k, (conversation, flags) in enumerate(zip(conversations, trained, strict=True)):
            if conversation.text is not None:
                continue
            try:
                cuts = [] if self.has_blocks else self._cuts(conversation, flags)
                requests.append(self._request(conversation, cuts))
                asked.append(k)
            except Unfit as error:
                answers[k] = error
        printed = dict(zip(asked, self._printed(requests), strict=True))
        for k, (conversation, flags) in enumerate(zip(conversations, trained, strict=True)):
            if answers[k] is not None:
                continue
            mark = out.mark()
            try:
                if conversation.text is not None:
                    self._write_text(conversation.text, out)
                else:
                    found = printed[k]
                    if isinstance(found, Unfit):
                        raise found
                    text, ranges = self._ranges(conversation, flags, found)
                    if self._bos and text.startswith(2 * self._bos):
                        raise Unfit("two_bos", "chat_template", f"it prints {self._bos} twice")
                    _check_context(conversation, text)
                    self._write(text, ranges, out)
            except Unfit as error:
                out.undo(mark)
                answers[k] = error
                continue
            out.ends.append(len(out.ops))
        return answers

    def _cuts(self, conversation: Conversation, flags: Sequence[bool]) -> list[tuple[int, bool]]:
        """Before and after each trained turn, and all of it."""
        cuts = []
        for k, is_trained in enumerate(flags):
            if is_trained and conversation.messages[k].role != "assistant":
                raise Unfit(
                    "wrong_role", f"messages[{k}]",
                    "a template without generation blocks shows what the assistant says alone",
                )  # fmt: skip
            if is_trained:
                cuts += [(k, True), (k + 1, False)]
        return [*cuts, (len(flags), False)]

    def _request(self, conversation: Conversation, cuts: Sequence[tuple[int, bool]]) -> list[bytes]:
        """A conversation as the sandbox takes it; if a text of it spells a control token, or could
        where it meets another, with that hidden, and as it is."""
        data = conversation.as_json()
        text = data.decode()
        if _RESERVED.search(text):
            raise Unfit("reserved_character", why="U+FDD0 to U+FDD2 are no characters of a text")
        plain = json.loads(data)
        found = [plain]
        hidden = {"messages": self._hider.hide(plain["messages"], _SAID)}
        if "tools" in plain:
            hidden["tools"] = self._hider.hide(plain["tools"])
        if hidden != plain:
            found = [hidden, plain]
        return [json.dumps({**one, "cuts": [list(cut) for cut in cuts]}).encode() for one in found]

    # Where the trained ranges are

    def _ranges(
        self, conversation: Conversation, flags: Sequence[bool], printed: list[str]
    ) -> tuple[str, list[tuple[int, int]]]:
        """The whole text and its trained ranges."""
        if self._header:
            raise Unfit(
                "header_trained", "chat_template",
                f"it prints no generation prompt, so {self._header!r} would be trained: print it "
                "if add_generation_prompt, or begin the generation block behind it",
            )  # fmt: skip
        if self.has_blocks:
            text, blocks = _blocks(printed[0])
            return text, self._chosen(conversation, flags, text, blocks)
        whole = printed[-1]
        ranges = []
        trained = [k for k, is_trained in enumerate(flags) if is_trained]
        for k, number in zip(range(0, len(printed) - 1, 2), trained, strict=True):
            before, after = printed[k], printed[k + 1]
            if not after.startswith(before):
                raise Unfit(
                    "no_prefix", "chat_template",
                    "what it prints for a turn does not begin with what it prints for the prompt",
                )  # fmt: skip
            said = after[len(before) :].replace(_HIDE, "")
            _check_said(conversation.messages[number], number, said)
            if not whole.startswith(after):
                raise Unfit(
                    REWRITES, "chat_template",
                    "what it prints for a turn is no longer there once others follow",
                )  # fmt: skip
            ranges.append(self._stopped(whole, len(before), len(after)))
        return whole, ranges

    def _chosen(
        self, conversation: Conversation, flags: Sequence[bool], text: str,
        blocks: list[tuple[int, int]],
    ) -> list[tuple[int, int]]:  # fmt: skip
        """The blocks of the turns that are trained."""
        said = [k for k, one in enumerate(conversation.messages) if one.role == "assistant"]
        for k, wanted in enumerate(flags):
            if wanted and k not in said:
                raise Unfit(
                    "wrong_role", f"messages[{k}]", "the template marks the assistant alone"
                )
        if len(blocks) != len(said):
            raise Unfit(
                "other_blocks", "chat_template",
                f"it has {len(blocks)} generation blocks for {len(said)} turns of the assistant",
            )  # fmt: skip
        results = [
            result
            for one in conversation.messages
            if one.role == "tool" and len(result := one.text.strip()) >= _LONG_RESULT
        ]
        ranges = []
        for k, (first, last) in zip(said, blocks, strict=True):
            message = conversation.messages[k]
            block = text[first:last].replace(_HIDE, "")
            if flags[k]:
                try:
                    _check_said(message, k, block)
                except Unfit as fault:
                    if k + 1 == len(conversation.messages):
                        raise
                    # it may be there as long as nothing follows: asked for alone, it is seen
                    raise Unfit(REWRITES, "chat_template", str(fault)) from None
            for own in (message.text, message.reasoning_content, *map(_written, message.calls)):
                block = block.replace(own or _HIDE, "")
            if any(result in block for result in results):
                raise Unfit(
                    "tool_text_trained", f"messages[{k}]",
                    "a generation block holds what a tool said",
                )  # fmt: skip
            if flags[k]:
                ranges.append(self._stopped(text, self._begins(text, first, last), last))
        return ranges

    def _begins(self, text: str, first: int, last: int) -> int:
        """Where a block begins behind the prompt, of which it may hold the end, or all."""
        prompt = self.prompt
        for taken in range(min(len(prompt), last - first) + 1):
            if text.endswith(prompt, 0, first + taken):
                return first + taken
        return first

    def _stopped(self, text: str, first: int, last: int) -> tuple[int, int]:
        """A range up to its stop token: without the white space that follows it, with the token
        itself if it stands right behind the range."""
        controls = self.operations.controls
        body = text[first:last].rstrip(_SLACK)
        found = [
            match
            for match in controls.finditer(text, first, last)
            if match.end() == first + len(body)
        ]
        if found:
            return first, first + len(body)
        after = controls.match(text, last)
        if after is None:
            raise Unfit(
                "no_stop_token", "chat_template",
                f"no control token ends {text[max(first, last - 40) : last]!r}",
            )  # fmt: skip
        return first, after.end()

    # As operations

    def _write(self, text: str, ranges: list[tuple[int, int]], out: Pieces) -> None:
        """Cut the text at control tokens; a range may begin within a run and ends at a token."""
        operations = self.operations
        says, asks = operations.turn(ASSISTANT), operations.turn(USER)
        out.ops.append(asks)
        at = 0
        head = ""
        for first, last in [*ranges, (len(text), len(text))]:
            head = self._write_plain(text[at:first], out)
            if first == last:
                if head:
                    out.ops.append(operations.run())
                    out.texts.append(head)
                break
            parts = operations.controls.split(text[first:last])
            begun = parts[0].replace(_HIDE, "")
            if head and begun:
                out.ops += [operations.head(), says, operations.rest(trained=True)]
                out.texts += [head, head + begun]
            else:
                if head:
                    out.ops.append(operations.run())
                    out.texts.append(head)
                out.ops.append(says)
                if begun:
                    out.ops.append(operations.run(trained=True))
                    out.texts.append(begun)
            for k in range(1, len(parts), 2):
                ends = k + 2 >= len(parts)
                out.ops.append(operations.control(parts[k], trained=True, stop=ends))
                if parts[k + 1]:
                    out.ops.append(operations.run(trained=True))
                    out.texts.append(parts[k + 1].replace(_HIDE, ""))
            out.ops.append(asks)
            at = last

    def _write_plain(self, text: str, out: Pieces) -> str:
        """Text that is not trained; what stands behind its last control token is left over."""
        parts = self.operations.controls.split(text)
        for k in range(0, len(parts) - 1, 2):
            if parts[k]:
                out.ops.append(self.operations.run())
                out.texts.append(parts[k].replace(_HIDE, ""))
            out.ops.append(self.operations.control(parts[k + 1]))
        return parts[-1].replace(_HIDE, "")

    def _write_text(self, text: str, out: Pieces) -> None:
        """A text that nobody says: the template has no part in it."""
        if not self._eos:
            raise Unfit("no_stop_token", "text", "the tokenizer has no token that ends a text")
        operations = self.operations
        out.ops += [
            *operations.const(self._bos), operations.turn(TEXT), operations.run(trained=True),
            *operations.const(self._eos, trained=True, stop=True),
        ]  # fmt: skip
        out.texts.append(text)


def _check_said(message: Message, k: int, said: str) -> None:
    """Refuse a turn of which a template prints less than it says, or other than it says."""
    lost = ""
    if message.text.strip() not in said:
        lost = "content"
    elif (message.reasoning_content or "").strip() not in said:
        lost = "reasoning_content"
    if lost:
        raise _lost(lost, f"messages[{k}].{lost}")
    _check_calls(message, k, said)


def _check_calls(message: Message, k: int, said: str) -> None:
    """Refuse calls of which a template leaves something out, or whose arguments are no JSON."""
    field = f"messages[{k}].tool_calls"
    for name, arguments, _ in message.calls:
        if name not in said or not _is_told(arguments, said):
            raise _lost("tool_calls", field)
        if arguments and repr(arguments) in said:
            raise Unfit(
                "arguments_not_json", field,
                "the template prints arguments as Python writes them: let it print them | tojson",
            )  # fmt: skip


def _lost(what: str, field: str) -> Unfit:
    return Unfit(f"lost_{what}", field, "the template does not print it")


def _is_told(value: Any, said: str) -> bool:
    """Whether all texts and numbers within an argument are printed, in whatever way templates write
    them; some leave the names of arguments out."""
    if isinstance(value, dict):
        return all(_is_told(one, said) for one in value.values())
    if isinstance(value, list):
        return all(_is_told(one, said) for one in value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return repr(value) in said
    if not isinstance(value, str) or value.strip() in said:
        return True
    return any(json.dumps(value, ensure_ascii=one)[1:-1] in said for one in (False, True))


def _check_context(conversation: Conversation, text: str) -> None:
    """Refuse a conversation of which a template drops the tools, or what somebody said; it may drop
    thoughts of turns that are not trained."""
    text = text.replace(_HIDE, "")
    for k, tool in enumerate(conversation.tools or ()):
        about = tool.get("function", tool)
        if isinstance(about, dict) and not _is_told(about.get("name"), text):
            raise _lost("tools", f"tools[{k}]")
    for k, message in enumerate(conversation.messages):
        said = message.text.strip()
        if message.role == "assistant":
            _check_calls(message, k, text)
            said = said.rpartition("</think>")[2].strip()
        if said in text:
            continue
        if message.role == "tool" and said[:1] in '{["':
            continue  # templates print JSON in their own way
        if json.dumps(said, ensure_ascii=False)[1:-1] not in text:
            raise _lost("content", f"messages[{k}].content")


def _written(call: tuple[str, dict[str, Any], str]) -> str:
    return json.dumps(call[1], ensure_ascii=False)


def _blocks(printed: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without marks, and where the blocks are in it."""
    text, blocks, opened = [], [], -1
    size = 0
    for part in re.split(f"([{OPEN}{CLOSE}])", printed):
        if part == OPEN:
            if opened >= 0:
                raise Unfit("other_blocks", "chat_template", "a generation block is in another")
            opened = size
        elif part == CLOSE:
            blocks.append((opened, size))
            opened = -1
        else:
            text.append(part)
            size += len(part)
    return "".join(text), blocks


class _Hider:
    """Puts marks into texts, so that none spells a control token: neither alone nor where it meets
    what stands beside it. A mark takes no white space from an end of a text."""

    def __init__(self, operations: Operations, template: str) -> None:
        special = operations.special
        self._controls = operations.controls
        self._all = "\0".join(["", *special, ""])
        self._most = max(map(len, special), default=0) - 1
        """Characters of a part of a control token."""
        self._firsts = {name[0] for name in special}
        self._lasts = {name[-1] for name in special}
        letters = "".join(map(re.escape, sorted(self._firsts | self._lasts)))
        self._ends = re.compile(f"[{letters}]" if letters else "(?!)")
        own = re.split("['\"{]", self._controls.sub(_HIDE, template))
        self._has_openings = any(self._is_begun(part.rstrip()) for part in own[:-1])
        """Whether the template may print a word as a part of a control token: '<|' + role."""

    def hide(self, value: Any, spoken: Collection[str] = (), *, is_spoken: bool = False) -> Any:
        """A value with marks in its texts. A word that is a part of a control token, as "user" may
        be, is marked in `spoken` fields alone: others a template compares with words of its own."""
        if isinstance(value, str):
            return self._mark(value, is_spoken=is_spoken)
        if isinstance(value, list):
            return [self.hide(one, spoken, is_spoken=is_spoken) for one in value]
        if isinstance(value, dict):
            return {
                self._mark(key): self.hide(one, spoken, is_spoken=is_spoken or key in spoken)
                for key, one in value.items()
            }
        return value

    def _mark(self, text: str, *, is_spoken: bool = False) -> str:
        if has_ends := self._ends.search(text) is not None:
            text = self._controls.sub(lambda found: found[0][0] + _HIDE + found[0][1:], text)
            if left := self._controls.search(text):  # of one character, or the end of another
                raise Unfit("control_text", why=f"it spells the control token {left[0]!r}")
        first = last = False
        body = text.strip()
        if len(body) <= self._most:
            if not body or (body.isidentifier() and not (is_spoken and self._has_openings)):
                return text
            first = body in self._all
        if has_ends:
            first |= self._is_rest(body)
            last = self._is_begun(body)
        if not (first or last):
            return text
        return text.replace(body, _HIDE * first + body + _HIDE * last, 1)

    def _is_begun(self, text: str) -> bool:
        """Whether a text ends with the beginning of a control token."""
        tail = text[-self._most :] if self._most else ""
        return any(
            letter in self._firsts and f"\0{tail[k:]}" in self._all
            for k, letter in enumerate(tail)
        )  # fmt: skip

    def _is_rest(self, text: str) -> bool:
        """Whether a text begins with the rest of a control token."""
        head = text[: self._most]
        return any(
            letter in self._lasts and f"{head[: k + 1]}\0" in self._all
            for k, letter in enumerate(head)
        )


def find_names(tokenizer: Tokenizer, source: Any = None) -> dict[str, str]:
    """The texts that templates print by name: from beside the tokenizer, or by what it has."""
    names = {"bos_token": first_of(BOS, tokenizer), "eos_token": first_of(EOS, tokenizer)}
    told: Any = getattr(source, "special_tokens_map", None)
    if told is None and isinstance(source, str | os.PathLike):
        told = _beside(source).get("config")
    for key, value in (told or {}).items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            names[key] = text
    return names


def _beside(source: str | os.PathLike[str]) -> dict[str, Any]:
    """What a tokenizer's directory says of chat templates."""
    folder = Path(source)
    folder = folder if folder.is_dir() else folder.parent
    found: dict[str, Any] = {}
    for name in ("tokenizer_config.json", "chat_template.json"):
        if (path := folder / name).is_file():
            try:
                found["config"] = {**found.get("config", {}), **json.loads(path.read_bytes())}
            except ValueError as error:
                raise BadConfig(f"{name} is not JSON", where=str(path), why=str(error),
                                do="fetch it again") from None  # fmt: skip
    template = found.get("config", {}).get("chat_template")
    if (path := folder / "chat_template.jinja").is_file():
        template = path.read_text("utf-8")
    if isinstance(template, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in template}
        template = named.get("default")
    if isinstance(template, str):
        found["template"] = template
    return found


def open_template(
    given: str, tokenizer: Tokenizer, source: Any = None, *, date: str | None = None
) -> Template:
    """A template as a user names it: a preset, "tokenizer", a file, or a Jinja text.

    `source` is what the tokenizer was loaded from; a template that asks for it is told the `date`.
    """
    config = resolve_template(ChatConfig(chat_template=given, date=date), tokenizer, source)
    return make_template(config, tokenizer)


def preset_jinja(name: str) -> str:
    """A preset as a Jinja template, for servers."""
    if name not in PRESETS:
        raise BadConfig(f"there is no preset {name!r}", do=suggest(name, PRESETS))
    return PRESETS[name].jinja()


def make_template(config: ChatConfig, tokenizer: Tokenizer) -> Template:
    """The template of a config that says all of it: wherever it is made, it is the same."""
    if config.chat_template in PRESETS:
        return PRESETS[config.chat_template](tokenizer)
    return JinjaTemplate(config.chat_template, tokenizer, config.names, date=config.date)


def _read_file(given: str) -> str | None:
    """A template's file, if it is one."""
    try:
        path = Path(given)
        return path.read_text("utf-8") if path.is_file() else None
    except (OSError, UnicodeDecodeError) as error:  # too long for a name, or no text
        raise BadConfig(
            f"the chat template {given[:80]!r} cannot be read", why=str(error)[:200],
            do=f"choose from {', '.join(PRESETS)}, or name a Jinja file in UTF-8",
        ) from None  # fmt: skip


def resolve_template(config: ChatConfig, tokenizer: Tokenizer, source: Any = None) -> ChatConfig:
    """The config with the text of its template, and with the names that this prints."""
    given = config.chat_template
    if given in PRESETS:
        return config
    text: str | None = None
    if given == "tokenizer":
        text = getattr(source, "chat_template", None)
        if isinstance(source, str | os.PathLike):
            text = _beside(source).get("template")
        if not isinstance(text, str):
            raise BadConfig(
                "there is no chat template beside the tokenizer",
                where=str(source) if isinstance(source, str | os.PathLike) else "",
                do=f"choose from {', '.join(PRESETS)}, or name a Jinja file",
            )
    elif "{{" in given or "{%" in given:
        text = given
    else:
        text = _read_file(given)
    if text is None:
        raise BadConfig(
            f"there is no chat template {given!r}",
            do=suggest(given, [*PRESETS, "tokenizer"]) + ", a file, or a Jinja text",
        )
    names = config.names or find_names(tokenizer, source)
    return replace(config, chat_template=text, names=names)
