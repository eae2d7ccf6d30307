"""Presets give the same tokens and the same mask as their Jinja templates, ours and others'."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.chat.formats import Conversation, RowReader, Unfit
from penstock.chat.jinja import (
    JinjaTemplate,
    find_names,
    make_template,
    open_template,
    preset_jinja,
    resolve_template,
)
from penstock.chat.render import ChatConfig, Renderer, Samples
from penstock.chat.templates import PRESETS
from penstock.errors import BadConfig
from penstock.tokenize.tokenizer import Tokenizer

from .made import conversation, conversations

LONG = ChatConfig(max_length=1 << 16)
OPTIONS: dict[str, dict[str, Any]] = {
    "chatml": {"thoughts": True},
    "llama3": {"single": True},
    "gemma": {"tools": False},
    "plain": {"tools": False},
}
"""What of a conversation a preset has a place for, where that is not all."""


def rows_for(preset: str, seed: int, count: int, **more: Any) -> list[bytes]:
    rows = conversations(seed, count, **{**OPTIONS.get(preset, {}), **more})
    if preset == "nanochat":
        rows = [{"messages": row["messages"]} for row in rows]
    return [json.dumps(row).encode() for row in rows]


def read(rows: list[bytes]) -> list[Conversation]:
    reader = RowReader("messages")
    return [reader.read(row) for row in rows]


def rendered(tokenizer: Tokenizer, template: Any, found: list[Conversation]) -> Samples:
    renderer = Renderer(tokenizer, template, LONG)
    samples = renderer.render(found)
    renderer.close()
    return samples


@pytest.fixture(scope="module", params=["plain specials", "calls are special"])
def tokenizer(request: pytest.FixtureRequest, chat_tokenizer: Tokenizer) -> Iterator[Tokenizer]:
    """Tokenizers for which <tool_call> and the like are text, or tokens of their own."""
    from conftest import add_special

    if request.param == "plain specials":
        yield chat_tokenizer
        return
    names = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>",
             "</tools>", "<think>", "</think>")  # fmt: skip
    yield Tokenizer.load(add_special(chat_tokenizer.content, names))


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_their_jinja_templates(preset: str, tokenizer: Tokenizer) -> None:
    rows = rows_for(preset, 1, 40, nasty=True)
    composed = rendered(tokenizer, PRESETS[preset](tokenizer), read(rows))
    assert len(composed) >= 35, composed.refused
    text = preset_jinja(preset)
    blocks = rendered(tokenizer, JinjaTemplate(text, tokenizer), read(rows))
    for tag in ("{%- generation %}", "{%- endgeneration %}"):
        text = text.replace(tag, "{%- set nothing = 0 %}")
    prefixes = rendered(tokenizer, JinjaTemplate(text, tokenizer), read(rows))
    for other in (blocks, prefixes):
        assert {k: fault.reason for k, fault in other.refused.items()} == {
            k: fault.reason for k, fault in composed.refused.items()
        }
        assert other.tokens.equals(composed.tokens)
        assert other.loss_spans.equals(composed.loss_spans)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_what_transformers_makes_of_the_jinja(
    preset: str, chat_tokenizer: Tokenizer
) -> None:
    import tokenizers
    import transformers

    fast: Any = transformers.PreTrainedTokenizerFast
    rows = rows_for(preset, 2, 60)
    composed = rendered(chat_tokenizer, PRESETS[preset](chat_tokenizer), read(rows))
    assert not composed.refused
    names = find_names(chat_tokenizer)
    other = fast(
        tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(chat_tokenizer.content)), **names
    )
    masks = composed.masks()
    for k, row in enumerate(map(json.loads, rows)):
        for message in row["messages"]:
            message.setdefault("content", "")
        made = other.apply_chat_template(
            row["messages"], tools=row.get("tools"), chat_template=preset_jinja(preset),
            tokenize=True, return_dict=True, return_assistant_tokens_mask=True,
        )  # fmt: skip
        assert composed.tokens[k].as_py() == made["input_ids"]
        assert masks[k].tolist() == [bool(kept) for kept in made["assistant_masks"]]


def test_text_that_spells_control_tokens_is_text(tokenizer: Tokenizer) -> None:
    names = list(tokenizer.special_tokens)
    special = set(tokenizer.special_tokens.values())
    rng = random.Random(3)
    for preset, template in PRESETS.items():
        (plain,) = rows_for(preset, 5, 1)
        row = json.loads(plain)
        true = rendered(tokenizer, template(tokenizer), read([plain])).tokens[0].as_py()
        for message in row["messages"]:
            message["content"] = f"{message.get('content') or 'x'}{rng.choice(names)} y"
            if preset == "llama3" and message.get("tool_calls"):
                message["content"] = ""
        evil = json.dumps(row).encode()
        for one in (template(tokenizer), JinjaTemplate(preset_jinja(preset), tokenizer)):
            found = rendered(tokenizer, one, read([evil]))
            assert not found.refused, preset
            ids = found.tokens[0].as_py()
            assert [n for n in ids if n in special] == [n for n in true if n in special]
            text = tokenizer.decode(ids)
            for message in row["messages"]:
                said = message["content"].strip()
                assert said in text or json.dumps(said, ensure_ascii=False) in text


def test_a_row_is_the_same_alone_and_among_others(chat_tokenizer: Tokenizer) -> None:
    rows = rows_for("chatml", 4, 30)
    template = PRESETS["chatml"](chat_tokenizer)
    together = rendered(chat_tokenizer, template, read(rows))
    for k, row in enumerate(rows):
        alone = rendered(chat_tokenizer, template, read([row]))
        assert alone.tokens[0] == together.tokens[k]
        assert alone.loss_spans[0] == together.loss_spans[k]
        assert alone.turns[0] == together.turns[k]


# What a template has no place for.

CALLS = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": "", "tool_calls": [
        {"function": {"name": "f", "arguments": {}}}, {"function": {"name": "g", "arguments": {}}},
    ]},
]  # fmt: skip
THOUGHTS = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": "y", "reasoning_content": "z"},
]
TWICE = [
    {"role": "user", "content": "x"},
    {"role": "user", "content": "y"},
    {"role": "assistant", "content": "z"},
]
NO_USER = [{"role": "assistant", "content": "y"}]
TEXT_AND_CALL = [
    {"role": "user", "content": "x"},
    {"role": "assistant", "content": "y", "tool_calls": [{"function": {"name": "f"}}]},
]


@pytest.mark.parametrize(
    ("preset", "row", "reason", "field", "why"),
    [
        ("gemma", {"messages": CALLS}, "no_place", "messages[1]", "gemma has no place for calls"),
        ("plain", {"messages": CALLS}, "no_place", "messages[1]", "plain has no place for calls"),
        ("gemma", {"messages": TWICE}, "wrong_order", "messages[1].role", "assistant was to come"),
        ("nanochat", {"messages": TWICE}, "wrong_order", "messages[1].role", "take turns"),
        ("nanochat", {"messages": NO_USER}, "wrong_order", "messages[0].role", "user was to come"),
        ("nanochat", {"messages": [{"role": "system", "content": "s"}]}, "nothing_to_train", "",
         "no message"),
        ("nanochat", {"messages": [{"role": "system", "content": "s"}, *NO_USER]}, "wrong_order",
         "messages[1].role", "before the first of the user"),
        ("nanochat", {"messages": TWICE[1:], "tools": [{"name": "f"}]}, "no_place", "tools",
         "a list of tools"),
        ("llama3", {"messages": CALLS}, "no_place", "messages[1].tool_calls", "one call at a time"),
        ("llama3", {"messages": TEXT_AND_CALL}, "no_place", "messages[1].content", "beside a call"),
        ("llama3", {"messages": NO_USER, "tools": [{"name": "f"}]}, "wrong_order",
         "messages[0].role", "first message of the user"),
        ("mistral", {"messages": NO_USER, "tools": [{"name": "f"}]}, "wrong_order", "tools",
         "before a user"),
        ("gemma", {"messages": TWICE[1:], "tools": [{"name": "f"}]}, "no_place", "tools",
         "gemma has no place for tools"),
        *((name, {"messages": THOUGHTS}, "no_place", "messages[1].reasoning_content",
           f"{name} has no place for thoughts") for name in PRESETS if name != "chatml"),
    ],
)  # fmt: skip
def test_nothing_is_dropped_in_silence(
    preset: str, row: dict[str, Any], reason: str, field: str, why: str, chat_tokenizer: Tokenizer
) -> None:
    template = PRESETS[preset](chat_tokenizer)
    found = rendered(chat_tokenizer, template, read([json.dumps(row).encode()]))
    (fault,) = found.refused.values()
    assert (fault.reason, fault.field) == (reason, field)
    assert why in fault.why


def without(tokenizer: Tokenizer, *names: str) -> Tokenizer:
    content = tokenizer.content
    highest = max(content["model"]["vocab"].values())
    added = [token for token in content["added_tokens"] if token["content"] not in names]
    first = [token for token in added if token["id"] <= highest]
    more = [token for token in added if token["id"] > highest]
    more = [{**token, "id": highest + 1 + k} for k, token in enumerate(more)]
    return Tokenizer.load({**content, "added_tokens": [*first, *more]})


def test_a_tokenizer_must_have_the_control_tokens(chat_tokenizer: Tokenizer) -> None:
    with pytest.raises(BadConfig, match="the tokenizer has no special token <\\|im_end\\|>") as e:
        PRESETS["chatml"](without(chat_tokenizer, "<|im_end|>"))
    assert "chatml" in e.value.why
    assert "--special_tokens" in e.value.do
    few = without(chat_tokenizer, "[SYSTEM_PROMPT]", "[TOOL_CALLS]", "<|python_start|>",
                  "[TOOL_RESULTS]", "[AVAILABLE_TOOLS]")  # fmt: skip
    for preset, row, name in (
        (
            "mistral",
            [{"role": "system", "content": "s"}, *THOUGHTS[:1], *NO_USER],
            "[SYSTEM_PROMPT]",
        ),
        ("mistral", CALLS, "[TOOL_CALLS] and [ARGS]"),
        ("nanochat", CALLS, "<|python_start|>"),
    ):
        found = rendered(few, PRESETS[preset](few), read([json.dumps({"messages": row}).encode()]))
        (fault,) = found.refused.values()
        assert fault.reason == "no_place"
        assert name in fault.why


def test_plain_and_text_need_a_token_that_ends(chat_tokenizer: Tokenizer) -> None:
    from penstock.chat.templates import EOS

    endless = without(chat_tokenizer, *(set(EOS) - {"<|im_end|>"}))
    assert rendered(endless, PRESETS["chatml"](endless), [Conversation(text="x y")]).trained[0] > 0
    gemma = without(chat_tokenizer, *EOS)
    with pytest.raises(BadConfig, match="no token that ends a text"):
        PRESETS["plain"](gemma)
    for template in (PRESETS["gemma"](gemma), JinjaTemplate(preset_jinja("gemma"), gemma)):
        found = rendered(gemma, template, [Conversation(text="x y")])
        assert found.refused[0].reason == "no_stop_token"


# Templates of others.

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}"
)
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


def test_any_name_of_the_loop_will_do(chat_tokenizer: Tokenizer) -> None:
    rows = rows_for("chatml", 6, 10, tools=False, thoughts=False)
    composed = rendered(chat_tokenizer, PRESETS["chatml"](chat_tokenizer), read(rows))
    other = rendered(chat_tokenizer, JinjaTemplate(CHATML + PROMPT, chat_tokenizer), read(rows))
    assert other.tokens.equals(composed.tokens)
    assert other.loss_spans.equals(composed.loss_spans)


def one(tokenizer: Tokenizer, template: str, row: dict[str, Any] | None = None) -> Samples:
    row = row or {"messages": THOUGHTS[:1] + NO_USER}
    return rendered(tokenizer, JinjaTemplate(template, tokenizer), read([json.dumps(row).encode()]))


def test_blocks_may_take_in_the_newline_of_the_header_and_that_after_the_stop(
    chat_tokenizer: Tokenizer,
) -> None:
    wide = (
        "{%- for m in messages %}{{- '<|im_start|>' + m.role }}{%- if m.role == 'assistant' %}"
        "{%- generation %}{{- '\n' + m.content + '<|im_end|>\n' }}{%- endgeneration %}{%- else %}"
        "{{- '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}" + PROMPT
    )
    found, true = one(chat_tokenizer, wide), one(chat_tokenizer, CHATML + PROMPT)
    assert found.tokens.equals(true.tokens)
    assert found.loss_spans.equals(true.loss_spans)


def test_a_block_without_the_stop_token_gets_it(chat_tokenizer: Tokenizer) -> None:
    narrow = (
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}{%- if m.role == 'assistant' "
        "%}{%- generation %}{{- m.content }}{%- endgeneration %}{%- else %}{{- m.content }}"
        "{%- endif %}{{- '<|im_end|>\n' }}{%- endfor %}" + PROMPT
    )
    found, true = one(chat_tokenizer, narrow), one(chat_tokenizer, CHATML + PROMPT)
    assert found.loss_spans.equals(true.loss_spans)


def test_a_header_is_never_trained(chat_tokenizer: Tokenizer) -> None:
    """A block may hold the whole header; where no prompt says what that is, rows are refused."""
    header = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
        "{{ '<|im_start|>assistant\n' + m.content + '<|im_end|>\n' }}{% endgeneration %}{% else %}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    )
    found, true = one(chat_tokenizer, header + PROMPT), one(chat_tokenizer, CHATML + PROMPT)
    assert found.tokens.equals(true.tokens)
    assert found.loss_spans.equals(true.loss_spans)
    for template in (header, CHATML):
        fault = one(chat_tokenizer, template).refused[0]
        assert fault.reason == "header_trained"
        assert "so '<|im_start|>assistant' would be trained" in fault.why
    bare = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"  # as Mistral: no header
    assert not one(chat_tokenizer, bare).refused


GENERATION = "{%- generation %}{{- m.content + '<|im_end|>' }}{%- endgeneration %}"


@pytest.mark.parametrize(
    ("template", "reason", "why"),
    [
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "no_stop_token",
         "no control token ends 'y\\n'"),
        ("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
         "{% if add_generation_prompt %}!{% endif %}", "no_prefix", "prints for the prompt"),
        ("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
         "<|im_end|>", "lost_content", "does not print it"),
        ("{% for m in messages %}" + GENERATION + "{% endfor %}", "other_blocks",
         "2 generation blocks for 1 turns"),
        ("{% for m in messages %}{% generation %}{% generation %}{{ m.content }}"
         "{% endgeneration %}{% endgeneration %}{% endfor %}", "other_blocks", "is in another"),
        ("{% for m in messages if m.role == 'assistant' %}" + GENERATION + "{% endfor %}",
         "lost_content", "does not print it"),
        ("{{ raise_exception('never') }}", "template_refused", "never"),
        ("{{ messages.nothing.more }}", "template_refused", "UndefinedError"),
        ("{{ strftime_now('%Y') }}", "template_refused", "'strftime_now' is undefined"),
        ("{{ bos_token }}<|bos|>" + CHATML + PROMPT, "two_bos", "it prints <|bos|> twice"),
    ],
)  # fmt: skip
def test_templates_that_are_not_fit(
    template: str, reason: str, why: str, chat_tokenizer: Tokenizer
) -> None:
    (fault,) = one(chat_tokenizer, template).refused.values()
    assert fault.reason == reason
    assert why in fault.why


def test_what_a_template_drops_of_a_turn_is_found(chat_tokenizer: Tokenizer) -> None:
    for messages, reason in ((CALLS, "lost_tool_calls"), (THOUGHTS, "lost_reasoning_content")):
        found = one(chat_tokenizer, CHATML + PROMPT, {"messages": messages})
        assert found.refused[0].reason == reason
    blocks = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}" + GENERATION
    )
    found = one(chat_tokenizer, blocks + "{% endif %}{% endfor %}", {"messages": CALLS})
    assert found.refused[0].reason == "lost_tool_calls"


def test_arguments_and_tools_that_a_template_drops_are_found(chat_tokenizer: Tokenizer) -> None:
    calls = CHATML.replace(
        "m.content +", "m.content + (m.tool_calls or []) | map(attribute='function') | X +"
    )
    named = calls.replace("X", "map(attribute='name') | join")
    whole = calls.replace("X", "list | tojson")
    ascii = calls.replace("X", "list | tojson(ensure_ascii=True)")
    given = {"word": "zymurgy", "where": ["Köln", {"deep": 'a "quote"\n'}], "n": 3}
    call = {"function": {"name": "look_up", "arguments": given}}
    row: dict[str, Any] = {
        "messages": [*THOUGHTS[:1], {"role": "assistant", "content": "", "tool_calls": [call]}]
    }
    found = one(chat_tokenizer, named + PROMPT, row)
    assert (found.refused[0].reason, found.refused[0].field) == (
        "lost_tool_calls",
        "messages[1].tool_calls",
    )
    for template in (whole, ascii):
        assert not one(chat_tokenizer, template + PROMPT, row).refused
    row["tools"] = [{"type": "function", "function": {"name": "look_up"}}, {"name": "count"}]
    found = one(chat_tokenizer, whole + PROMPT, row)
    assert (found.refused[0].reason, found.refused[0].field) == ("lost_tools", "tools[1]")
    assert not one(chat_tokenizer, "{{ tools | tojson }}" + whole + PROMPT, row).refused


CALLED = CHATML.replace(
    "m.content +",
    "m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }} X{% endfor %}{{",
)


def test_numbers_that_a_template_drops_are_found(chat_tokenizer: Tokenizer) -> None:
    texts = "{% for k, v in c.function.arguments | items if v is string %}{{ v }}{% endfor %}"
    every = "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }} {% endfor %}"
    for given in ({"n": 8191}, {"n": [{"m": -0.25}]}, {"n": 1e21}, {"n": 10**25}):
        row = called("", given)
        found = one(chat_tokenizer, CALLED.replace("X", texts) + PROMPT, row)
        assert found.refused[0].reason == "lost_tool_calls"
        assert not one(chat_tokenizer, CALLED.replace("X", every) + PROMPT, row).refused


def test_arguments_are_not_trained_as_python_writes_them(chat_tokenizer: Tokenizer) -> None:
    """As a template prints them that was made for arguments given as text."""
    cases: tuple[Any, ...] = ({"n": None}, '{"word": "zymurgy"}')
    for given in cases:
        row = called("", given)
        found = one(chat_tokenizer, CALLED.replace("X", "{{ c.function.arguments }}") + PROMPT, row)
        assert found.refused[0].reason == "arguments_not_json"
        assert "as Python writes them" in found.refused[0].why
    for arguments in ({"word": "zymurgy"}, {}):
        as_json = CALLED.replace("X", "{{ c.function.arguments | tojson }}")
        assert not one(chat_tokenizer, as_json + PROMPT, called("", arguments)).refused


def test_what_a_template_drops_of_turns_that_are_not_trained_is_found(
    chat_tokenizer: Tokenizer,
) -> None:
    deaf = CHATML.replace("m.content +", "('' if m.tool_calls else m.content) +")
    after = [{"role": "tool", "content": "5"}, {"role": "assistant", "content": "done"}]
    for template, content, reason in (
        (CHATML, "", "lost_tool_calls"),
        (CALLED.replace("X", "{{ c.function.arguments | tojson }}"), "", ""),
        (CALLED.replace("X", "{{ c.function.arguments }}"), "", "arguments_not_json"),
        ("{{ messages[1].tool_calls | tojson }}" + deaf, "beside it", "lost_content"),
        (CALLED.replace("X", "{{ c.function.arguments | tojson }}"), "<think>z</think>a", ""),
        (CALLED.replace("X", "{{ c.function.arguments | tojson }}").replace(
            "m.content }", "m.content.split('</think>')[-1] }"), "<think>z</think>a", ""),
    ):  # fmt: skip
        row = called(content, {"word": "zymurgy"})
        row["messages"][1]["train"] = False
        row["messages"] += after
        found = one(chat_tokenizer, template + PROMPT, row)
        assert [fault.reason for fault in found.refused.values()] == [reason] * bool(reason)


def called(content: str, arguments: Any) -> dict[str, Any]:
    call = {"function": {"name": "look_up", "arguments": arguments}}
    said = {"role": "assistant", "content": content, "tool_calls": [call]}
    return {"messages": [*THOUGHTS[:1], said]}


def test_templates_that_take_control_text_apart_are_found(chat_tokenizer: Tokenizer) -> None:
    """What is hidden in a text must not show: not in its length, nor in its escapes."""
    row = {"messages": [{"role": "user", "content": "what is <|im_end|> for?"}, *NO_USER]}
    for template in (
        CHATML.replace("m.content", "(m.content | tojson(ensure_ascii=True))"),
        CHATML.replace("m.content", "m.content + (m.content | length | string)"),
        CHATML.replace("m.content", "m.content.split('<|im_end|>') | join('')"),
    ):
        found = one(chat_tokenizer, template + PROMPT, row)
        assert found.refused[0].reason == "control_text_changed"
    assert not one(chat_tokenizer, CHATML + PROMPT, row).refused


MEETING = (
    "{% for m in messages %}{% if m.role == 'user' %}{% if loop.first %}<|im_start|>user\n<"
    "{% endif %}{{ m.content | trim }}{% if loop.last or loop.nextitem.role != 'user' %}<|im_end|>"
    "\n{% endif %}{% else %}<|im_start|>assistant\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}({% for k, v in c.function.arguments | items %}<{{ k }}{{ v }}"
    "{% endfor %}){% endfor %}<|im_end|>\n{% endif %}{% endfor %}" + PROMPT
)
"""Contents of several users end to end, behind a text of the template's own; arguments too."""


@pytest.mark.parametrize(
    "texts",
    [
        ("a <|im_", "end|> b"),
        ("a <|im_end|", "> b"),
        ("a <", "|im_end|> b"),
        ("a <|", "im", "_end|>"),
        ("|im_end|> a",),
        ("  |im_end|>",),
        ("a <|im_  ", " \n end|> b"),
        ("|im", "_end|>"),
        ("|im_end", "|>"),
        ("x <html", "> quoted"),
        ("|", "im_", "end", "|", "> and <|im_end|> whole"),
    ],
)
def test_texts_that_meet_are_no_control_token(
    chat_tokenizer: Tokenizer, texts: tuple[str, ...]
) -> None:
    """A control token is one that the template prints alone, whatever stands end to end."""
    special = {*chat_tokenizer.special_tokens.values()}
    asked = [{"role": "user", "content": text} for text in texts]
    said = {"role": "assistant", "content": "y"}
    arguments = {texts[0]: "".join(texts[1:])}
    call = {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
    }
    for row in ({"messages": [*asked, said]}, {"messages": [{**asked[0], "content": "x"}, call]}):
        found = one(chat_tokenizer, MEETING, row)
        assert not found.refused, found.refused
        ids = found.tokens[0].values.to_numpy()
        assert np.isin(ids, [*special]).sum() == 4, "two turns, each begun and ended"
        told = chat_tokenizer.decode(ids)
        for text in texts:
            assert text.strip() in told


def test_words_that_are_parts_of_control_tokens_are_left_alone(chat_tokenizer: Tokenizer) -> None:
    """A template may ask for roles, types and names; contents are what nobody compares."""
    from conftest import add_special

    names = ("<|user|>", "<|assistant|>", "<|function|>", "<|string|>", "<|f|>")
    tokenizer = Tokenizer.load(add_special(chat_tokenizer.content, names))
    template = (
        "{% for t in tools or [] if t.type == 'function' %}{% for k, v in "
        "t.function.parameters.properties | items if v.type == 'string' %}{{ k }}:{% endfor %}"
        "{{ t.function.name }}{% endfor %}{% for m in messages %}"
        "{{ '<|' + m.role + '|>' + m.content }}{% for c in m.tool_calls or [] "
        "if c.function.name == 'f' %}f({{ c.function.arguments.string }}){% endfor %}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    calls = [{"function": {"name": "f", "arguments": {"string": "user"}}}]
    row = {
        "messages": [
            {"role": "user", "content": "user"},
            {"role": "assistant", "content": "", "tool_calls": calls},
        ],
        "tools": [
            {"type": "function", "function": {
                "name": "f", "parameters": {"properties": {"string": {"type": "string"}}}}}
        ],
    }  # fmt: skip
    found = one(tokenizer, template, row)
    assert not found.refused, found.refused
    special = {*tokenizer.special_tokens.values()}
    text = tokenizer.decode(found.tokens[0].values.to_numpy())
    assert text == "string:f<|user|>user<|im_end|><|assistant|>f(user)<|im_end|>"
    assert np.isin(found.tokens[0].values.to_numpy(), [*special]).sum() == 4


def test_control_text_that_cannot_be_hidden_is_refused(chat_tokenizer: Tokenizer) -> None:
    """A token of one character, and one that is the end of another."""
    from conftest import add_special

    content = add_special(chat_tokenizer.content, ["~", "|im_end|>"])
    short = Tokenizer.load(content, engine="tokenizers")
    for text in ("a ~ b", "a <|im_end|> b"):
        row = {"messages": [{"role": "user", "content": text}, *NO_USER]}
        assert one(short, CHATML + PROMPT, row).refused[0].reason == "control_text"
        assert not rendered(
            short, PRESETS["chatml"](short), read([json.dumps(row).encode()])
        ).refused, "a preset has no need to hide it"


def test_a_block_with_the_text_of_a_tool_is_refused(chat_tokenizer: Tokenizer) -> None:
    leaky = (
        "{%- for m in messages if m.role != 'tool' %}{{- '<|im_start|>' + m.role + '\n' }}"
        "{%- if m.role == 'assistant' %}{%- generation %}{{- m.content }}{%- for c in m.tool_calls "
        "%}{{- c.function.name }}{%- endfor %}{%- for t in messages if t.role == 'tool' %}"
        "{{- t.content }}{%- endfor %}{{- '<|im_end|>' }}{%- endgeneration %}{%- else %}"
        "{{- m.content + '<|im_end|>' }}{%- endif %}{%- endfor %}"
    )
    row = {
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]},
            {"role": "tool", "content": "a result that is long enough to be no chance"},
            {"role": "assistant", "content": "done"},
        ]
    }
    assert one(chat_tokenizer, leaky, row).refused[0].reason == "tool_text_trained"


def test_dates_are_told_and_never_asked_of_the_clock(chat_tokenizer: Tokenizer) -> None:
    template = "{{ strftime_now('%d %B') }}" + CHATML + PROMPT
    row = read([json.dumps({"messages": THOUGHTS[:1] + NO_USER}).encode()])
    given = JinjaTemplate(template, chat_tokenizer, date="2026-01-31")
    found = rendered(chat_tokenizer, given, row)
    assert chat_tokenizer.decode(found.tokens[0].as_py()).startswith("31 January")


def test_reserved_characters_are_refused(chat_tokenizer: Tokenizer) -> None:
    row = {"messages": [{"role": "user", "content": "\ufdd0"}, *NO_USER]}
    assert one(chat_tokenizer, CHATML + PROMPT, row).refused[0].reason == "reserved_character"


# Where templates come from.


def test_templates_by_name_text_file_and_beside_the_tokenizer(
    chat_folder: Path, chat_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((chat_folder / "tokenizer.json").read_bytes())
    file = tmp_path / "x.jinja"
    file.write_text(CHATML)
    assert open_template("qwen", chat_tokenizer).name == "qwen"
    for given in (CHATML, str(file)):
        found = open_template(given, chat_tokenizer)
        assert isinstance(found, JinjaTemplate)
        assert found.text == CHATML
    with pytest.raises(BadConfig, match="no chat template beside the tokenizer"):
        open_template("tokenizer", chat_tokenizer, folder)
    config: dict[str, Any] = {
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "chat_template": CHATML,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    found = open_template("tokenizer", chat_tokenizer, folder)
    assert isinstance(found, JinjaTemplate)
    assert (found.text, found.names["bos_token"], found.names["eos_token"]) == (
        CHATML,
        "<s>",
        "</s>",
    )
    config["chat_template"] = [{"name": "default", "template": PROMPT}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    chosen = resolve_template(
        ChatConfig(chat_template="tokenizer"), chat_tokenizer, folder / "tokenizer.json"
    )
    assert chosen.chat_template == PROMPT
    same = make_template(ChatConfig.from_json(chosen.as_json()), chat_tokenizer)
    assert same.settings() == make_template(chosen, chat_tokenizer).settings()
    (folder / "chat_template.jinja").write_text(CHATML)
    found = open_template("tokenizer", chat_tokenizer, folder)
    assert isinstance(found, JinjaTemplate)
    assert found.text == CHATML
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(BadConfig, match=r"tokenizer_config\.json is not JSON"):
        open_template("tokenizer", chat_tokenizer, folder)
    with pytest.raises(BadConfig, match="there is no chat template 'chatm'") as error:
        open_template("chatm", chat_tokenizer)
    assert "did you mean chatml" in error.value.do
    for given, why in (("x" * 5000, "File name too long"), (str(tmp_path / "b"), "codec")):
        (tmp_path / "b").write_bytes(b"\xff\xfe")
        with pytest.raises(BadConfig, match="cannot be read") as error:
            open_template(given, chat_tokenizer)
        assert why in error.value.why
        assert "name a Jinja file" in error.value.do
    with pytest.raises(BadConfig, match="there is no preset 'chatm'"):
        preset_jinja("chatm")


def test_chance_has_no_part_in_a_template(chat_tokenizer: Tokenizer) -> None:
    with pytest.raises(BadConfig, match="the chat template cannot be used") as error:
        one(chat_tokenizer, "{{ range(9) | random }}" + CHATML + PROMPT)
    assert "No filter named 'random'" in error.value.why
    fault = one(chat_tokenizer, "{{ lipsum() }}" + CHATML + PROMPT).refused[0]
    assert "'lipsum' is undefined" in fault.why


def test_a_broken_template_is_refused_at_once(chat_tokenizer: Tokenizer) -> None:
    with pytest.raises(BadConfig, match="the chat template cannot be used") as error:
        one(chat_tokenizer, "{% for %}")
    assert "TemplateSyntaxError" in error.value.why


def test_tokenizers_that_encode_text_otherwise_after_a_token_are_refused(
    chat_tokenizer: Tokenizer,
) -> None:
    content = chat_tokenizer.content
    added = [
        {**token, "rstrip": True} if token["content"] == "<|im_end|>" else token
        for token in content["added_tokens"]
    ]
    eager = Tokenizer.load({**content, "added_tokens": added}, engine="tokenizers")
    with pytest.raises(BadConfig, match="encodes text after a control token otherwise") as e:
        Renderer(eager, PRESETS["chatml"](eager), LONG)
    assert "in the whole text" in e.value.why


def test_masks_are_within_what_the_assistant_says(chat_tokenizer: Tokenizer) -> None:
    """By text, not by the code that made them."""
    special = set(chat_tokenizer.special_tokens.values())
    rng = random.Random(9)
    for _ in range(50):
        row = conversation(rng)
        template = PRESETS["chatml"](chat_tokenizer)
        found = rendered(chat_tokenizer, template, read([json.dumps(row).encode()]))
        ids, mask = np.array(found.tokens[0].as_py()), found.masks()[0]
        said = chat_tokenizer.decode(ids[mask])
        for message in row["messages"]:
            if message["role"] == "assistant":
                assert (message["content"] or "") in said
        texts = [part for part in said.split("<|im_end|>") if part]
        turns = [m for m in row["messages"] if m["role"] == "assistant"]
        assert len(texts) == len(turns)
        for text, message in zip(texts, turns, strict=True):
            assert text.startswith(message["content"] or "<tool_call>")
            assert text.count("<tool_call>") >= len(message.get("tool_calls") or [])
        ends = np.flatnonzero(mask & ~np.append(mask[1:], False))
        assert all(int(ids[at]) in special for at in ends)
    assert isinstance(found, Samples)
    assert not any(isinstance(fault, Unfit) for fault in found.refused.values())
