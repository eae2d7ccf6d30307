"""The silent corruptions of other stacks, one by one: none of them happens here."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import penstock
from penstock import ChatConfig, ConversationDataLoader, FollowConfig, PlanConfig, ShardConfig
from penstock.chat.formats import RowReader
from penstock.chat.jinja import JinjaTemplate, open_template
from penstock.chat.render import Renderer, Samples
from penstock.tokenize.tokenizer import Tokenizer

from .made import conversations

HI = {"role": "user", "content": "hi"}


def render(tokenizer: Tokenizer, template: str, *rows: dict[str, Any]) -> Samples:
    found = Renderer(tokenizer, open_template(template, tokenizer), ChatConfig(max_length=4096))
    reader = RowReader("messages")
    samples = found.render([reader.read(json.dumps(row).encode()) for row in rows])
    found.close()
    return samples


def trained_text(tokenizer: Tokenizer, samples: Samples, row: int = 0) -> str:
    ids = np.array(samples.tokens[row].as_py())
    return tokenizer.decode(ids[samples.masks()[row]])


def make(folder: Path, rows: list[dict[str, Any]], tokenizer: Tokenizer, **chat: Any) -> str:
    """A sealed dataset of all rows."""
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    penstock.shard_conversations(
        [file], folder / "out", ChatConfig(**chat), ShardConfig(val_fraction=0),
        FollowConfig(complete=True), tokenizer=tokenizer,
    )  # fmt: skip
    return str(folder / "out")


def test_1_a_block_that_ends_on_stripped_white_space(chat_tokenizer: Tokenizer) -> None:
    """transformers marks all that follows: the last character of the block has no token."""
    template = (
        "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}"
        "{%- if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>   \n"
        "{% endgeneration %}{%- else %}{{- m.content + '<|im_end|>' }}{%- endif %}{{- '\n' }}"
        "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
    )
    row = {"messages": [HI, {"role": "assistant", "content": "ho"}, HI,
                        {"role": "assistant", "content": "hey"}]}  # fmt: skip
    found = render(chat_tokenizer, template, row)
    assert trained_text(chat_tokenizer, found) == "ho<|im_end|>hey<|im_end|>"


def test_2_packed_rows_have_no_mask_of_ones(chat_tokenizer: Tokenizer, tmp_path: Path) -> None:
    """With one, transformers lets documents see each other."""
    url = make(tmp_path, conversations(1, 60, tools=False), chat_tokenizer, max_length=512)
    with ConversationDataLoader(url, chat_tokenizer, 512, batch_size=2) as loader:
        batch = next(iter(loader))
    assert batch.packed
    assert len(batch.segments) > 2, "several conversations in a row"
    assert batch.attention_mask is None
    view = batch.to_trl()
    assert "attention_mask" not in view
    starts = np.flatnonzero(view["position_ids"][0].numpy() == 0)
    assert starts.tolist() == batch.varlen()["cu_seqlens"][:-1].tolist()
    assert len(starts) == len(batch.segments)
    assert (view["labels"][0].numpy()[starts] == -100).all()
    apart = batch.to_verl()
    assert len(apart["input_ids"]) == len(batch.segments), "one conversation a row"


@pytest.mark.parametrize("name", ["message", "m", "turn"])
def test_3_calls_are_there_whatever_the_loop_variable_is_called(
    name: str, chat_tokenizer: Tokenizer
) -> None:
    template = (
        "{%- for X in messages %}{{- '<|im_start|>' + X.role + '\n' + X.content }}"
        "{%- for call in X.tool_calls or [] %}{{- call | tojson }}{%- endfor %}"
        "{{- '<|im_end|>\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
    ).replace("X", name)
    call = {"function": {"name": "look_up", "arguments": {"word": "zymurgy"}}}
    row = {"messages": [HI, {"role": "assistant", "content": "", "tool_calls": [call]}]}
    found = render(chat_tokenizer, template, row)
    assert '"look_up"' in trained_text(chat_tokenizer, found)
    assert '"zymurgy"' in trained_text(chat_tokenizer, found)


def test_4_no_null_is_invented(chat_tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Arrow's union of two objects has the fields of both, null where one had none."""
    rows = []
    for arguments in ({"city": "Bonn"}, {"query": "x", "limit": 3}, {}):
        call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
        rows.append({"messages": [HI, {"role": "assistant", "tool_calls": [call]}]})
    url = make(tmp_path, rows, chat_tokenizer)
    table = pq.read_table(Path(url) / "shard_00000.parquet")
    assert str(table.schema.field("text").type) == "string"
    stored = [json.loads(text) for text in table["text"].to_pylist()]
    found = sorted(
        json.dumps(one["messages"][1]["tool_calls"][0]["function"]["arguments"]) for one in stored
    )
    assert found == ['{"city": "Bonn"}', '{"query": "x", "limit": 3}', "{}"]
    with ConversationDataLoader(url, chat_tokenizer, batch_size=1, pack="pad") as loader:
        texts = [chat_tokenizer.decode(batch.input_ids[batch.loss_mask]) for batch in loader]
    assert all("null" not in text for text in texts)
    assert sorted(text.partition('"arguments": ')[2] for text in texts) == [
        '{"city": "Bonn"}}\n</tool_call><|im_end|>',
        '{"query": "x", "limit": 3}}\n</tool_call><|im_end|>',
        "{}}\n</tool_call><|im_end|>",
    ]


@pytest.mark.parametrize("template", ["qwen", "chatml", "jinja"])
def test_5_arguments_as_text_and_null_contents(template: str, chat_tokenizer: Tokenizer) -> None:
    given = template if template != "jinja" else penstock.chat.jinja.preset_jinja("qwen")
    found = []
    for arguments in ({"city": "Köln", "days": 2}, '{"city": "Köln", "days": 2}'):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        row = {"messages": [HI, {"role": "assistant", "content": None, "tool_calls": [call]}]}
        found.append(trained_text(chat_tokenizer, render(chat_tokenizer, given, row)))
    assert found[0] == found[1]
    assert '{"name": "f", "arguments": {"city": "Köln", "days": 2}}' in found[0]
    assert "None" not in found[0]


def test_6_long_conversations_do_not_clog_the_buffer(
    chat_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """nanochat's buffer fills with them until no batch has a target and no loop ends."""
    long = {"messages": [HI, {"role": "assistant", "content": "x" * 5000}]}
    short = {"messages": [HI, {"role": "assistant", "content": "ho"}]}
    url = make(tmp_path, [long] * 40 + [short] * 20, chat_tokenizer, max_length=128)
    plan = PlanConfig(buffer_pieces=4)
    with ConversationDataLoader(url, chat_tokenizer, 128, batch_size=2, plan=plan) as loader:
        batches = list(loader)
    assert batches
    assert all(batch.num_loss_tokens == batch.loss_mask.sum() > 0 for batch in batches)
    assert sum(len(batch.segments) for batch in batches) == 20
    state = penstock.Log.open(url).state
    (known,) = state.inputs.values()
    assert (known.read, known.kept, known.dropped) == (60, 20, {"too_long": 40})


def test_and_a_template_process_is_not_left_behind(chat_tokenizer: Tokenizer) -> None:
    template = JinjaTemplate("{{ messages }}<|im_end|>", chat_tokenizer)
    assert template.prompt == ""
    template.close()
