"""Look at a chat template before anything is trained with it, and at tokens with their colours.

In:    a template, a tokenizer
Out:   findings: what was tried, whether it is right, what was seen; three conversations, coloured
Keeps: every check is made by printing conversations, never by reading the template's text alone
Never: changes a template
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from penstock.chat.formats import ROLES, Conversation, Function, Message, ToolCall, Unfit
from penstock.chat.jinja import JinjaTemplate, find_names, open_template
from penstock.chat.render import REWRITES, ChatConfig, Renderer, Samples
from penstock.chat.templates import Preset, Template
from penstock.options import printable
from penstock.tokenize.tokenizer import Tokenizer

OK, NOTE, BAD = "ok", "note", "bad"
_DATE: Final = "2024-07-26"
"""What a template is told that asks for the date."""
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    check: str
    verdict: str
    """ok, note or bad."""
    seen: str


@dataclass(frozen=True, slots=True)
class Audit:
    """All that was found."""

    findings: list[Finding]
    samples: list[tuple[str, Samples]]
    """Conversations by name, rendered."""

    @property
    def is_fit(self) -> bool:
        """Whether nothing bad was found."""
        return all(finding.verdict != BAD for finding in self.findings)


def _call(word: str, number: str) -> ToolCall:
    return ToolCall(Function("look_up", {"word": word}), number, "function")


def sample_conversations() -> list[tuple[str, Conversation]]:
    """Three conversations: with a system message, with a call, with thoughts."""
    return [
        ("two exchanges", Conversation([
            Message("system", "Answer in one word."), Message("user", "What is 1 + 1?"),
            Message("assistant", "Two."), Message("user", "And 2 + 2?"),
            Message("assistant", "Four."),
        ])),
        ("a call and its result", Conversation([
            Message("user", "What does zymurgy mean?"),
            Message("assistant", "", tool_calls=[_call("zymurgy", "abcdefgh1")]),
            Message("tool", "the study of fermentation", tool_call_id="abcdefgh1"),
            Message("assistant", "It is the study of fermentation, as in brewing."),
        ], [_TOOL])),
        ("thoughts", Conversation([
            Message("user", "Is 91 prime?"),
            Message("assistant", "No.", reasoning_content="7 times 13 is 91."),
            Message("user", "And 97?"),
            Message("assistant", "Yes.", reasoning_content="No divisor up to 9."),
        ])),
    ]  # fmt: skip


def audit_template(chat_template: str, tokenizer: Any) -> Audit:
    """Look at a template with a tokenizer, each as a loader takes it."""
    loaded = Tokenizer.load(tokenizer)
    template = open_template(chat_template, loaded, tokenizer, date=_DATE)
    printed = template
    if isinstance(template, Preset):
        printed = JinjaTemplate(template.jinja(), loaded, find_names(loaded, tokenizer))
    assert isinstance(printed, JinjaTemplate)
    try:
        look = _Look(printed, template, loaded)
        findings = look.all()
        samples = []
        for name, conversation in sample_conversations():
            rendered = look.renderer.render([conversation])
            samples.append((name, rendered))
        return Audit(findings, samples)
    finally:
        printed.close()
        template.close()


class _Look:
    """The checks."""

    def __init__(self, printed: JinjaTemplate, template: Template, tokenizer: Tokenizer) -> None:
        self._printed, self._template, self._tokenizer = printed, template, tokenizer
        self.renderer = Renderer(tokenizer, template, ChatConfig(max_length=1 << 16))

    def all(self) -> list[Finding]:
        """Every check, in the order in which a reader would ask."""
        checks: tuple[tuple[str, Callable[[], tuple[str, str]]], ...] = (
            ("prints", self._prints),
            ("marks trained text", self._marks),
            ("prefix property", self._prefix),
            ("history", self._history),
            ("stop token trained", self._stop),
            ("header not trained", self._header),
            ("tool calls printed", self._calls),
            ("tool text not trained", self._leaks),
            ("arguments encoded once", self._twice),
            ("no None, no null", self._none),
            ("one BOS", self._bos),
            ("content as it is", self._content),
            ("no clock", self._clock),
        )
        found = []
        for name, check in checks:
            try:
                found.append(Finding(name, *check()))
            except Unfit as error:
                found.append(Finding(name, BAD, f"{error.reason}: {error.why}"))
        return found

    def _text(self, *messages: Message, tools: Any = None, prompt: bool = False) -> str:
        conversation = Conversation(list(messages), tools)
        (text,) = self._printed.print(conversation, [(len(messages), prompt)])
        return text.replace("\ufdd0", "").replace("\ufdd1", "")

    def _wire(self, message: dict[str, Any]) -> str:
        """A message as it comes from the network, as others hand it to a template."""
        return self._printed.print_raw(
            {"messages": [{"role": "user", "content": "hi"}, message], "tools": [_TOOL]}
        )

    def _tried(self, conversation: Conversation) -> Samples | Unfit:
        samples = self.renderer.render([conversation])
        return samples.refused.get(0, samples)

    def _prints(self) -> tuple[str, str]:
        text = self._text(Message("user", "quetzal"), Message("assistant", "axolotl"))
        lost = [word for word in ("quetzal", "axolotl") if word not in text]
        if lost:
            return BAD, f"{', '.join(lost)} is not in what it prints"
        return OK, f"{len(text)} characters for two turns"

    def _marks(self) -> tuple[str, str]:
        if isinstance(self._template, Preset):
            return OK, f"preset {self._template.name}, composed of tokens"
        if self._printed.has_blocks:
            return OK, "{% generation %} blocks"
        return NOTE, "no generation blocks: turns are found by printing their beginnings"

    def _prefix(self) -> tuple[str, str]:
        messages = sample_conversations()[0][1].messages
        whole = self._text(*messages)
        before = self._text(*messages[:2], prompt=True)
        after = self._text(*messages[:3])
        if not after.startswith(before):
            return NOTE, "a turn does not begin with the prompt that a server would send"
        if not whole.startswith(after):
            return NOTE, "what is printed for a turn changes once others follow"
        return OK, "earlier turns stay as they were"

    def _history(self) -> tuple[str, str]:
        found = self._tried(sample_conversations()[2][1])
        if isinstance(found, Unfit) and found.reason == "no_place":
            return OK, "it has no place for thoughts: such rows are refused"
        if isinstance(found, Unfit) and found.reason not in (REWRITES, "lost_reasoning_content"):
            return BAD, f"{found.reason}: {found.why}"
        text = self._text(*sample_conversations()[2][1].messages)
        if "No divisor" not in text:
            return NOTE, "it does not print thoughts: rows with reasoning_content are refused"
        if "7 times 13" not in text:
            return NOTE, "thoughts of earlier turns are removed: one sample for each turn"
        if isinstance(found, Samples) and len(found) > 1:
            return NOTE, "earlier turns change: one sample for each turn"
        return OK, "thoughts stay where they were"

    def _trained(self) -> tuple[list[int], Any]:
        found = self._tried(sample_conversations()[0][1])
        if isinstance(found, Unfit):
            raise found
        return found.tokens[0].as_py(), found.masks()[0]

    def _stop(self) -> tuple[str, str]:
        ids, mask = self._trained()
        special = {number: name for name, number in self._tokenizer.special_tokens.items()}
        ends = np.flatnonzero(mask & ~np.append(mask[1:], False)).tolist()
        names = [special.get(ids[at], "") for at in ends]
        if not all(names):
            return BAD, "a trained range ends with text: the model would not learn to stop"
        return OK, f"{', '.join(sorted(set(names)))} after each of {len(ends)} turns"

    def _header(self) -> tuple[str, str]:
        ids, mask = self._trained()
        text = self._tokenizer.decode([one for one, kept in zip(ids, mask, strict=True) if kept])
        before = text.partition("Two.")[0] if "Two." in text else text.partition("Four.")[0]
        if "assistant" in before.lower() or before[:1] in ("\n", "\r"):
            return BAD, f"the trained text begins with {before!r}"
        return OK, f"trained text begins with {text[:8]!r}"

    def _calls(self) -> tuple[str, str]:
        conversation = sample_conversations()[1][1]
        found = self._tried(conversation)
        if isinstance(found, Unfit):
            told = NOTE if found.reason in ("no_place", "template_refused") else BAD
            return told, f"rows with calls are refused: {found.why or found.reason}"
        text = self._text(*conversation.messages, tools=conversation.tools)
        lost = [
            name
            for name, word in (("the call", '"zymurgy"'), ("the result", "of fermentation"),
                               ("the tools", "Looks a word up"))
            if word not in text
        ]  # fmt: skip
        if lost:
            return BAD, f"{', '.join(lost)} is not in what it prints"
        return OK, "tools, calls and results are printed"

    def _leaks(self) -> tuple[str, str]:
        conversation = sample_conversations()[1][1]
        secret = "quokka"
        conversation.messages[2].content = secret
        found = self._tried(conversation)
        if isinstance(found, Unfit):
            return NOTE, "rows with results are refused"
        ids, mask = found.tokens[0].as_py(), found.masks()[0]
        text = self._tokenizer.decode([one for one, kept in zip(ids, mask, strict=True) if kept])
        return (
            (BAD, "what a tool said is trained") if secret in text else (OK, "results are context")
        )

    def _twice(self) -> tuple[str, str]:
        call = {"name": "look_up", "arguments": '{"word": "zymurgy"}'}
        calls = [{"id": "abcdefgh1", "type": "function", "function": call}]
        try:
            text = self._wire({"role": "assistant", "content": "", "tool_calls": calls})
        except Unfit:
            return OK, "it takes no calls with arguments as text"
        if '\\"zymurgy\\"' in text:
            return NOTE, "arguments given as text are encoded twice: penstock gives it objects"
        return OK, "arguments given as text are printed as they are"

    def _none(self) -> tuple[str, str]:
        call = {"name": "look_up", "arguments": {"word": "zymurgy"}}
        calls = [{"id": "abcdefgh1", "type": "function", "function": call}]
        seen = []
        for extra in ({"tool_calls": calls}, {}):
            try:
                text = self._wire({"role": "assistant", "content": None, **extra})
            except Unfit:
                continue
            seen += [word for word in ("None", "null") if word in text]
        if seen:
            return NOTE, f"a null content is printed as {seen[0]}: penstock gives it a text"
        return OK, "a null content prints nothing"

    def _bos(self) -> tuple[str, str]:
        bos = self._printed.names.get("bos_token", "")
        text = self._text(Message("user", "hi"), Message("assistant", "ho"))
        if not bos:
            return OK, "the tokenizer has none"
        count = text.count(bos)
        if count > 1:
            return BAD, f"{bos} is printed {count} times"
        adds = json.dumps(self._tokenizer.content.get("post_processor") or {})
        if count and bos in adds:
            return NOTE, f"the tokenizer would add a second {bos}: encode without special tokens"
        return OK, f"{bos} is printed {'once' if count else 'by nobody'}"

    def _content(self) -> tuple[str, str]:
        text = self._text(Message("user", "  two  "), Message("assistant", " one "))
        lost = [one for one in ("  two  ", " one ") if one not in text]
        if lost:
            return NOTE, "white space around contents is taken off"
        return OK, "contents are printed with their white space"

    def _clock(self) -> tuple[str, str]:
        if "strftime_now" in self._printed.text:
            return (
                NOTE,
                "it asks for the date: say which, since shards must not depend on the clock",
            )
        return OK, "it does not ask for the date"


# Tokens with their colours.

_COLOURS: Final = {"system": "35", "user": "36", "assistant": "33", "tool": "34", "text": "37"}
_TRAINED: Final = "1;32"


def role_of_tokens(turns: Sequence[int], count: int) -> list[str]:
    """The role of each token; `turns` are roles and first tokens, one after the other.

    >>> role_of_tokens([1, 0, 2, 2], 4)
    ['user', 'user', 'assistant', 'assistant']
    """
    found = [""] * count
    starts = [*turns[1::2], count]
    for k, role in enumerate(turns[::2]):
        for at in range(starts[k], starts[k + 1]):
            found[at] = ROLES[role]
    return found


def coloured(
    tokenizer: Tokenizer, ids: Sequence[int], spans: Sequence[int], turns: Sequence[int],
    *, colours: bool = True,
) -> str:  # fmt: skip
    """A sample to be read: what is trained is bold and green, or between « and »."""
    trained = [False] * len(ids)
    for first, last in zip(spans[::2], spans[1::2], strict=True):
        trained[first:last] = [True] * (last - first)
    roles = role_of_tokens(turns, len(ids))
    parts = []
    first = 0
    while first < len(ids):
        last = first
        while last < len(ids) and (trained[last], roles[last]) == (trained[first], roles[first]):
            last += 1
        text = printable(tokenizer.decode(ids[first:last]))
        if colours:
            code = _TRAINED if trained[first] else _COLOURS.get(roles[first], "37")
            # line by line: a terminal's colour ends with its line in some pagers
            text = "\n".join(
                f"\x1b[{code}m{line}\x1b[0m" if line else "" for line in text.split("\n")
            )
        elif trained[first]:
            text = f"«{text}»"
        parts.append(text)
        first = last
    return "".join(parts)
