"""Conversations that a seed makes: several turns, tools, calls, results, thoughts, odd texts."""

import json
import random
from typing import Any, Final

TOOLS: Final = (
    ("get_weather", {"city": "string", "unit": "string", "days": "integer"}),
    ("search", {"query": "string", "limit": "integer", "exact": "boolean"}),
    ("convert_currency", {"amount": "number", "source": "string", "target": "string"}),
    ("run_sql", {"statement": "string", "timeout_s": "number"}),
    ("send_mail", {"to": "array", "subject": "string", "body": "string"}),
    ("python", {"code": "string"}),
)
TEXT: Final = (
    "the weather in Köln is mild and the train to Paris leaves at nine please compute an integral "
    "over all of them carefully 東京 の 天気 は 晴れ Привет мир naïve café it's can't we'll don't "
    "foo_bar camelCase x += 1; return {'a': [1, 2, 3]} https://example.org/a?b=c&d=%20 1,234.56 "
    "emoji 🙂 👩‍💻 done"
)
WORDS: Final = TEXT.split()
NASTY: Final = (
    "", " ", "a\n\n\nb", "tail  ", "  two spaces first", "line\r\nline", "\ttab",
    "```python\nprint('hi')\n```", '{"json": ["in", "text"]}', "quote \" and \\ backslash",
    "half <|im_start|", "<tool_call>", "</tool_response>", "zero\u200bwidth", "e\u0301",
)  # fmt: skip


def sentence(rng: random.Random, most: int = 20) -> str:
    """Some words, with a shape of its own."""
    joint = rng.choice((" ", " ", " ", "\n", ", "))
    return joint.join(rng.choices(WORDS, k=rng.randint(1, most))).strip() or "ok"


def value(rng: random.Random, kind: str) -> Any:
    """An argument of a type."""
    if kind == "array":
        return [sentence(rng, 2) for _ in range(rng.randint(0, 3))]
    if kind == "string":
        return sentence(rng, 6)
    if kind == "boolean":
        return rng.random() < 0.5
    return rng.choice((0, 7, -3, 10**12) if kind == "integer" else (0.5, 1.0, 1e21, 3, -2.25))


def schema(name: str, fields: dict[str, str]) -> dict[str, Any]:
    """A tool as OpenAI describes it."""
    about = {key: {"type": kind, "description": f"the {key}"} for key, kind in fields.items()}
    parameters = {"type": "object", "properties": about, "required": list(fields)[:1]}
    return {
        "type": "function",
        "function": {"name": name, "description": f"Does {name}.", "parameters": parameters},
    }


def conversation(
    rng: random.Random, *, tools: bool = True, system: bool = True, thoughts: bool = False,
    single: bool = False, wire: bool = False, nasty: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """A row of the format `messages`. `single` calls come alone and without text; with `wire`
    arguments are texts and empty contents null, as they come from the network."""
    chosen = rng.sample(TOOLS, rng.randint(1, 2)) if tools and rng.random() < 0.8 else []
    messages: list[dict[str, Any]] = []
    if system and rng.random() < 0.6:
        messages.append({"role": "system", "content": sentence(rng)})

    def text() -> str:
        return rng.choice(NASTY) if nasty and rng.random() < 0.3 else sentence(rng)

    for _ in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": text()})
        while chosen and rng.random() < 0.45:
            calls = []
            for _ in range(1 if single else rng.choice((1, 1, 2))):
                name, fields = rng.choice(chosen)
                some = rng.sample(list(fields), rng.randint(1, len(fields)))
                arguments: Any = {key: value(rng, fields[key]) for key in some}
                if wire:
                    arguments = json.dumps(arguments)
                calls.append(
                    {
                        "id": "".join(rng.choices("abcdefghij0123456789", k=9)),
                        "type": "function",
                        "function": {"name": name, "arguments": arguments},
                    }
                )
            said: str | None = "" if single or rng.random() < 0.6 else sentence(rng, 8)
            messages.append(
                {
                    "role": "assistant",
                    "content": said or (None if wire else ""),
                    "tool_calls": calls,
                }
            )
            for call in calls:
                found = rng.choice((sentence(rng), json.dumps({"value": rng.random()}), text()))
                messages.append({"role": "tool", "content": found, "tool_call_id": call["id"]})
        said = sentence(rng)
        answer: dict[str, Any] = {"role": "assistant", "content": said}
        if thoughts and rng.random() < 0.5:
            answer["reasoning_content"] = sentence(rng, 12)
        messages.append(answer)
    row: dict[str, Any] = {"messages": messages}
    if chosen:
        row["tools"] = [schema(*tool) for tool in chosen]
    return row


def conversations(seed: int, count: int, **options: Any) -> list[dict[str, Any]]:
    """So many rows."""
    rng = random.Random(seed)
    return [conversation(rng, **options) for _ in range(count)]
