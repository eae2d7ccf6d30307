"""Conversations through the one producer: kept, refused with their place, resumed, followed."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chat.made import conversations
from penstock import (
    ChatConfig,
    FollowConfig,
    Log,
    Outcome,
    ShardConfig,
    mark_done,
    shard_conversations,
    tokenize_dataset,
    verify,
)
from penstock.errors import BadConfig, BadDocument, BadInput, TooManyRejects
from penstock.tokenize.token_file import Tokens, read_token_file
from penstock.tokenize.tokenizer import Tokenizer

HI = {"role": "user", "content": "hi"}
COMPLETE = FollowConfig(complete=True, max_rejects=1.0)


def write(path: Path, rows: list[Any]) -> Path:
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def make(
    inputs: list[Path], out: Path, tokenizer: Any, follow: FollowConfig = COMPLETE,
    chat: ChatConfig | None = None, **shards: Any,
) -> Outcome:  # fmt: skip
    config = ShardConfig(**{"val_fraction": 0.1, "rows_per_file": 20, **shards})
    chat = chat or ChatConfig(max_length=1 << 14)
    return shard_conversations(inputs, out, chat, config, follow, tokenizer=tokenizer)


def rows_of(out: Path, split: str = "train") -> list[dict[str, Any]]:
    log = Log.open(out)
    found: list[dict[str, Any]] = []
    for file in log.state.split(split):
        found += pq.read_table(out / file.name).to_pylist()
    return found


def tokens_of(out: Path, split: str = "train") -> list[Tokens]:
    log = Log.open(out)
    found = []
    for file in log.state.split(split):
        beside = log.state.tokens_of(file)
        assert beside is not None
        data = pa.py_buffer((out / beside.name).read_bytes())
        found.append(read_token_file(data, rows=file.rows, vocab_size=1 << 20))
    return found


def rejects_of(out: Path) -> list[dict[str, Any]]:
    log = Log.open(out)
    lines = [
        line
        for file in log.state.split("rejects")
        for line in (out / file.name).read_bytes().splitlines()
    ]
    return [json.loads(line) for line in lines]


def bytes_of(out: Path) -> dict[str, bytes]:
    names = [*out.glob("*.parquet"), *out.glob("*.arrow")]
    return {path.name: path.read_bytes() for path in names}


def test_messages_tokens_and_ranges_are_stored(chat_tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = conversations(1, 70, wire=True)
    file = write(tmp_path / "a.jsonl", rows)
    made = make([file], tmp_path / "out", chat_tokenizer)
    assert made.sealed
    (known,) = made.documents.values()
    assert (known.read, known.kept, known.rows, known.dropped) == (70, 70, 70, {})
    assert not verify(tmp_path / "out", full=True).faults
    stored = [*rows_of(tmp_path / "out"), *rows_of(tmp_path / "out", "val")]
    assert sorted(row["line"] for row in stored) == [*range(1, 71)]
    for row in stored:
        told = json.loads(row["text"])
        true = rows[row["line"] - 1]
        assert [m["role"] for m in told["messages"]] == [m["role"] for m in true["messages"]]
        assert [m["content"] for m in told["messages"]] == [
            m["content"] or "" for m in true["messages"]
        ]
        assert told.get("tools") == true.get("tools")
        assert (row["part"], row["parts"], row["left_out"]) == (0, 1, 0)
        line = file.read_bytes()[row["start"] : row["end"]]
        assert json.loads(line) == true
    for split in ("train", "val"):
        spans = [tokens.spans for tokens in tokens_of(tmp_path / "out", split)]
        counts = [count for one in spans if one is not None for count in one.counts().tolist()]
        assert counts == [row["n_loss"] for row in rows_of(tmp_path / "out", split)]
        assert min(counts) > 0


def test_every_row_is_kept_or_refused_with_its_place(
    chat_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    bad: list[tuple[Any, str, str]] = [
        ({"messages": [{"role": "robot", "content": "x"}]}, "unknown_role", "messages[0].role"),
        (b"{nothing", "invalid_json", ""),
        (b'{"messages": "\xff"}', "invalid_utf8", ""),
        (b"\0\0", "invalid_json", ""),
        (rb'{"messages": [{"role": "user", "content": "\udc00"}]}', "lone_surrogate",
         "messages[0].content"),
        ({"text": "x"}, "other_format", ""),
        ({"messages": [good["messages"][0]]}, "nothing_to_train", ""),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant",
          "content": "b" * 9000}]}, "too_long", ""),
    ]  # fmt: skip
    lines: list[Any] = []
    expected = []
    for row, reason, field in bad:
        lines += [good, b"", row, b"  "]
        expected.append((len(lines) - 1, reason, field))
    file = write(tmp_path / "a.jsonl", lines)
    with file.open("ab") as opened:
        opened.write(b'{"messages": [')
    expected.append((len(lines) + 1, "half_line", ""))
    made = make([file], tmp_path / "out", chat_tokenizer, chat=ChatConfig(max_length=512))
    found = rejects_of(tmp_path / "out")
    assert [(r["row"], r["reason"], r.get("field", "")) for r in found] == expected
    assert {r["input"] for r in found} == {str(file)}
    for reject in found:
        raw = file.read_bytes()[reject["start"] : reject["end"]].rstrip(b"\n")
        assert reject["sample"][:8] == raw.decode("utf-8", "backslashreplace")[:8]
        was_parsed = reject["reason"] not in ("invalid_utf8", "half_line") and b"\0" not in raw
        assert bool(reject.get("why")) == was_parsed
    (known,) = made.documents.values()
    assert (known.read, known.kept, known.blank) == (17, 8, 16)
    assert not verify(tmp_path / "out", full=True).faults


def test_too_many_refusals_stop_a_run_and_skipping_does_not(
    chat_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    silent = {"messages": good["messages"][:1]}
    strict = FollowConfig(complete=True)
    file = write(tmp_path / "a.jsonl", [good] + [silent] * 20)
    assert make([file], tmp_path / "a", chat_tokenizer, strict).sealed
    file = write(tmp_path / "b.jsonl", [good] + [{"messages": []}] * 20)
    with pytest.raises(TooManyRejects, match="20 of 21 documents were refused") as error:
        make([file], tmp_path / "b", chat_tokenizer, strict)
    assert "no_messages: 20" in error.value.why


@pytest.mark.parametrize("overflow", ["split", "drop_oldest"])
def test_a_long_conversation_is_several_rows_or_fewer_turns(
    overflow: str, chat_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    rows = conversations(3, 60)
    file = write(tmp_path / "a.jsonl", rows)
    chat = ChatConfig(max_length=1200, overflow=overflow)
    made = make([file], tmp_path / "out", chat_tokenizer, chat=chat, val_fraction=0.2)
    (known,) = made.documents.values()
    stored = [*rows_of(tmp_path / "out"), *rows_of(tmp_path / "out", "val")]
    assert known.rows == len(stored)
    assert max(row["n_tokens"] for row in stored) <= 1200
    if overflow == "split":
        assert max(row["parts"] for row in stored) > 1
    else:
        assert max(row["left_out"] for row in stored) > 0
    sides: dict[int, set[str]] = {}
    for split in ("train", "val"):
        for row in rows_of(tmp_path / "out", split):
            sides.setdefault(row["line"], set()).add(split)
    assert all(len(side) == 1 for side in sides.values()), "a conversation is on one side"
    assert not verify(tmp_path / "out", full=True).faults


def test_a_file_that_grows_gives_the_shards_of_the_finished_one(
    chat_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    lines = [json.dumps(row).encode() + b"\n" for row in conversations(4, 90)]
    whole = tmp_path / "whole" / "a.jsonl"
    whole.parent.mkdir()
    whole.write_bytes(b"".join(lines))
    make([whole], tmp_path / "one", chat_tokenizer)
    growing = tmp_path / "growing.jsonl"

    def grow() -> None:
        time.sleep(0.2)
        with growing.open("ab", buffering=0) as file:
            for line in lines:
                file.write(line[:7])
                time.sleep(0.002)
                file.write(line[7:])
        mark_done(growing)

    thread = threading.Thread(target=grow)
    thread.start()
    follow = FollowConfig(max_rejects=1.0)
    made = make([growing], tmp_path / "two", chat_tokenizer, follow)
    thread.join()
    assert made.sealed
    for split in ("train", "val"):
        one, two = rows_of(tmp_path / "one", split), rows_of(tmp_path / "two", split)
        assert [{**row, "source": ""} for row in one] == [{**row, "source": ""} for row in two]
        for a, b in zip(
            tokens_of(tmp_path / "one", split), tokens_of(tmp_path / "two", split), strict=True
        ):
            assert (a.values == b.values).all()
            assert a.spans is not None
            assert b.spans is not None
            assert (a.spans.values == b.spans.values).all()


def test_a_run_that_was_stopped_goes_on_and_workers_change_nothing(
    chat_tokenizer: Tokenizer, chat_folder: Path, tmp_path: Path
) -> None:
    rows: list[Any] = conversations(5, 100)
    rows[30] = {"messages": []}
    file = write(tmp_path / "a.jsonl", rows)
    make([file], tmp_path / "one", chat_tokenizer)

    class Kill(Exception):
        pass

    calls = 0
    from penstock.produce import producer

    original = producer.Producer._submit

    def dies(self: producer.Producer) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise Kill
        original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(producer.Producer, "_submit", dies)
        with pytest.raises(Kill):
            make([file], tmp_path / "two", chat_tokenizer)
    assert Log.open(tmp_path / "two").state.sealed is None
    make([file], tmp_path / "two", chat_tokenizer)
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "two")
    assert [r["row"] for r in rejects_of(tmp_path / "two")] == [31]
    chat, config = ChatConfig(max_length=1 << 14), ShardConfig(val_fraction=0.1, rows_per_file=20)
    shard_conversations(
        [file], tmp_path / "three", chat, config, COMPLETE, tokenizer=chat_folder, workers=2
    )
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "three")


def test_a_template_of_others_is_in_the_log(chat_tokenizer: Tokenizer, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    file = write(tmp_path / "a.jsonl", conversations(6, 20, tools=False))
    chat = ChatConfig(chat_template=str(template))
    make([file], tmp_path / "a", chat_tokenizer, chat=chat)
    make([file], tmp_path / "b", chat_tokenizer)
    assert [row["text"] for row in rows_of(tmp_path / "a")] == [
        row["text"] for row in rows_of(tmp_path / "b")
    ]
    for one, two in zip(tokens_of(tmp_path / "a"), tokens_of(tmp_path / "b"), strict=True):
        assert (one.values == two.values).all()
    opened = Log.open(tmp_path / "a").state.opened
    assert opened is not None
    (step,) = opened.config["prepare"]["steps"]
    assert (step["step"], step["format"]) == ("conversations", "messages")
    assert step["chat_template"] == template.read_text()
    assert step["names"]["eos_token"] == "<|endoftext|>"


def test_other_options_do_not_go_on(chat_tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", conversations(7, 30))
    from penstock.produce import writer

    def interrupt(self: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer.ShardWriter, "seal", interrupt)
        with pytest.raises(KeyboardInterrupt):
            make([file], tmp_path / "out", chat_tokenizer, rows_per_file=10)
    with pytest.raises(BadConfig, match="begun with other options") as error:
        make([file], tmp_path / "out", chat_tokenizer, chat=ChatConfig(max_length=99),
             rows_per_file=10)  # fmt: skip
    assert "conversations.max_length: 16384 before, 99 now" in error.value.why


def test_the_format_is_that_of_the_first_row(chat_tokenizer: Tokenizer, tmp_path: Path) -> None:
    row = {"instruction": "a", "input": "", "output": "b"}
    file = write(tmp_path / "a.jsonl", [b"", b"{broken", row, {"text": "x"}])
    make([file], tmp_path / "out", chat_tokenizer)
    assert [r["reason"] for r in rejects_of(tmp_path / "out")] == ["invalid_json", "other_format"]
    file = write(tmp_path / "b.jsonl", [{"body": "x"}])
    with pytest.raises(BadInput, match="no conversation of a known format") as error:
        make([file], tmp_path / "b", chat_tokenizer)
    assert error.value.where == f"{file}, bytes 0 to 14"
    file = write(tmp_path / "c.jsonl", [b"", b"x"])
    with pytest.raises(BadInput, match="there is no conversation"):
        make([file], tmp_path / "c", chat_tokenizer)
    with pytest.raises(BadConfig, match="--parquet_dir is empty"):
        shard_conversations([file], "", tokenizer=chat_tokenizer)


def test_another_branch_is_asked_of_preference_pairs_alone(
    chat_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    said = {"chosen": "yes", "rejected": "no"}
    both = {key: [HI, {"role": "assistant", "content": one}] for key, one in said.items()}
    file = write(tmp_path / "a.jsonl", [{"prompt": "hi", "messages": both["chosen"], **both}])
    rejected = ChatConfig(branch="rejected")
    with pytest.raises(BadConfig, match="--branch is 'rejected', and the rows are of format mess"):
        make([file], tmp_path / "out", chat_tokenizer, chat=rejected)
    asked = ChatConfig(branch="rejected", format="preference")
    make([file], tmp_path / "out", chat_tokenizer, chat=asked, val_fraction=0.0)
    (row,) = rows_of(tmp_path / "out")
    assert json.loads(row["text"])["messages"][1]["content"] == "no"


def test_a_row_that_is_too_long_can_stop_a_run(chat_tokenizer: Tokenizer, tmp_path: Path) -> None:
    asks = {"role": "user", "content": "a"}
    rows = [
        {"messages": [asks, {"role": "assistant", "content": "b" * count}]} for count in (3, 900)
    ]
    file = write(tmp_path / "a.jsonl", [b"{", *rows])
    chat = ChatConfig(max_length=100, overflow="error")
    with pytest.raises(BadDocument, match="a conversation is too long") as error:
        make([file], tmp_path / "out", chat_tokenizer, chat=chat)
    start = len(b"{\n") + len(json.dumps(rows[0])) + 1
    assert error.value.where.startswith(f"{file}, bytes {start} to ")


def test_conversations_are_not_tokenised_as_text(chat_tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", conversations(8, 5))
    make([file], tmp_path / "out", chat_tokenizer)
    with pytest.raises(BadConfig, match="holds conversations"):
        tokenize_dataset(tmp_path / "out", chat_tokenizer)


def test_a_token_file_that_lies_about_its_ranges_is_found(
    chat_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    import io

    import numpy as np

    from penstock.tokenize.token_file import LossSpans, TokenPieces, write_token_pieces

    def stored(spans: list[int], at: list[int]) -> Tokens:
        file = io.BytesIO()
        pieces = TokenPieces(
            np.array([4, 3], np.int64), np.zeros(2, np.uint64), [np.arange(7)],
            LossSpans(np.array(spans, np.int32), np.array(at, np.int64)),
        )  # fmt: skip
        write_token_pieces(file, pieces, "t", "uint16")
        return read_token_file(pa.py_buffer(file.getvalue()), rows=2, vocab_size=100)

    found = stored([1, 2, 3, 4, 1, 3], [0, 4, 6])
    assert found.spans is not None
    assert found.spans.counts().tolist() == [2, 2]
    assert stored([], [0, 0, 0]).spans is not None
    for spans, at in (
        ([0, 2], [0, 2, 2]), ([1, 5], [0, 2, 2]), ([2, 2], [0, 2, 2]), ([3, 2], [0, 2, 2]),
        ([1, 3, 2, 4], [0, 4, 4]), ([-1, 2], [0, 2, 2]), ([1, 2, 1, 4], [0, 2, 4]),
    ):  # fmt: skip
        with pytest.raises(pa.ArrowInvalid, match="loss_spans leave their rows"):
            stored(spans, at)
    with pytest.raises(pa.ArrowInvalid, match="loss_spans are cut"):
        stored([1, 2], [0, 1, 2])
