"""Six formats become one kind of conversation; every other row is refused by its field."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.arrays import offsets_of
from penstock.chat.formats import (
    MAX_CONTENT,
    Conversation,
    RowReader,
    Unfit,
    find_format,
    sniff_format,
)
from penstock.errors import BadConfig, BadInput


class Written(list[tuple[str, Any]]):
    """An object of JSON, with all of its keys."""


HI = {"role": "user", "content": "hi"}
HO = {"role": "assistant", "content": "ho"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


def read(row: Any, format: str = "messages", **options: Any) -> Conversation:
    data = row if isinstance(row, bytes) else json.dumps(row).encode()
    return RowReader(format, **options).read(data)


def said(conversation: Conversation) -> list[tuple[str, str]]:
    return [(message.role, message.text) for message in conversation.messages]


def refused(row: Any, format: str = "messages", **options: Any) -> tuple[str, str, str]:
    with pytest.raises(Unfit) as error:
        read(row, format, **options)
    assert str(error.value)
    return error.value.reason, error.value.field, error.value.why


# What each format becomes.


@pytest.mark.parametrize(
    ("row", "format"),
    [
        ({"messages": [HI, HO]}, "messages"),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
         "sharegpt"),
        ({"conversations": [HI, HO]}, "sharegpt"),
        ({"instruction": "hi", "input": "", "output": "ho"}, "alpaca"),
        ({"prompt": "hi", "completion": "ho"}, "prompt_completion"),
        ({"prompt": [HI], "completion": [HO]}, "prompt_completion"),
        ({"chosen": [HI, HO], "rejected": [HI, {"role": "assistant", "content": "no"}]},
         "preference"),
        ({"prompt": "hi", "chosen": "ho", "rejected": "no"}, "preference"),
        ({"prompt": [HI], "chosen": [HI, HO], "rejected": [HI]}, "preference"),
    ],
)  # fmt: skip
def test_formats_say_the_same(row: dict[str, Any], format: str) -> None:
    assert sniff_format(row) == format
    assert find_format(json.dumps(row).encode(), "here") == format
    found = read(row, format)
    assert said(found) == [("user", "hi"), ("assistant", "ho")]
    again = read(found.as_json())
    assert again == found, "what is stored is a row of the format messages"


def test_alpaca_with_input_system_and_history() -> None:
    row = {"instruction": "add", "input": "1 2", "output": "3", "system": "be brief",
           "history": [["hi", "ho"]]}  # fmt: skip
    assert said(read(row, "alpaca")) == [
        ("system", "be brief"), ("user", "hi"), ("assistant", "ho"), ("user", "add\n\n1 2"),
        ("assistant", "3"),
    ]  # fmt: skip


def test_text_is_a_conversation_that_nobody_says() -> None:
    found = read({"text": "once upon"}, "text")
    assert found.text == "once upon"
    assert read(found.as_json(), "text") == found


def test_the_other_branch_of_a_pair() -> None:
    row = {"prompt": "hi", "chosen": "ho", "rejected": "no"}
    assert said(read(row, "preference", branch="rejected"))[1] == ("assistant", "no")


def test_what_the_assistant_says_in_a_prompt_is_not_trained() -> None:
    found = read({"prompt": [HI, HO, HI], "completion": [HO]}, "prompt_completion")
    assert [message.train for message in found.messages] == [None, False, None, None]
    row = {"prompt": [HI, HO, HI], "chosen": [HI, HO, HI, HO], "rejected": []}
    found = read(row, "preference")
    assert [message.train for message in found.messages] == [None, False, None, None]


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}', '{ "a" : 1 }'])
@pytest.mark.parametrize("flat", [False, True])
def test_calls_become_objects_however_they_are_written(arguments: Any, flat: bool) -> None:
    function = {"name": "f", "arguments": arguments}
    call = {"id": "c1", **function} if flat else {**CALL, "function": function}
    row = {"messages": [HI, {"role": "assistant", "content": None, "tool_calls": [call]}]}
    found = read(row).messages[1]
    assert (found.text, found.calls) == ("", [("f", {"a": 1}, "c1")])


def test_order_and_types_of_arguments_stay() -> None:
    arguments = {"z": 1.0, "a": [None, True, 10**20], "m": {"y": "é", "b": 1e21}}
    call = {"function": {"name": "f", "arguments": json.dumps(arguments)}}
    row = {"messages": [HI, {"role": "assistant", "tool_calls": [call]}]}
    assert json.dumps(read(row).messages[1].calls[0][1]) == json.dumps(arguments)


def test_content_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert said(read({"messages": [{"role": "user", "content": parts}, HO]}))[0] == ("user", "ab")


def test_parts_of_python_become_calls_and_results() -> None:
    parts = [
        {"type": "text", "text": "I count. "}, {"type": "python", "text": "1+1"},
        {"type": "python_output", "text": "2"}, {"type": "text", "text": "Two."},
    ]  # fmt: skip
    found = read({"messages": [HI, {"role": "assistant", "content": parts}]})
    assert said(found)[1:] == [("assistant", "I count. "), ("tool", "2"), ("assistant", "Two.")]
    assert found.messages[1].calls == [("python", {"code": "1+1"}, "")]
    turn = {"role": "assistant", "content": parts[:2], "thinking": "hm", "weight": 0}
    found = read({"messages": [HI, turn, {"role": "tool", "content": "2"}, HO]})
    assert said(found)[2:] == [("tool", "2"), ("assistant", "ho")]
    assert (found.messages[1].reasoning_content, found.messages[1].train) == ("hm", False)


def test_calls_and_results_of_sharegpt() -> None:
    turns = [
        {"from": "human", "value": "hi"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "7"},
        {"from": "gpt", "value": "seven"},
    ]
    found = read({"conversations": turns, "tools": json.dumps([{"name": "f"}])}, "sharegpt")
    assert [role for role, _ in said(found)] == ["user", "assistant", "tool", "assistant"]
    assert found.messages[1].calls[0][:2] == ("f", {"a": 1})
    assert found.tools == [{"name": "f"}]


def test_older_names_are_understood() -> None:
    row = {
        "messages": [
            {"role": "developer", "content": "s"}, HI,
            {"role": "assistant", "content": None, "refusal": None, "audio": None, "id": "x",
             "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "function", "name": "f", "content": "7"},
            {"role": "assistant", "content": "seven", "thinking": "hm", "annotations": []},
        ]
    }  # fmt: skip
    found = read(row)
    assert [role for role, _ in said(found)] == ["system", "user", "assistant", "tool", "assistant"]
    assert found.messages[2].calls == [("f", {}, "")]
    assert found.messages[4].reasoning_content == "hm"


@pytest.mark.parametrize(("weight", "train"), [(0, False), (1, True), (1.0, True)])
def test_weights_are_zero_or_one(weight: float, train: bool) -> None:
    assert read({"messages": [HI, {**HO, "weight": weight}]}).messages[1].train is train


def test_fields_can_be_ignored() -> None:
    row = {"messages": [HI, {**HO, "score": 3}]}
    assert refused(row)[0] == "unknown_field"
    assert said(read(row, ignore=("score",)))[1] == ("assistant", "ho")
    assert said(read({"messages": [HI, {**HO, "score": None}]}))[1] == ("assistant", "ho")


def test_known_fields_can_be_ignored_too() -> None:
    row = {"messages": [HI, {**HO, "weight": 0.5, "thinking": "hm"}]}
    found = read(row, ignore=("weight", "thinking")).messages[1]
    assert (found.text, found.train, found.reasoning_content) == ("ho", None, None)


# What stands beside the messages of a row.


@pytest.mark.parametrize(
    ("row", "format"),
    [
        ({"messages": [HI, HO]}, "messages"),
        ({"conversations": [HI, HO]}, "sharegpt"),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
         "sharegpt"),
        ({"instruction": "hi", "output": "ho"}, "alpaca"),
        ({"prompt": "hi", "completion": "ho"}, "prompt_completion"),
        ({"chosen": [HI, HO], "rejected": []}, "preference"),
    ],
)  # fmt: skip
def test_a_system_and_functions_beside_the_messages_are_not_lost(
    row: dict[str, Any], format: str
) -> None:
    found = read({**row, "system": "be brief", "functions": [{"name": "f"}], "score": 3}, format)
    assert said(found) == [("system", "be brief"), ("user", "hi"), ("assistant", "ho")]
    assert found.tools == [{"type": "function", "function": {"name": "f"}}]
    assert read({**row, "tools": [{"name": "g"}]}, format).tools == [{"name": "g"}]


def test_a_call_of_sharegpt_keeps_its_weight() -> None:
    call = {"from": "function_call", "value": '{"name": "f", "arguments": {}}'}
    turns = [{"from": "human", "value": "hi"}, {**call, "weight": 0}, {**call, "train": False},
             call]  # fmt: skip
    found = read({"conversations": turns}, "sharegpt")
    assert [message.train for message in found.messages] == [None, False, False, None]


def test_a_format_that_was_asked_for_is_held_to() -> None:
    """Some rows have the fields of several formats."""
    row = {"messages": [HI], "chosen": [HI, {**HO, "odd": None}], "rejected": []}
    assert said(read(row, "preference"))[1] == ("assistant", "ho")


# Bad rows.

TWO = {"role": "system", "content": "s"}
BAD: dict[str, tuple[Any, str, str, str]] = {
    "not json": (b'{"messages": [', "invalid_json", "", "Expecting value"),
    "not utf-8": (b'{"messages": [{"role": "user", "content": "\xff"}]}', "invalid_utf8", "",
                  "invalid start byte"),
    "half a pair": (rb'{"messages": [{"role": "user", "content": "\ud800"}]}', "lone_surrogate",
                    "messages[0].content", "half of a surrogate pair"),
    "half a pair in a key": (rb'{"messages": [{"role": "user", "\ud800": 1}]}', "lone_surrogate",
                             "messages[0]", "half of a surrogate pair"),
    "a list": ([], "not_an_object", "", "a list, not an object"),
    "other format": ({"text": "x"}, "other_format", "", "of format text; the first row was of"),
    "no format": ({"body": "x"}, "other_format", "", "it has body"),
    "empty": ({"messages": []}, "no_messages", "messages", "there are none"),
    "unknown role": ({"messages": [{"role": "robot", "content": "x"}]}, "unknown_role",
                     "messages[0].role", "'robot'"),
    "two systems": ({"messages": [TWO, TWO, HI]}, "two_systems", "messages[1].role", "one system"),
    "late system": ({"messages": [HI, TWO]}, "system_not_first", "messages[1].role", "its first"),
    "result without call": ({"messages": [HI, {"role": "tool", "content": "7"}]},
                            "result_without_call", "messages[1]", "no call waits"),
    "too many results": (
        {"messages": [HI, {"role": "assistant", "tool_calls": [CALL]},
                      {"role": "tool", "content": "7", "tool_call_id": "c1"},
                      {"role": "tool", "content": "8"}]},
        "result_without_call", "messages[3]", "no call waits"),
    "other id": (
        {"messages": [HI, {"role": "assistant", "tool_calls": [CALL]},
                      {"role": "tool", "content": "7", "tool_call_id": "c2"}]},
        "result_without_call", "messages[2].tool_call_id", "'c2' is not among the calls ['c1']"),
    "silent assistant": ({"messages": [HI, {"role": "assistant", "content": None}]},
                         "empty_assistant", "messages[1].content", "says nothing"),
    "content is a number": ({"messages": [{"role": "user", "content": 7}]}, "wrong_type",
                            "messages[0].content", "got int"),
    "messages are an object": ({"messages": {}}, "wrong_type", "messages", "got object"),
    "role is missing": ({"messages": [{"content": "x"}]}, "wrong_type", "messages[0]", "role"),
    "unknown field": ({"messages": [{**HI, "contents": "x"}]}, "unknown_field", "messages[0]",
                      "contents"),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
                 "unknown_part", "messages[0].content[0]", "'image_url' is not a text"),
    "arguments are no json": (
        {"messages": [HI, {"role": "assistant", "tool_calls": [
            {"function": {"name": "f", "arguments": "{a: 1}"}}]}]},
        "arguments_not_json", "messages[1].tool_calls[0].function.arguments", "malformed"),
    "arguments are a list": (
        {"messages": [HI, {"role": "assistant", "tool_calls": [
            {"function": {"name": "f", "arguments": "[1]"}}]}]},
        "arguments_not_json", "messages[1].tool_calls[0].function.arguments", "not an object"),
    "nobody is called": ({"messages": [HI, {"role": "assistant", "tool_calls": [{"id": "x"}]}]},
                         "wrong_type", "messages[1].tool_calls[0]", "does not say what"),
    "a user calls": ({"messages": [{**HI, "tool_calls": [CALL]}]}, "unknown_field", "messages[0]",
                     "makes no calls"),
    "half a weight": ({"messages": [HI, {**HO, "weight": 0.5}]}, "bad_weight",
                      "messages[1].weight", "choose 0 or 1"),
    "two minds": ({"messages": [HI, {**HO, "weight": 0, "train": True}]}, "bad_weight",
                  "messages[1].weight", "train says True"),
    "tools are no list": ({"messages": [HI, HO], "tools": "x"}, "wrong_type", "tools", "malformed"),
    "10 MB": ({"messages": [HI, {**HO, "content": "x" * 10_000_000}]}, "content_too_long",
              "messages[1].content", f"10,000,000 characters, {MAX_CONTENT:,}"),
    "10 MB of thoughts": ({"messages": [HI, {**HO, "thinking": "x" * 10_000_000}]},
                          "content_too_long", "messages[1].reasoning_content", "10,000,000"),
    "too deep": (b'{"messages": ' + b"[" * 100_000, "nested_too_deep", "", "too deeply"),
    "not a number": (
        b'{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": '
        b'[{"function": {"name": "f", "arguments": {"a": NaN}}}]}]}',
        "invalid_json", "", "NaN is no JSON"),
    "a number out of range": (
        b'{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": '
        b'[{"function": {"name": "f", "arguments": {"a": 1e999}}}]}]}',
        "invalid_json", "", "1e999 is out of range"),
    "a name that ends itself": (
        {"messages": [HI, {"role": "assistant", "tool_calls": [
            {"function": {"name": 'f", "arguments": {}}'}}]}]},
        "bad_name", "messages[1].tool_calls[0].function.name", "quotes"),
    "no name": (
        {"messages": [HI, {"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}]},
        "bad_name", "messages[1].tool_calls[0].function.name", "''"),
    "a name of two lines": (
        {"messages": [HI, {"role": "assistant", "tool_calls": [{"name": "a\nb"}]}]},
        "bad_name", "messages[1].tool_calls[0].function.name", "cannot be printed"),
    "called twice": (
        {"messages": [HI, {"role": "assistant", "tool_calls": [{**CALL, "name": "g"}]}]},
        "two_calls", "messages[1].tool_calls[0]", "twice"),
    "two ways to call": (
        {"messages": [HI, {"role": "assistant", "tool_calls": [CALL],
                           "function_call": {"name": "f"}}]},
        "two_calls", "messages[1].function_call", "tool_calls are there too"),
    "two thoughts": ({"messages": [HI, {**HO, "thinking": "a", "reasoning": "b"}]},
                     "two_thoughts", "messages[1].reasoning_content", "differ"),
    "a user thinks": ({"messages": [{**HI, "thinking": "a"}, HO]}, "unknown_field", "messages[0]",
                      "no thoughts"),
    "two systems, one beside": ({"messages": [TWO, HI, HO], "system": "s"}, "two_systems",
                                "messages[0].role", "one system"),
    "two lists of tools": ({"messages": [HI, HO], "tools": [{"a": 1}], "functions": [{"a": 1}]},
                           "two_lists_of_tools", "functions", "tools are listed too"),
    "half a pair in arguments": (
        {"messages": [HI, {"role": "assistant", "tool_calls": [
            {"function": {"name": "f", "arguments": r'{"a": "\ud800"}'}}]}]},
        "arguments_not_json", "messages[1].tool_calls[0].function.arguments", ""),
    "calls within and beside": (
        {"messages": [HI, {"role": "assistant", "tool_calls": [CALL],
                           "content": [{"type": "python", "text": "1"}]}]},
        "unknown_part", "messages[1].content", "calls stand in it and beside it"),
    "python without code": (
        {"messages": [HI, {"role": "assistant", "content": [{"type": "python", "text": 1}]}]},
        "unknown_part", "messages[1].content[0]", "python without a text"),
}  # fmt: skip


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("depth", [120, 400, 900, 990, 5000])
def test_arguments_that_are_nested_too_deeply_are_refused(depth: int, written: bool) -> None:
    """At some depths a row can be read, and whoever writes it again runs out of stack."""
    nested = '{"a": ' + "[" * depth + "]" * depth + "}"
    given = json.dumps(nested).replace("[", r"\u005b") if written else nested
    line = (
        '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": '
        f'[{{"function": {{"name": "f", "arguments": {given}}}}}]}}]}}'
    )
    reason, _, why = refused(line.encode())
    assert reason in ("nested_too_deep", "arguments_not_json")
    assert why
    tools = f'{{"messages": [], "tools": [{nested}]}}'.replace("[]", json.dumps([HI, HO]), 1)
    assert refused(tools.encode())[0] == "nested_too_deep"


def test_depth_is_that_of_values_and_not_of_texts() -> None:
    rows = {"messages": [{**HI, "content": "[" * 5000}, HO], "tools": [{"a": [[1]] * 200}]}
    assert said(read(rows))[0] == ("user", "[" * 5000)


@pytest.mark.parametrize("case", BAD)
def test_bad_rows_are_refused_by_field_and_reason(case: str) -> None:
    row, reason, field, why = BAD[case]
    found = refused(row)
    assert found[:2] == (reason, field)
    assert why in found[2]


@pytest.mark.parametrize(
    ("row", "format", "reason", "field"),
    [
        ({"conversations": [{"from": "cat", "value": "x"}]}, "sharegpt", "unknown_role",
         "conversations[0].from"),
        ({"conversations": [{"from": "human", "value": "x"}, {"from": "function_call",
          "value": "f(1)"}]}, "sharegpt", "arguments_not_json", "conversations[1].value"),
        ({"instruction": "x", "output": 7}, "alpaca", "wrong_type", "output"),
        ({"text": ""}, "text", "empty_text", "text"),
        ({"text": "x" * (MAX_CONTENT + 1)}, "text", "content_too_long", "text"),
        ({"chosen": "a", "rejected": "b"}, "preference", "wrong_type", "prompt"),
        ({"prompt": "", "completion": ""}, "prompt_completion", "empty_assistant",
         "completion"),
        ({"prompt": [HI, {"role": "robot"}], "completion": "x"}, "prompt_completion",
         "unknown_role", "prompt[1].role"),
        ({"prompt": [HI], "completion": [{"role": "robot"}]}, "prompt_completion", "unknown_role",
         "completion[0].role"),
        ({"prompt": [HI], "chosen": [HI, {"role": "robot"}], "rejected": []}, "preference",
         "unknown_role", "chosen[1].role"),
        ({"prompt": [HI], "chosen": [HI], "rejected": []}, "preference", "no_messages", "chosen"),
        ({"prompt": "hi ", "chosen": [HI, TWO], "rejected": []}, "preference", "other_prompt",
         "chosen"),
        ({"instruction": "x", "output": ""}, "alpaca", "empty_assistant", "output"),
        ({"instruction": "x", "output": "y", "history": [["a", "b"], ["c", ""]]}, "alpaca",
         "empty_assistant", "history[1][1]"),
        ({"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": ""}],
          "system": "s"}, "sharegpt", "empty_assistant", "conversations[1].value"),
        ({"conversations": [{"from": "human", "value": "x"}, {"from": "system", "value": "t"}],
          "system": "s"}, "sharegpt", "two_systems", "conversations[1].from"),
        ({"conversations": [], "system": "s"}, "sharegpt", "no_messages", ""),
    ],
)  # fmt: skip
def test_bad_rows_of_other_formats(
    row: dict[str, Any], format: str, reason: str, field: str
) -> None:
    assert refused(row, format)[:2] == (reason, field)


def test_the_first_row_decides() -> None:
    with pytest.raises(BadInput, match="the first row is not JSON"):
        find_format(b"{", "a.jsonl, bytes 0 to 2")
    with pytest.raises(BadInput, match="no conversation of a known format") as error:
        find_format(b'{"body": 1}', "a.jsonl, bytes 0 to 12")
    assert error.value.why == "it has 'body'"
    assert "messages" in error.value.do
    assert error.value.where == "a.jsonl, bytes 0 to 12"
    with pytest.raises(BadInput) as error:
        find_format(b"[]", "here")
    assert error.value.why == "it has a list"


def test_formats_are_known_by_name() -> None:
    from penstock import ChatConfig

    with pytest.raises(BadConfig, match="format is 'message'") as error:
        ChatConfig(format="message")
    assert "did you mean messages" in error.value.do


# A key that is there twice: JSON's readers take the last.


def read_all(*rows: str, format: str = "messages") -> list[Conversation | Unfit]:
    data = [row.encode() for row in rows]
    buffer = np.frombuffer(b"".join(data) + bytes(64), np.uint8)
    return [*RowReader(format).read_all(buffer, offsets_of([len(row) for row in data]))]


HI_HO = json.dumps([HI, HO])
GOOD = json.dumps({"messages": [HI, HO]})


@pytest.mark.parametrize(
    ("row", "field"),
    [
        (f'{{"messages": {HI_HO}, "messages": {HI_HO}}}', "messages"),
        (f'{{"messages": {HI_HO}, "id": 1, "score": 0.5, "id": 2}}', "id"),
        ('{"messages": [{"role": "user", "role": "user", "content": ""}]}', "messages[0].role"),
        (GOOD.replace('"ho"', '"ho", "content" \t: "hu"'), "messages[1].content"),
        (GOOD.replace('"ho"', '"ho", "c\\u006fntent": "hu"'), "messages[1].content"),
        (GOOD.replace('"ho"', '"say \\"role\\": \\\\", "content": 7'), "messages[1].content"),
        (
            json.dumps({"messages": [HI, HO | {"tool_calls": [CALL]}]}).replace(
                '"a": 1', '"a": {"b": [{"c": 1, "c": 2}]}'
            ),
            "messages[1].tool_calls[0].function.arguments.a.b[0].c",
        ),
        (
            json.dumps({"messages": [HI, HO], "tools": [{"name": "f"}]}).replace(
                '"name"', '"name": "g", "name"'
            ),
            "tools[0].name",
        ),
        (GOOD[:-1] + "".join(f', "k{k % 99}": 1' for k in range(100)) + "}", "k0"),
    ],
)
def test_a_key_that_is_there_twice_is_refused(row: str, field: str) -> None:
    before, found, after = read_all(GOOD, row, GOOD)
    assert isinstance(found, Unfit)
    assert (found.reason, found.field) == ("repeated_key", field)
    assert "twice" in str(found)
    assert isinstance(before, Conversation)
    assert before == after


@pytest.mark.parametrize("row", [
    GOOD,
    GOOD[:-1] + ', "a": {"role": 1, "content": 2}, "b": [{"a": 1}, {"a": 2}], "c": {}}',
    GOOD.replace('"ho"', json.dumps('{"role": "a", "role": "b"} \\" \\\\')),
    GOOD.replace('"ho"', json.dumps("x" * 100 + '"a": "a": ' + "y" * 31 + "\\")),
    GOOD[:-1] + "".join(f', "k{k}": {{"k{k}": 1}}' for k in range(100)) + "}",
    GOOD[:-1] + ', "deep": ' + "[" * 150 + "]" * 150 + "}",
    GOOD[:-1] + ', "\u6771": 1, "\\u6772": 2, "": 3}',
])  # fmt: skip
def test_keys_of_other_objects_and_texts_are_not_repeated(row: str) -> None:
    (found,) = read_all(row)
    assert isinstance(found, Conversation), found


def test_repeated_keys_in_texts_of_json_are_refused() -> None:
    def called(arguments: str) -> dict[str, Any]:
        return {"messages": [HI, HO | {"tool_calls": [{"name": "f", "arguments": arguments}]}]}

    place = "messages[1].tool_calls[0].function.arguments"
    assert refused(called('{"a": 1, "a": 2}'))[:2] == ("repeated_key", f"{place}.a")
    assert refused(called('{"a": "\\u003a", "b": {"c": 1, "c": 2}}'))[1] == f"{place}.b.c"
    assert read(called('{"a": "b: c", "d": {"a": 1}, "u": "\\u003a"}')).messages[1].calls
    tools = {"messages": [HI, HO], "tools": '[{"name": "f", "name": "g"}]'}
    assert refused(tools)[:2] == ("repeated_key", "tools[0].name")
    call = {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1, "x": 2}}'}
    row = {"conversations": [{"from": "human", "value": "hi"}, call]}
    assert refused(row, "sharegpt")[:2] == ("repeated_key", "conversations[1].value.arguments.x")


JSON = st.recursive(
    st.one_of(st.integers(), st.text(max_size=40), st.none()),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(
            st.tuples(st.sampled_from(["a", "b", "é", '"', "a b", ""]), inner), max_size=4
        ).map(Written)
    ),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(value=JSON, ascii=st.booleans(), space=st.sampled_from(["", " ", "\t "]))
def test_repeated_keys_are_found_wherever_they_are(value: Any, ascii: bool, space: str) -> None:
    row = GOOD[:-1] + ', "more":' + dumped(value, ascii, space) + "}"
    (found,) = read_all(row)
    assert isinstance(found, Unfit) == repeats(value), row


def repeats(value: Any) -> bool:
    if isinstance(value, Written):
        names = [name for name, _ in value]
        return len(names) > len({*names}) or any(repeats(one) for _, one in value)
    return isinstance(value, list) and any(map(repeats, value))


def dumped(value: Any, ascii: bool, space: str) -> str:
    if isinstance(value, Written):
        parts = [
            json.dumps(name, ensure_ascii=ascii) + f"{space}:{space}" + dumped(one, ascii, space)
            for name, one in value
        ]
        return "{" + f",{space}".join(parts) + "}"
    if isinstance(value, list):
        return "[" + ",".join(dumped(one, ascii, space) for one in value) + "]"
    return json.dumps(value, ensure_ascii=ascii)
