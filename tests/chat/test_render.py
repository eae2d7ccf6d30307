"""What is trained, what is too long, what is shown turn by turn: and nothing is lost."""

import json
import random
from typing import Any

import numpy as np
import pytest

from penstock import ChatConfig
from penstock.chat.formats import ROLES, Conversation, RowReader
from penstock.chat.jinja import JinjaTemplate, open_template
from penstock.chat.render import OVERFLOWS, Renderer, Samples
from penstock.chat.templates import ChatML, Pieces
from penstock.errors import BadConfig, BadDocument
from penstock.tokenize.tokenizer import Tokenizer

from .made import conversations

FORGETFUL = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.reasoning_content and loop.last %}{{- '<think>' + m.reasoning_content + '</think>' }}"
    "{%- endif %}{{- m.content + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
"""Removes the thoughts of earlier turns."""

MARKED = FORGETFUL.replace(
    "{%- if m.reas", "{%- if m.role == 'assistant' %}{%- generation %}{%- if m.reas"
)
MARKED = MARKED.replace(
    "{{- m.content + '<|im_end|>\n' }}",
    "{{- m.content + '<|im_end|>' }}{%- endgeneration %}{%- else %}{{- m.content + '<|im_end|>' }}"
    "{%- endif %}{{- '\n' }}",
)
"""The same with generation blocks."""


def read(row: dict[str, Any]) -> Conversation:
    return RowReader("messages").read(json.dumps(row).encode())


def render(tokenizer: Tokenizer, rows: list[dict[str, Any]], **options: Any) -> Samples:
    config = ChatConfig(**{"max_length": 1 << 16, **options})
    template = open_template(config.chat_template, tokenizer)
    renderer = Renderer(tokenizer, template, config)
    try:
        return renderer.render([read(row) for row in rows])
    finally:
        renderer.close()


def trained(tokenizer: Tokenizer, samples: Samples, row: int = 0) -> list[str]:
    """The texts that are trained."""
    ids, spans = samples.tokens[row].as_py(), samples.loss_spans[row].as_py()
    return [tokenizer.decode(ids[a:b]) for a, b in zip(spans[::2], spans[1::2], strict=True)]


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    """A conversation of user and assistant in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[k % 2], "content": text} for k, text in enumerate(texts)]
    return {"messages": messages, **more}


# What is trained.


def test_an_answer_of_white_space_that_is_taken_off_is_refused(chat_tokenizer: Tokenizer) -> None:
    rows = [chat("a", " \n"), chat("a", " b ")]
    for name, options in (("llama3", {}), ("gemma", {}), ("chatml", {"strip": True})):
        found = render(chat_tokenizer, rows, chat_template=name, **options)
        assert [fault.reason for fault in found.refused.values()] == ["empty_assistant"], name
        assert found.refused[0].field == "messages[1].content"
        assert trained(chat_tokenizer, found)[0].startswith("b<")
    found = render(chat_tokenizer, rows)
    assert trained(chat_tokenizer, found) == [" \n<|im_end|>"]
    call = {"role": "assistant", "content": " ", "tool_calls": [{"function": {"name": "f"}}]}
    row = {"messages": [{"role": "user", "content": "a"}, call]}
    assert not render(chat_tokenizer, [row], strip=True).refused


def test_the_end_of_a_turn_is_trained_and_the_newline_after_it_is_not(
    chat_tokenizer: Tokenizer,
) -> None:
    found = render(chat_tokenizer, [chat("a", "b", "c", "d")])
    assert trained(chat_tokenizer, found) == ["b<|im_end|>", "d<|im_end|>"]
    assert chat_tokenizer.decode(found.tokens[0].as_py()).endswith("d<|im_end|>\n")
    assert int(found.trained[0]) == found.masks()[0].sum()


@pytest.mark.parametrize(
    ("options", "marks", "expected"),
    [
        ({}, {}, ["b", "d"]),
        ({"turns": "last"}, {}, ["d"]),
        ({}, {1: {"train": False}}, ["d"]),
        ({}, {3: {"weight": 0}}, ["b"]),
        ({}, {1: {"weight": 1}}, ["b", "d"]),
        ({"train_on": ("user",)}, {}, ["a", "c"]),
        ({"train_on": ("user", "assistant")}, {2: {"train": False}}, ["a", "b", "d"]),
        ({"train_on": "assistant", "turns": "last"}, {3: {"train": False}}, ["b"]),
    ],
)
def test_what_is_trained_is_what_was_asked_for(
    options: dict[str, Any], marks: dict[int, Any], expected: list[str], chat_tokenizer: Tokenizer
) -> None:
    row = chat("a", "b", "c", "d")
    for k, more in marks.items():
        row["messages"][k] |= more
    found = render(chat_tokenizer, [row], **options)
    assert trained(chat_tokenizer, found) == [f"{text}<|im_end|>" for text in expected]


def test_results_in_one_turn_are_trained_together_or_not(chat_tokenizer: Tokenizer) -> None:
    calls = [{"id": one, "function": {"name": "f"}} for one in "ab"]
    row = chat("x", "y")
    row["messages"][1] = {"role": "assistant", "content": "", "tool_calls": calls}
    row["messages"] += [
        {"role": "tool", "content": "one"}, {"role": "tool", "content": "two", "train": False}
    ]  # fmt: skip
    options: dict[str, Any] = {"chat_template": "qwen", "train_on": ("assistant", "tool")}
    (fault,) = render(chat_tokenizer, [row], **options).refused.values()
    assert (fault.reason, fault.field) == ("no_place", "messages[3].train")
    row["messages"][2]["train"] = False
    found = render(chat_tokenizer, [row], **options)
    assert "two" not in "".join(trained(chat_tokenizer, found))


def test_results_and_headers_are_never_trained(chat_tokenizer: Tokenizer) -> None:
    rows = conversations(1, 80, nasty=True)
    for preset in ("chatml", "qwen", "mistral"):
        found = render(chat_tokenizer, rows, chat_template=preset)
        assert len(found) > 70
        for k in range(len(found)):
            mask = found.masks()[k]
            turns = found.turns[k].as_py()
            starts = [*turns[1::2], len(mask)]
            for number, role in enumerate(turns[::2]):
                inside = mask[starts[number] : starts[number + 1]]
                if ROLES[role] == "assistant":
                    assert inside.any()
                    assert preset == "mistral" or not inside[0], "a turn begins with its header"
                else:
                    assert not inside.any()


@pytest.mark.parametrize(
    ("row", "options", "reason", "field"),
    [
        (chat("a"), {}, "nothing_to_train", ""),
        (chat("a", "b"), {"train_on": ("tool",)}, "nothing_to_train", ""),
        ({"messages": [{"role": "user", "content": "a", "train": True}]}, {}, "wrong_role",
         "messages[0].train"),
        (chat("a", "\n\nb"), {"chat_template": "chatml"}, "joined_header", ""),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused(
    row: dict[str, Any], options: dict[str, Any], reason: str, field: str,
    chat_tokenizer: Tokenizer,
) -> None:  # fmt: skip
    if reason == "joined_header":
        # a tokenizer with a token of two newlines
        content = json.loads(json.dumps(chat_tokenizer.content))
        vocabulary, merges = content["model"]["vocab"], content["model"]["merges"]
        if "ĊĊ" not in vocabulary:
            highest = max(t["id"] for t in content["added_tokens"])
            vocabulary["ĊĊ"] = highest + 1
            merges.insert(0, ["Ċ", "Ċ"] if isinstance(merges[0], list) else "Ċ Ċ")
            chat_tokenizer = Tokenizer.load(content, engine="tokenizers")
    found = render(chat_tokenizer, [row], **options)
    (fault,) = found.refused.values()
    assert (fault.reason, fault.field) == (reason, field)
    assert fault.why
    if reason == "joined_header":
        stripped = render(chat_tokenizer, [row], **options, strip=True)
        assert trained(chat_tokenizer, stripped) == ["b<|im_end|>"]


def test_a_text_is_trained_but_for_its_first_token(chat_tokenizer: Tokenizer) -> None:
    config = ChatConfig(max_length=64)
    renderer = Renderer(chat_tokenizer, open_template("gemma", chat_tokenizer), config)
    found = renderer.render([Conversation(text="one two three"), Conversation(text="y" * 500)])
    ids, (first, last) = found.tokens[0].as_py(), found.loss_spans[0].as_py()
    assert (first, last) == (1, len(ids))
    assert chat_tokenizer.decode(ids) == "<|bos|>one two three<|endoftext|>"
    assert found.turns[0].as_py() == [ROLES.index("text"), 1]
    assert found.refused[1].reason == "too_long"


def test_the_first_token_has_no_context_and_is_not_trained(chat_tokenizer: Tokenizer) -> None:
    """Where the tokenizer has no BOS, a text begins with a token of its own."""
    names = {"bos_token": "", "eos_token": "<|endoftext|>"}
    template = JinjaTemplate("{{ messages }}", chat_tokenizer, names)
    renderer = Renderer(chat_tokenizer, template, ChatConfig(max_length=64))
    found = renderer.render([Conversation(text="one two three")])
    renderer.close()
    ids, spans = found.tokens[0].as_py(), found.loss_spans[0].as_py()
    assert chat_tokenizer.decode(ids) == "one two three<|endoftext|>"
    assert spans == [1, len(ids)]
    assert found.trained.tolist() == [len(ids) - 1]


def test_a_template_that_trains_another_role_is_found(chat_tokenizer: Tokenizer) -> None:
    class Wrong(ChatML):
        def compose(self, conversation: Conversation, trained: Any, out: Pieces) -> None:
            super().compose(conversation, [True] * len(trained), out)

    renderer = Renderer(chat_tokenizer, Wrong(chat_tokenizer), ChatConfig())
    (fault,) = renderer.render([read(chat("a", "b"))]).refused.values()
    assert (fault.reason, fault.why) == (
        "wrong_role",
        "what is trained is of a role that is not to be trained",
    )


# What is too long.


def whole_turns(tokenizer: Tokenizer, samples: Samples) -> list[list[str]]:
    """What the messages of each sample say."""
    for k, sample in enumerate(samples.conversations):
        text = tokenizer.decode(samples.tokens[k].as_py())
        for message in sample.messages:
            assert f"<|im_start|>{message.role}\n{message.text}<|im_end|>\n" in text
        assert text.count("<|im_start|>") == len(sample.messages)
    return [[message.text for message in one.messages] for one in samples.conversations]


@pytest.mark.parametrize(
    ("overflow", "expected", "left_out"),
    [
        ("drop_oldest", [["s", "e", "f", "g", "h"]], 4),
        ("truncate", [["s", "a", "b", "c", "d"]], 4),
        ("split", [["s", "a", "b", "c", "d"], ["s", "e", "f", "g", "h"]], 0),
    ],
)
def test_turns_are_dropped_kept_or_split(
    overflow: str, expected: list[list[str]], left_out: int, chat_tokenizer: Tokenizer
) -> None:
    row = chat("a", "b", "c", "d", "e", "f", "g", "h")
    row["messages"].insert(0, {"role": "system", "content": "s"})
    whole = len(render(chat_tokenizer, [row]).tokens[0])
    short = chat("x", "y")
    found = render(
        chat_tokenizer, [short, row, short], max_length=whole * 2 // 3, overflow=overflow
    )
    assert whole_turns(chat_tokenizer, found) == [["x", "y"], *expected, ["x", "y"]]
    assert found.document.tolist() == [0, *[1] * len(expected), 2]
    assert found.part.tolist() == [0, *range(len(expected)), 0]
    assert found.parts.tolist() == [1, *[len(expected)] * len(expected), 1]
    assert found.left_out.tolist() == [0, *[left_out] * len(expected), 0]


def test_to_split_a_long_conversation_takes_time_in_proportion(
    chat_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sample is as long as it can be, and little is rendered to find that out."""
    rng = random.Random(3)
    texts = ["a " * rng.choice([1, 1, 1, 9, 90]) for _ in range(800)]
    rendered = [0]
    make = Renderer._make

    def counted(self: Renderer, conversations: list[Conversation], *more: Any) -> Any:
        rendered[0] += sum(len(one.messages) for one in conversations)
        return make(self, conversations, *more)

    monkeypatch.setattr(Renderer, "_make", counted)
    found = render(chat_tokenizer, [chat(*texts)], max_length=300, overflow="split")
    assert rendered[0] < 20 * len(texts)
    pairs = [chat(*texts[k : k + 2]) for k in range(0, len(texts), 2)]
    sizes = [len(ids) for ids in render(chat_tokenizer, pairs).tokens]
    wanted: list[int] = []
    for size in sizes:
        if wanted and wanted[-1] + size <= 300:
            wanted[-1] += size
        else:
            wanted.append(size)
    assert [len(ids) for ids in found.tokens] == wanted
    assert len(wanted) > 50


@pytest.mark.parametrize("overflow", ["drop_oldest", "split", "truncate", "skip"])
def test_samples_fit_and_conversations_are_counted(
    overflow: str, chat_tokenizer: Tokenizer
) -> None:
    rows = conversations(2, 120)
    free = render(chat_tokenizer, rows)
    lengths = free.tokens.value_lengths().to_numpy(zero_copy_only=False)
    most = int(np.percentile(lengths, 60))
    found = render(chat_tokenizer, rows, max_length=most, overflow=overflow)
    sizes = found.tokens.value_lengths().to_numpy(zero_copy_only=False)
    assert sizes.max() <= most
    assert (found.trained > 0).all()
    assert {*found.document.tolist()} | {*found.refused} == {*range(120)}
    assert not {*found.document.tolist()} & {*found.refused}
    assert {fault.reason for fault in found.refused.values()} <= {"too_long"}
    fits = np.flatnonzero(lengths <= most)
    for k in fits.tolist():
        row = int(np.flatnonzero(found.document == k)[0])
        assert found.tokens[row] == free.tokens[k]
        assert found.loss_spans[row] == free.loss_spans[k]
    if overflow == "skip":
        assert [*found.refused] == np.flatnonzero(lengths > most).tolist()
        assert f"{most:,} are allowed" in next(iter(found.refused.values())).why
    else:
        assert len(found.refused) < (lengths > most).sum()
    # each sample is what its own messages give
    again = render(
        chat_tokenizer, [json.loads(one.as_json()) for one in found.conversations], max_length=most
    )
    assert again.tokens.equals(found.tokens)


def test_an_overflow_can_be_an_error(chat_tokenizer: Tokenizer) -> None:
    with pytest.raises(BadDocument, match="a conversation is too long") as error:
        render(
            chat_tokenizer, [chat("a", "b"), chat("a", "b" * 99)], max_length=40, overflow="error"
        )
    assert error.value.row == 1
    assert "40 are allowed" in error.value.why
    assert "drop_oldest" in error.value.do


# Templates that rewrite history.


@pytest.mark.parametrize("template", [FORGETFUL, MARKED])
def test_a_template_that_forgets_gives_a_sample_for_each_turn(
    template: str, chat_tokenizer: Tokenizer
) -> None:
    row = chat("a", "b", "c", "d", "e", "f")
    for k, thought in ((1, "t1"), (3, "t2"), (5, "t3")):
        row["messages"][k]["reasoning_content"] = thought
    found = render(chat_tokenizer, [chat("x", "y"), row], chat_template=template)
    assert found.document.tolist() == [0, 1, 1, 1]
    assert [trained(chat_tokenizer, found, k) for k in range(4)] == [
        ["y<|im_end|>"],
        ["<think>t1</think>b<|im_end|>"],
        ["<think>t2</think>d<|im_end|>"],
        ["<think>t3</think>f<|im_end|>"],
    ]
    assert "t1" not in chat_tokenizer.decode(found.tokens[2].as_py()), "as it is when it is served"
    with pytest.raises(BadDocument, match="shows earlier turns otherwise") as error:
        render(chat_tokenizer, [chat("x", "y"), row], chat_template=template, history="error")
    assert error.value.row == 1
    assert "history=samples" in error.value.do


@pytest.mark.parametrize("template", [FORGETFUL, MARKED])
def test_what_follows_the_only_turn_that_is_trained_is_left_out(
    template: str, chat_tokenizer: Tokenizer
) -> None:
    """As a template shows the turn while it is the last."""
    row = chat("a", "b", "and?")
    row["messages"][1]["reasoning_content"] = "t1"
    found = render(chat_tokenizer, [row], chat_template=template)
    assert trained(chat_tokenizer, found) == ["<think>t1</think>b<|im_end|>"]
    assert found.left_out.tolist() == [1]
    with pytest.raises(BadDocument, match="shows earlier turns otherwise"):
        render(chat_tokenizer, [row], chat_template=template, history="error")


def test_samples_of_turns_are_shortened_too(chat_tokenizer: Tokenizer) -> None:
    row = chat("a", "b", "c", "d" * 300, "e", "f")
    for k in (1, 3, 5):
        row["messages"][k]["reasoning_content"] = "t"
    found = render(chat_tokenizer, [row], chat_template=FORGETFUL, max_length=60)
    assert [trained(chat_tokenizer, found, k)[0][-11:] for k in range(len(found))] == [
        "b<|im_end|>", "f<|im_end|>",
    ]  # fmt: skip
    assert [message.text for message in found.conversations[1].messages] == ["e", "f"]


# Settings.


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"overflow": "cut"}, "--overflow is 'cut'"),
        ({"history": "x"}, "--history is 'x'"),
        ({"turns": "first"}, "--turns is 'first'"),
        ({"branch": "both"}, "--branch is 'both'"),
        ({"train_on": ("robot",)}, "--train_on is 'robot'"),
        ({"train_on": ()}, "--train_on is empty"),
        ({"chat_template": ""}, "--chat_template is empty"),
        ({"max_length": 1}, "--max_length is 1"),
        ({"date": "tomorrow"}, "--date is 'tomorrow'"),
    ],
)
def test_settings_are_checked(options: dict[str, Any], text: str) -> None:
    with pytest.raises(BadConfig, match=text):
        ChatConfig(**options)


def test_settings_survive_the_log() -> None:
    config = ChatConfig(train_on=("user", "assistant"), ignore=("id",), names={"bos_token": "<s>"})
    assert ChatConfig.from_json(json.loads(json.dumps(config.as_json()))) == config
    assert len(OVERFLOWS) == 5
