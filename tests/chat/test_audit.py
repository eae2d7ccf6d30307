"""An audit finds what is wrong with a template before anything is trained with it."""

import functools
import json
import re
from pathlib import Path

import pytest

from penstock import audit_template
from penstock.chat.audit import coloured, role_of_tokens
from penstock.chat.templates import PRESETS
from penstock.tokenize.tokenizer import Tokenizer

HEAD = "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}"
BODY = "{{- m.content }}{%- for c in m.tool_calls or [] %}{{- c.function | tojson }}{%- endfor %}"
TAIL = "{{- '<|im_end|>\n' }}{%- endfor %}"
PROMPT = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
LAST = "{%- if loop.last and m.role == 'assistant' %}!{%- endif %}"
TOOLS = "{%- if tools %}{{- tools | tojson }}{%- endif %}"


@functools.cache
def verdicts(template: str, tokenizer: Tokenizer) -> dict[str, tuple[str, str]]:
    found = audit_template(template, tokenizer)
    return {one.check: (one.verdict, one.seen) for one in found.findings}


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_fit(preset: str, chat_tokenizer: Tokenizer) -> None:
    audit = audit_template(preset, chat_tokenizer)
    assert audit.is_fit, [one for one in audit.findings if one.verdict == "bad"]
    assert len(audit.findings) == 13
    assert [name for name, _ in audit.samples] == ["two exchanges", "a call and its result",
                                                   "thoughts"]  # fmt: skip
    assert len(audit.samples[0][1]) == 1


@pytest.mark.parametrize(
    ("template", "check", "verdict", "seen"),
    [
        (TOOLS + HEAD + BODY + TAIL + PROMPT, "prefix property", "ok", "stay as they were"),
        (TOOLS + HEAD + BODY + LAST + TAIL + PROMPT,
         "prefix property", "note", "changes once others follow"),
        (HEAD + BODY + TAIL + "?{%- if add_generation_prompt %}x{%- endif %}", "prefix property",
         "note", "does not begin with the prompt"),
        (HEAD + BODY + "\n{%- endfor %}" + PROMPT, "stop token trained", "bad", "no_stop_token"),
        (HEAD + "{{- m.content }}" + TAIL + PROMPT, "tool calls printed", "bad", "refused"),
        (HEAD + BODY + TAIL + PROMPT, "tool calls printed", "bad", "the tools is not"),
        ("{%- if tools %}{{- raise_exception('no') }}{%- endif %}" + HEAD + BODY + TAIL + PROMPT,
         "tool calls printed", "note", "refused"),
        (TOOLS + HEAD + BODY + TAIL + PROMPT, "no None, no null", "note", "printed as None"),
        (TOOLS + HEAD + BODY + TAIL + PROMPT, "arguments encoded once", "note", "encoded twice"),
        ("{{- bos_token + bos_token }}" + HEAD + BODY + TAIL + PROMPT, "one BOS", "bad",
         "<|bos|> is printed 2 times"),
        ("{{- bos_token }}" + HEAD + BODY + TAIL + PROMPT, "one BOS", "ok", "once"),
        ("{{- strftime_now('%Y') }}" + HEAD + BODY + TAIL + PROMPT, "no clock", "note", "date"),
        (HEAD + BODY.replace("m.content", "m.content | trim") + TAIL + PROMPT, "content as it is",
         "note", "white space"),
        (HEAD + "{%- if m.reasoning_content and loop.last %}{{- m.reasoning_content }}{%- endif %}"
         + BODY + TAIL + PROMPT, "history", "note", "one sample for each turn"),
        (HEAD + BODY + TAIL + PROMPT, "history", "note", "does not print thoughts"),
        (HEAD + BODY + TAIL + PROMPT, "marks trained text", "note", "no generation blocks"),
        ("{{- '<|im_start|>' }}{{- messages[0].role }}<|im_end|>", "prints", "bad", "quetzal"),
        (HEAD + "{%- if m.role == 'assistant' %}{%- generation %}" + BODY
         + "{{- '<|im_end|>\n' }}{%- endgeneration %}{%- else %}{{- m.content + '<|im_end|>\n' }}"
         + "{%- endif %}{%- endfor %}" + PROMPT, "stop token trained", "ok", "<|im_end|> after"),
        ("{%- for m in messages %}{%- if m.role == 'assistant' %}{%- generation %}"
         + HEAD.partition("%}")[2] + BODY + "{{- '<|im_end|>\n' }}{%- endgeneration %}"
         + "{%- else %}{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
         + "{%- endif %}{%- endfor %}", "header not trained", "bad", "header_trained"),
    ],
)  # fmt: skip
def test_findings(
    template: str, check: str, verdict: str, seen: str, chat_tokenizer: Tokenizer
) -> None:
    found = verdicts(template, chat_tokenizer)[check]
    assert found[0] == verdict, found
    assert seen in found[1]


def test_a_tokenizer_that_adds_a_second_bos_is_told(chat_tokenizer: Tokenizer) -> None:
    content = json.loads(json.dumps(chat_tokenizer.content))
    number = chat_tokenizer.special_tokens["<|bos|>"]
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|bos|>", "type_id": 0}},
                   {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|bos|>": {"id": "<|bos|>", "ids": [number], "tokens": ["<|bos|>"]}},
    }  # fmt: skip
    found = verdicts("{{- bos_token }}" + HEAD + BODY + TAIL + PROMPT, Tokenizer.load(content))
    assert found["one BOS"][0] == "note"
    assert "second" in found["one BOS"][1]


def test_tool_text_that_is_trained_is_found(chat_tokenizer: Tokenizer) -> None:
    leaky = (
        "{%- for m in messages if m.role != 'tool' %}{{- '<|im_start|>' + m.role + '\n' }}"
        "{%- if m.role == 'assistant' %}{%- generation %}{{- m.content }}"
        "{%- for c in m.tool_calls or [] %}{{- c.function | tojson }}{%- endfor %}"
        "{%- for t in messages if t.role == 'tool' %}{{- t.content }}{%- endfor %}"
        "{{- '<|im_end|>' }}{%- endgeneration %}{%- else %}{{- m.content + '<|im_end|>' }}"
        "{%- endif %}{%- endfor %}" + PROMPT
    )
    assert verdicts(leaky, chat_tokenizer)["tool text not trained"][0] == "bad"


def test_colours_and_marks_show_what_is_trained(chat_tokenizer: Tokenizer) -> None:
    text = "<|im_start|>user\nhi<|im_end|>"
    ids = chat_tokenizer.encode(text, allowed_special={"<|im_start|>", "<|im_end|>"}).tolist()
    shown = coloured(chat_tokenizer, ids, [2, len(ids)], [1, 0], colours=False)
    assert shown.replace("«", "").replace("»", "") == text
    assert shown.endswith("»")
    colours = coloured(chat_tokenizer, ids, [2, len(ids)], [1, 0])
    assert "\x1b[1;32m" in colours
    assert re.sub("\x1b\\[[0-9;]*m", "", colours) == text
    evil = chat_tokenizer.encode("\x1b[2J").tolist()
    assert "\x1b[2J" not in coloured(chat_tokenizer, evil, [], [1, 0])
    assert role_of_tokens([], 2) == ["", ""]


def test_a_template_from_a_file(chat_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "t.jinja"
    file.write_text(TOOLS + HEAD + BODY + TAIL + PROMPT)
    assert audit_template(str(file), chat_folder).is_fit
