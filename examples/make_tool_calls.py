"""Write conversations with tool calls that a seed makes, in five strategies, as JSON lines.

In:    how many, a seed
Out:   a file of rows as OpenAI writes them: messages, tools, tool_calls
Keeps: a row depends on the seed and its number alone, so the bytes are the same everywhere; the
       file has its name when it is whole; one row is in memory at a time
Never: asks for more than the tools that a row offers can do, unless that is the point of the row

    python examples/make_tool_calls.py --count 180000 --output tool_call_sft.jsonl
    python examples/make_tool_calls.py --count 500 --seed 1 --output held.jsonl

    single     a request, a call
    parallel   two or three requests at once, as many calls in one message, results, an answer
    chain      a call whose result is an argument of the next call, an answer
    clarify    a request that lacks an argument, a question, the argument, a call
    no_tool    a request that no tool on offer can do, and no call
"""

import argparse
import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from penstock.cli import main as run_command

CITIES: Final = (
    "Köln", "Paris", "Oslo", "Lagos", "Quito", "Hanoi", "Lima", "Turin", "Perth", "Osaka", "Delhi",
    "Cairo", "Bergen", "Tunis", "Riga", "Porto", "Graz", "Zürich", "Málaga", "Kraków", "Austin",
    "Dakar", "Nairobi", "Seoul", "Toronto", "Utrecht",
)  # fmt: skip
PEOPLE: Final = (
    "Ada", "Björn", "Chen", "Dora", "Emre", "Fatou", "Goran", "Hana", "Ines", "Jomo", "Kofi",
    "Lena", "Mira", "Noor", "Olga", "Pedro", "Rosa", "Sami", "Tariq", "Uma", "Vera", "Wen", "Yara",
    "Zoe",
)  # fmt: skip
SURNAMES: Final = (
    "Abe", "Berg", "Costa", "Diaz", "Endo", "Falk", "Gruber", "Haas", "Ito", "Jansen", "Khan",
    "Lind", "Moreau", "Nagy", "Okoye", "Popov", "Quist", "Rossi", "Silva", "Tanaka", "Ueda",
    "Vogel", "Weiss", "Yilmaz", "Zhou",
)  # fmt: skip
VERBS: Final = ("parse", "merge", "split", "hash", "read", "write", "sort", "pack", "load", "scan")
NOUNS: Final = (
    "row",
    "block",
    "shard",
    "token",
    "index",
    "table",
    "chunk",
    "buffer",
    "log",
    "page",
)
FOLDERS: Final = ("src", "lib", "core", "tests", "tools", "net", "store", "cache")
TEXTS: Final = ("the build is green", "I am late", "lunch is at noon", "the key is under the mat")
SKIES: Final = ("rain", "sun", "fog", "snow", "clouds", "wind")
CURRENCIES: Final = ("EUR", "USD", "JPY", "GBP", "CHF", "NOK", "INR", "BRL")

_Rng = random.Random
_Row = dict[str, Any]

# what an argument or a part of a result may be, by its name: a name means the same in every tool
VALUES: Final[dict[str, Callable[[_Rng], Any]]] = {
    "city": lambda rng: rng.choice(CITIES),
    "days": lambda rng: rng.randint(1, 14),
    "sky": lambda rng: rng.choice(SKIES),
    "degrees": lambda rng: rng.randint(-15, 38),
    "amount": lambda rng: rng.randint(100, 999_999) / 100,
    "source": lambda rng: rng.choice(CURRENCIES[:4]),
    "target": lambda rng: rng.choice(CURRENCIES[4:]),
    "converted": lambda rng: rng.randint(100, 999_999) / 100,
    "person": lambda rng: f"{rng.choice(PEOPLE)} {rng.choice(SURNAMES)}",
    "address": lambda rng: f"{rng.choice(PEOPLE).lower()}{rng.randint(1, 99)}@example.org",
    "text": lambda rng: rng.choice(TEXTS),
    "sent": lambda rng: True,
    "symbol": lambda rng: f"{rng.choice(VERBS)}_{rng.choice(NOUNS)}_{rng.randint(1, 99)}",
    "path": lambda rng: f"{rng.choice(FOLDERS)}/{rng.choice(NOUNS)}_{rng.randint(1, 99)}.cpp",
    "line": lambda rng: rng.randint(1, 900),
    "code": lambda rng: f"int {rng.choice(VERBS)}_{rng.choice(NOUNS)}(int n);",
    "passed": lambda rng: rng.randint(1, 300),
    "failed": lambda rng: rng.randint(0, 4),
    "minutes": lambda rng: rng.randint(1, 600),
    "timer": lambda rng: rng.randint(1000, 9999),
    "guests": lambda rng: rng.randint(1, 12),
    "hour": lambda rng: rng.randint(11, 22),
    "booking": lambda rng: f"B{rng.randint(10_000, 99_999)}",
}
NUMBERS: Final = {
    "days", "degrees", "line", "passed", "failed", "minutes", "timer", "guests", "hour",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tool:
    """Something that can be called, and how people ask for it."""

    name: str
    does: str
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    asks: tuple[str, ...]
    lacks: tuple[str, str, str]
    """An argument, how to ask without it, and how it is asked for then."""
    tells: str

    def schema(self) -> _Row:
        """The tool as OpenAI describes it."""
        about = {name: {"type": self._type(name)} for name in self.takes}
        parameters = {"type": "object", "properties": about, "required": list(self.takes)}
        function = {"name": self.name, "description": self.does, "parameters": parameters}
        return {"type": "function", "function": function}

    @staticmethod
    def _type(name: str) -> str:
        return "integer" if name in NUMBERS else "number" if name == "amount" else "string"

    def arguments(self, rng: _Rng, **known: Any) -> _Row:
        return {name: known.get(name, VALUES[name](rng)) for name in self.takes}

    def result(self, rng: _Rng) -> _Row:
        return {name: VALUES[name](rng) for name in self.gives}


TOOLS: Final = {
    tool.name: tool
    for tool in (
        Tool(
            "get_weather", "Forecast for a city.", ("city", "days"), ("sky", "degrees"),
            ("What will the weather be in {city} in {days} days?",
             "Give me the forecast for {city}, {days} days ahead."),
            ("city", "What will the weather be in {days} days?", "In which city?"),
            "{city} will have {sky} and {degrees} degrees in {days} days.",
        ),
        Tool(
            "convert_currency", "Convert an amount of money.", ("amount", "source", "target"),
            ("converted",),
            ("How much is {amount} {source} in {target}?",
             "Convert {amount} {source} to {target}."),
            ("target", "Convert {amount} {source}.", "To which currency?"),
            "{amount} {source} is {converted} {target}.",
        ),
        Tool(
            "find_contact", "Look a person up.", ("person",), ("city", "address"),
            ("How do I reach {person}?", "Look up {person} for me."),
            ("person", "Look somebody up for me.", "Who is it?"),
            "{person} lives in {city} and reads {address}.",
        ),
        Tool(
            "send_mail", "Send a mail.", ("address", "text"), ("sent",),
            ("Write to {address} that {text}.", "Mail {address}: {text}."),
            ("address", "Send a mail that {text}.", "To which address?"),
            "The mail to {address} is sent.",
        ),
        Tool(
            "search_code", "Find where a symbol is defined.", ("symbol",), ("path", "line"),
            ("Where is {symbol} defined?", "Find the definition of {symbol}."),
            ("symbol", "Find a definition for me.", "Of which symbol?"),
            "{symbol} is defined in {path}, line {line}.",
        ),
        Tool(
            "read_file", "Read a line of a file.", ("path", "line"), ("code",),
            ("Show me line {line} of {path}.", "What stands in {path} at line {line}?"),
            ("line", "Show me a line of {path}.", "Which line?"),
            "Line {line} of {path} is {code}",
        ),
        Tool(
            "run_tests", "Run the tests of a file.", ("path",), ("passed", "failed"),
            ("Run the tests of {path}.", "Do the tests of {path} pass?"),
            ("path", "Run the tests.", "Of which file?"),
            "{passed} tests of {path} passed, {failed} failed.",
        ),
        Tool(
            "set_timer", "Start a timer.", ("minutes",), ("timer",),
            ("Wake me in {minutes} minutes.", "Set a timer of {minutes} minutes."),
            ("minutes", "Set a timer.", "Of how many minutes?"),
            "Timer {timer} rings in {minutes} minutes.",
        ),
        Tool(
            "book_table", "Book a table in a restaurant.", ("city", "guests", "hour"), ("booking",),
            ("Book a table for {guests} in {city} at {hour}.",
             "We are {guests} and want to eat in {city} at {hour}."),
            ("hour", "Book a table for {guests} in {city}.", "At what hour?"),
            "A table for {guests} in {city} at {hour} is booked: {booking}.",
        ),
    )
}  # fmt: skip

CHAINS: Final = (
    ("find_contact", "get_weather", "What will the weather be where {person} is, in {days} days?"),
    ("find_contact", "send_mail", "Tell {person} that {text}."),
    ("search_code", "read_file", "Show me the line that defines {symbol}."),
    ("search_code", "run_tests", "Run the tests of the file that defines {symbol}."),
)
"""A call, the call that takes its result, and the request that needs both."""


@dataclass(slots=True)
class _Talk:
    """A conversation on its way."""

    rng: _Rng
    messages: list[_Row]
    as_text: bool
    """Whether arguments are texts and empty contents null, as the network gives them."""
    tools: list[Tool]
    """All that there are."""

    def say(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})

    def call(self, *wanted: tuple[Tool, _Row]) -> list[str]:
        """Calls in one message; their ids."""
        calls = [
            {
                "id": f"call_{self.rng.getrandbits(32):08x}",
                "type": "function",
                "function": {
                    "name": tool.name,
                    "arguments": _dumps(arguments) if self.as_text else arguments,
                },
            }
            for tool, arguments in wanted
        ]
        content = None if self.as_text else ""
        self.messages.append({"role": "assistant", "content": content, "tool_calls": calls})
        return [str(call["id"]) for call in calls]

    def result(self, number: str, result: _Row) -> None:
        self.messages.append({"role": "tool", "tool_call_id": number, "content": _dumps(result)})


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _single(talk: _Talk) -> list[Tool]:
    tool = talk.rng.choice(talk.tools)
    arguments = tool.arguments(talk.rng)
    talk.say("user", talk.rng.choice(tool.asks).format(**arguments))
    talk.call((tool, arguments))
    return [tool]


def _parallel(talk: _Talk) -> list[Tool]:
    rng = talk.rng
    tools = rng.sample(talk.tools, 2)
    wanted = [(tool, tool.arguments(rng)) for tool in rng.choices(tools, k=rng.randint(2, 3))]
    talk.say("user", " ".join(rng.choice(tool.asks).format(**given) for tool, given in wanted))
    told = []
    for number, (tool, given) in zip(talk.call(*wanted), wanted, strict=True):
        result = tool.result(rng)
        talk.result(number, result)
        told.append(tool.tells.format(**{**result, **given}))
    talk.say("assistant", " ".join(told))
    return tools


def _chain(talk: _Talk) -> list[Tool]:
    rng = talk.rng
    known = {tool.name for tool in talk.tools}
    first_name, second_name, ask = rng.choice([chain for chain in CHAINS if {*chain[:2]} <= known])
    first, second = TOOLS[first_name], TOOLS[second_name]
    given = first.arguments(rng)
    found = first.result(rng)
    then = second.arguments(rng, **found)
    result = second.result(rng)
    talk.say("user", ask.format(**{**then, **given}))
    (number,) = talk.call((first, given))
    talk.result(number, found)
    (number,) = talk.call((second, then))
    talk.result(number, result)
    talk.say("assistant", second.tells.format(**{**result, **then}))
    return [first, second]


def _clarify(talk: _Talk) -> list[Tool]:
    tool = talk.rng.choice(talk.tools)
    arguments = tool.arguments(talk.rng)
    lacking, ask, question = tool.lacks
    talk.say("user", ask.format(**arguments))
    talk.say("assistant", question)
    talk.say("user", f"{arguments[lacking]}")
    talk.call((tool, arguments))
    return [tool]


def _no_tool(talk: _Talk) -> list[Tool]:
    tool, *others = talk.rng.sample(talk.tools, 3)
    talk.say("user", talk.rng.choice(tool.asks).format(**tool.arguments(talk.rng)))
    names = " and ".join(other.name for other in others)
    talk.say("assistant", f"I cannot do that: my tools are {names}.")
    return others


STRATEGIES: Final[dict[str, Callable[[_Talk], list[Tool]]]] = {
    "single": _single,
    "parallel": _parallel,
    "chain": _chain,
    "clarify": _clarify,
    "no_tool": _no_tool,
}


def make_row(seed: int, number: int, tools: int = len(TOOLS)) -> _Row:
    """A row by its number, with the first of the `tools` alone; the strategies take turns.

    >>> row = make_row(0, 0)
    >>> [message["role"] for message in row["messages"]]
    ['user', 'assistant']
    >>> row == make_row(0, 0) != make_row(1, 0)
    True
    """
    rng = random.Random(f"{seed} {number}")
    strategy = list(STRATEGIES)[number % len(STRATEGIES)]
    talk = _Talk(rng, [], rng.random() < 0.5, list(TOOLS.values())[:tools])
    offered = STRATEGIES[strategy](talk)
    if strategy != "no_tool" and rng.random() < 0.7:  # one that is not needed
        offered += [rng.choice([tool for tool in talk.tools if tool not in offered])]
    offered = rng.sample(offered, len(offered))
    return {"messages": talk.messages, "tools": [tool.schema() for tool in offered]}


def make_rows(seed: int, count: int, tools: int = len(TOOLS)) -> Iterator[_Row]:
    return (make_row(seed, number, tools) for number in range(count))


def write_rows(output: Path, seed: int, count: int, tools: int = len(TOOLS)) -> None:
    """Under another name first: what is called `output` is whole."""
    draft = output.with_name(output.name + ".draft")
    with draft.open("w", encoding="utf-8", newline="\n") as file:
        for row in make_rows(seed, count, tools):
            file.write(_dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())
    draft.replace(output)


def parse_flags(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--count", type=_positive, default=10_000, help="rows; a fifth of them of each strategy")
    add("--seed", type=int, default=0, help="another seed makes other rows: for held prompts")
    add(
        "--tools",
        type=int,
        choices=range(3, len(TOOLS) + 1),
        default=len(TOOLS),
        help="how many tools there are; fewer are learned sooner",
    )
    add("--output", type=Path, default=Path("tool_call_sft.jsonl"), help="the file")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not 1 or more")
    return value


_positive.__name__ = "whole number"  # what argparse calls it


def main() -> None:
    args = parse_flags()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    write_rows(args.output, args.seed, args.count, args.tools)
    print(f"{args.output}: {args.count:,} rows, {args.output.stat().st_size:,} bytes")


if __name__ == "__main__":
    run_command(main)
