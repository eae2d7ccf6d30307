"""Conversations as batches: each once, with its mask, on any ranks, from wherever a run stopped."""

import importlib.util
import json
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from chat.made import conversations
from penstock import (
    ChatConfig,
    ConversationDataLoader,
    DiffusionConfig,
    DocumentConfig,
    FollowConfig,
    LoaderRun,
    PlanConfig,
    PretrainDataLoader,
    ShardConfig,
    TrainingBatch,
)
from penstock.errors import BadConfig, InputReplaced, ShardMismatch, StateMismatch, TooManyRejects
from penstock.supply.batch import RowBatch
from penstock.tokenize.token_file import Tokens
from penstock.tokenize.tokenizer import Tokenizer

from .datasets import GrowingDataset
from .memory_source import ChatSource, MemorySource

LENGTH = 2048


def loaded(path: Any, *arguments: Any, **options: Any) -> ConversationDataLoader:
    """A loader of what is at a path, or of sources by name."""
    path = str(path) if isinstance(path, Path) else path
    return ConversationDataLoader(path, *arguments, **options)


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def dataset(chat_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 conversations in shards of 40."""
    folder = tmp_path_factory.mktemp("conversations")
    file = write(folder / "a.jsonl", conversations(1, 200))
    penstock.shard_conversations(
        [file], folder / "out", ChatConfig(max_length=LENGTH),
        ShardConfig(rows_per_file=40, val_fraction=0.05), FollowConfig(complete=True),
        tokenizer=chat_tokenizer,
    )  # fmt: skip
    return folder / "out"


def stored(dataset: Path) -> dict[tuple[int, ...], tuple[bool, ...]]:
    """The samples of a dataset: ids, and which are trained."""
    import pyarrow as pa

    from penstock.tokenize.token_file import read_token_file

    log = penstock.Log.open(dataset)
    found = {}
    for file in log.state.split("train"):
        beside = log.state.tokens_of(file)
        assert beside is not None
        data = pa.py_buffer((dataset / beside.name).read_bytes())
        tokens = read_token_file(data, rows=file.rows, vocab_size=1 << 20)
        assert tokens.spans is not None
        for row in range(tokens.rows):
            ids = tokens.values[tokens.at[row] : tokens.at[row + 1]]
            spans = tokens.spans.values[tokens.spans.at[row] : tokens.spans.at[row + 1]].tolist()
            mask = np.zeros(len(ids), bool)
            for first, last in zip(spans[::2], spans[1::2], strict=True):
                mask[first:last] = True
            found[tuple(ids.tolist())] = tuple(mask.tolist())
    return found


def samples_of(batch: RowBatch) -> list[tuple[tuple[int, ...], tuple[bool, ...]]]:
    """The conversations of a batch, taken apart by its segments."""
    found, row, at = [], -1, 0
    for line, _, _, _, _, begin, count in batch.segments.tolist():
        row, at = (row, at) if line == row else (line, 0)
        assert begin == 0, "a conversation is never cut"
        ids = batch.input_ids[line, at : at + count].tolist()
        mask = batch.loss_mask[line, at : at + count].tolist()
        found.append((tuple(ids), tuple(mask)))
        at += count
    return found


@pytest.mark.parametrize("pack", ["bestfit", "pad"])
def test_every_conversation_comes_once_with_its_mask(
    pack: str, dataset: Path, chat_tokenizer: Tokenizer
) -> None:
    true = stored(dataset)
    seen: Counter[tuple[int, ...]] = Counter()
    with loaded(dataset, chat_tokenizer, LENGTH, batch_size=4, pack=pack) as loader:
        batches = list(loader)
        assert loader.get_num_batches() == len(batches)
    for batch in batches:
        for ids, mask in samples_of(batch):
            seen[ids] += 1
            assert true[ids] == mask
        labels = np.where(batch.loss_mask, batch.input_ids, -100)
        assert np.array_equal(batch.labels, labels)
        assert batch.num_loss_tokens == batch.loss_mask.sum() > 0
        padding = np.arange(LENGTH) >= batch.fills[:, None]
        assert not batch.loss_mask[padding].any()
    assert seen == Counter(dict.fromkeys(true, 1))


def test_two_epochs_come_in_another_order(dataset: Path, chat_tokenizer: Tokenizer) -> None:
    with loaded(dataset, chat_tokenizer, LENGTH, batch_size=4, epochs=2) as loader:
        seen = [ids for batch in loader for ids, _ in samples_of(batch)]
    assert Counter(seen) == Counter(dict.fromkeys(stored(dataset), 2))


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_a_batch_and_know_its_targets(
    world: int, dataset: Path, chat_tokenizer: Tokenizer
) -> None:
    options: dict[str, Any] = {"global_batch_size": 6}
    with loaded(dataset, chat_tokenizer, LENGTH, **options) as loader:
        whole = list(loader)
    ranks = [
        loaded(
            dataset, chat_tokenizer, LENGTH, **options, run=LoaderRun(rank=rank, world_size=world)
        )
        for rank in range(world)
    ]
    for batch, *parts in zip(whole, *ranks, strict=True):
        assert {part.num_loss_tokens for part in parts} == {batch.num_loss_tokens}
        assert sum(int(part.loss_mask.sum()) for part in parts) == batch.num_loss_tokens
        assert np.array_equal(np.concatenate([part.labels for part in parts]), batch.labels)
        assert np.array_equal(np.concatenate([part.input_ids for part in parts]), batch.input_ids)


def test_rows_are_full_and_every_conversation_is_counted_from_file_to_ledger(
    chat_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """counted in = trained + refused + skipped, in conversations; read = trained + context, in
    tokens, of which the batches have as many labels as the ledger says."""
    length = 4096  # several conversations of this small vocabulary in a row
    rows: list[Any] = conversations(17, 2000)
    rng = np.random.default_rng(0)
    for at in rng.choice(len(rows), 20, replace=False).tolist():
        rows[at] = {"messages": []}
    for at in range(5, 2000, 400):
        rows[at] = {"messages": [{"role": "user", "content": "nobody answers"}]}
        said = {"role": "assistant", "content": "x y " * length}
        rows[at + 1] = {"messages": [{"role": "user", "content": "too long"}, said]}
    file = write(tmp_path / "a.jsonl", rows)
    made = penstock.shard_conversations(
        [file], tmp_path / "out", ChatConfig(max_length=length),
        ShardConfig(rows_per_file=500, val_fraction=0.05), FollowConfig(complete=True),
        tokenizer=chat_tokenizer,
    )  # fmt: skip
    (known,) = made.documents.values()
    skipped = known.dropped["too_long"] + known.dropped["nothing_to_train"]
    refused = known.dropped["no_messages"]
    assert known.read == 2000 == known.kept + refused + skipped
    assert known.dropped.keys() == {"too_long", "nothing_to_train", "no_messages"}
    assert 0 < refused <= 20
    seen = 0
    for split in ("train", "val"):
        documents = DocumentConfig(split=split)
        with loaded(
            tmp_path / "out", chat_tokenizer, length, batch_size=4, documents=documents
        ) as loader:
            batches = list(loader)
            (line,) = loader.ledger()
        assert line.documents == sum(len(batch.segments) for batch in batches)
        assert line.skipped_documents == line.cropped == line.skipped == line.waiting == 0
        assert line.read == line.trained + line.context
        assert line.trained == sum(int((batch.labels != -100).sum()) for batch in batches)
        assert line.trained == sum(batch.num_loss_tokens for batch in batches)
        assert all(batch.num_loss_tokens > 0 for batch in batches)
        seen += line.documents
        if split == "train":
            fills = np.sort(np.concatenate([batch.fills for batch in batches]))
            full = fills[fills > 0][1:].mean() / length  # the least is that of the data's end
            assert full >= 0.995, f"{len(fills)} rows are {full:.4f} full"
    assert seen == known.rows == known.kept


def test_a_ledger_counts_the_targets_of_batches_that_were_skipped(
    dataset: Path, chat_tokenizer: Tokenizer
) -> None:
    for last in ("pad", "drop"):
        options: dict[str, Any] = {"batch_size": 3, "plan": PlanConfig(last=last)}
        with loaded(dataset, chat_tokenizer, LENGTH, **options) as read:
            count = sum(1 for _ in read)
            for skipped in (1, count - 1, count + 5):
                with loaded(dataset, chat_tokenizer, LENGTH, **options) as other:
                    other.skip(skipped)
                    list(other)
                    assert other.ledger() == read.ledger()


def test_a_batch_that_failed_is_not_in_the_ledger(dataset: Path, chat_tokenizer: Tokenizer) -> None:
    with loaded(dataset, chat_tokenizer, LENGTH, batch_size=3) as undisturbed:
        true = [batch.num_loss_tokens for batch in undisturbed]
        ledger = undisturbed.ledger()
    found: list[int] = []
    with loaded(dataset, chat_tokenizer, LENGTH, batch_size=3) as loader:
        note, fails = loader._note, [False, True, False, False, True]

        def interrupted(**options: Any) -> None:
            if fails and fails.pop(0):
                raise KeyboardInterrupt
            note(**options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loader, "_note", interrupted)
            while len(found) < len(true):
                try:
                    found += [batch.num_loss_tokens for batch in loader]
                except KeyboardInterrupt:
                    found = true[: loader.step]
                    assert loader.ledger()[0].trained == sum(found)
        assert not fails
        assert found == true
        assert loader.ledger() == ledger


def test_a_dataset_that_grows_gives_the_batches_of_the_finished_one(
    dataset: Path, chat_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    rows = conversations(1, 200)
    file = write(tmp_path / "a.jsonl", rows[:50])
    chat, config = ChatConfig(max_length=LENGTH), ShardConfig(rows_per_file=40, val_fraction=0.05)

    def produce() -> None:
        with file.open("a") as opened:
            for row in rows[50:]:
                opened.write(json.dumps(row) + "\n")
                opened.flush()
                time.sleep(0.002)
        penstock.mark_done(file)

    made = threading.Thread(
        target=penstock.shard_conversations, args=([file], tmp_path / "out", chat, config),
        kwargs={"tokenizer": chat_tokenizer},
    )  # fmt: skip
    made.start()
    writer = threading.Thread(target=produce)
    writer.start()
    while not (tmp_path / "out" / "_log").exists():
        time.sleep(0.01)
    plan = PlanConfig(ramp=True)
    with loaded(tmp_path / "out", chat_tokenizer, LENGTH, batch_size=4, plan=plan) as live:
        first = next(iter(live))
        state = live.state_dict()
        rest = list(live)
    writer.join()
    made.join()
    with loaded(dataset, chat_tokenizer, LENGTH, batch_size=4, plan=plan) as finished:
        whole = list(finished)
    assert len(whole) == 1 + len(rest)
    for one, two in zip([first, *rest], whole, strict=True):
        assert np.array_equal(one.input_ids, two.input_ids)
        assert np.array_equal(one.labels, two.labels)
        assert one.num_loss_tokens == two.num_loss_tokens
    with loaded(tmp_path / "out", chat_tokenizer, LENGTH, batch_size=4, plan=plan) as again:
        again.load_state_dict(json.loads(json.dumps(state)))
        assert np.array_equal(next(iter(again)).input_ids, rest[0].input_ids)


# Raw files.


def test_raw_files_are_rendered_in_the_cache(chat_tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", conversations(2, 60))
    run = LoaderRun(cache_dir=str(tmp_path / "cache"))
    with loaded(file, chat_tokenizer, LENGTH, batch_size=4, run=run) as loader:
        first = [batch.input_ids for batch in loader]
        state = loader.state_dict()
        assert loader.sources[0].chat is not None
        val = DocumentConfig(split="val")
        assert loader.ledger()[0].documents + _count(file, chat_tokenizer, run, val) == 60
    folders = list((tmp_path / "cache" / "datasets").iterdir())
    with loaded(file, chat_tokenizer, LENGTH, batch_size=4, run=run) as again:
        assert all(np.array_equal(a.input_ids, b) for a, b in zip(again, first, strict=True))
        again.load_state_dict(state)
    assert list((tmp_path / "cache" / "datasets").iterdir()) == folders, "nothing is made twice"
    chat = ChatConfig(turns="last")
    with loaded(file, chat_tokenizer, LENGTH, batch_size=4, run=run, chat=chat) as last:
        targets = sum(int(batch.loss_mask.sum()) for batch in last)
        with pytest.raises(StateMismatch, match="other data or settings"):
            last.load_state_dict(state)
    with loaded(file, chat_tokenizer, LENGTH, batch_size=4, run=run) as loader:
        assert 0 < targets < sum(int(batch.loss_mask.sum()) for batch in loader)


def _count(file: Path, tokenizer: Tokenizer, run: LoaderRun, documents: DocumentConfig) -> int:
    try:
        with loaded(file, tokenizer, LENGTH, batch_size=1, run=run, documents=documents) as loader:
            return sum(len(batch.segments) for batch in loader)
    except penstock.errors.NoDataset:
        return 0


def test_raw_files_that_are_not_fit_are_told(chat_tokenizer: Tokenizer, tmp_path: Path) -> None:
    run = LoaderRun(cache_dir=str(tmp_path / "cache"))
    bad = write(tmp_path / "bad.jsonl", [*conversations(3, 5), *[{"messages": []}] * 5])
    with pytest.raises(TooManyRejects, match="5 of 10 documents were refused") as error:
        list(loaded(bad, chat_tokenizer, LENGTH, run=run, streaming=False))
    assert "penstock conversations --max_rejects" in error.value.do
    unfinished = write(tmp_path / "b.jsonl", conversations(3, 5))
    (tmp_path / "b.jsonl.progress").write_text("{}")
    with pytest.raises(InputReplaced, match=r"b\.jsonl is not complete"):
        loaded(unfinished, chat_tokenizer, run=run)


# Views.


@pytest.mark.torch
def test_views_of_packed_rows(dataset: Path, chat_tokenizer: Tokenizer) -> None:
    with loaded(dataset, chat_tokenizer, LENGTH, batch_size=4) as loader:
        batch = next(iter(loader))
    total, targets = int(batch.fills.sum()), batch.num_loss_tokens
    inputs, shifted = batch.shifted()
    assert inputs.shape == shifted.shape == (4, LENGTH - 1)
    assert np.array_equal(inputs, batch.input_ids[:, :-1])
    assert np.array_equal(shifted, batch.labels[:, 1:])
    flat = batch.varlen()
    assert len(flat["input_ids"]) == total == flat["cu_seqlens"][-1]
    assert (np.diff(flat["cu_seqlens"]) == batch.segments[:, 6]).all()
    assert flat["max_seqlen"] == batch.segments[:, 6].max()
    trl = batch.to_trl()
    for name in ("input_ids", "labels", "position_ids", "seq_idx"):
        assert tuple(trl[name].shape) == (1, total)
    assert trl["cu_seq_lens_q"].tolist() == flat["cu_seqlens"].tolist()
    assert trl["max_length_k"] == flat["max_seqlen"]
    verl = batch.to_verl(pad=7)
    assert verl["input_ids"].shape == (len(batch.segments), flat["max_seqlen"])
    for k, (ids, _) in enumerate(samples_of(batch)):
        kept = verl["attention_mask"][k].bool()
        assert tuple(verl["input_ids"][k][kept].tolist()) == ids
        assert (verl["input_ids"][k][~kept] == 7).all()
        assert verl["position_ids"][k][kept].tolist() == [*range(len(ids))]
    x, y = batch.to_nanochat()
    assert np.array_equal(x.numpy(), inputs)
    assert (y.numpy() == np.where(shifted == -100, -1, shifted)).all()
    for found in (
        (trl["labels"] != -100).sum(), verl["loss_mask"].sum(), (y >= 0).sum(),
        (shifted != -100).sum(), (flat["labels"] != -100).sum(),
    ):  # fmt: skip
        assert int(found) == targets


@pytest.mark.torch
def test_views_of_padded_rows(dataset: Path, chat_tokenizer: Tokenizer) -> None:
    with loaded(dataset, chat_tokenizer, LENGTH, batch_size=3, pack="pad") as one:
        batch = next(iter(one))
    trl = batch.to_trl()
    assert {*trl} == {"input_ids", "attention_mask", "labels"}
    assert trl["attention_mask"].sum(1).tolist() == batch.fills.tolist()
    assert batch.to_verl()["loss_mask"].sum() == batch.num_loss_tokens


@pytest.mark.parametrize("pack", ["pad", "concat", "bestfit"])
def test_batches_of_documents_count_targets_over_all_ranks(tmp_path: Path, pack: str) -> None:
    growing = GrowingDataset(tmp_path / "d")
    growing.add([[1, 2, 3], [4, 5], [6], [7, 8, 9, 10, 11]] * 4)
    growing.seal()
    ranks = [
        PretrainDataLoader(
            str(tmp_path / "d"), chunk_size=4, batch_size=2, pack=pack,
            run=LoaderRun(rank=rank, world_size=2),
        )
        for rank in range(2)
    ]  # fmt: skip
    for parts in zip(*ranks, strict=True):
        for part in parts:
            assert part.num_loss_tokens == sum(one.loss_mask.sum() for one in parts)
            assert part.num_tokens == sum(one.fills.sum() for one in parts)


def test_a_batch_of_nobody_does_not_claim_targets() -> None:
    batch = TrainingBatch(np.array([[5, 6, 0]]))
    with pytest.raises(BadConfig, match="does not say how many tokens all ranks train"):
        _ = batch.num_loss_tokens
    with pytest.raises(BadConfig, match="does not say how many tokens all ranks have"):
        _ = batch.num_tokens


def test_views_need_torch(
    dataset: Path, chat_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    with loaded(dataset, chat_tokenizer, LENGTH, batch_size=1) as loader:
        batch = next(iter(loader))
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(BadConfig, match="torch is not installed"):
        batch.to_trl()


def test_diffusion_hides_nothing_but_what_is_trained(
    dataset: Path, chat_tokenizer: Tokenizer
) -> None:
    options: dict[str, Any] = {"batch_size": 4}
    with loaded(dataset, chat_tokenizer, LENGTH, **options) as loader:
        plain = list(loader)
    for chance in (1.0, 0.5):
        noise = DiffusionConfig(mask_token_id=60_000, mask_probability=chance)
        documents = DocumentConfig(objective=noise)
        with loaded(dataset, chat_tokenizer, LENGTH, documents=documents, **options) as loader:
            for clean, batch in zip(plain, loader, strict=True):
                hidden = batch.input_ids == 60_000
                assert not (hidden & ~clean.loss_mask).any()
                assert np.array_equal(batch.loss_mask, hidden)
                assert np.array_equal(batch.labels, np.where(hidden, clean.input_ids, -100))
                assert batch.num_loss_tokens == clean.num_loss_tokens
                share = hidden.sum() / clean.loss_mask.sum()
                assert share == 1 if chance == 1 else 0.4 < share < 0.6


# What was in a batch.


def test_explain_names_file_line_roles_and_targets(
    dataset: Path, chat_tokenizer: Tokenizer
) -> None:
    rows = conversations(1, 200)
    with loaded(dataset, chat_tokenizer, LENGTH, batch_size=2) as loader:
        batch = next(iter(loader))
        spans = loader.explain(batch)
    assert sum(span.trained for span in spans) == batch.num_loss_tokens
    for span in spans:
        row = rows[span.document["line"] - 1]
        assert span.document["source"].endswith("a.jsonl")
        assert len(span.roles) == span.last - span.first
        assert {*span.roles} <= {message["role"] for message in row["messages"]} | {"system"}
        assert f"line {span.document['line']:,}" in str(span)
        assert f"{span.trained} trained" in str(span)
        assert "conversations (chat_template chatml" in span.kept
        assert "\x1b[1;32m" in span.shown
        last = row["messages"][-1]["content"].splitlines()[0]
        assert last in span.shown


# What does not fit.


def test_a_loader_and_its_dataset_must_agree(
    dataset: Path, chat_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with pytest.raises(BadConfig, match="rows of 512 tokens from a dataset") as error:
        loaded(dataset, chat_tokenizer, 512)
    assert f"max_length={LENGTH}" in error.value.do
    with pytest.raises(BadConfig, match="the conversations were rendered otherwise") as error:
        loaded(dataset, chat_tokenizer, LENGTH, "qwen")
    assert error.value.why == "chat_template: the dataset has 'chatml', the loader 'qwen'"
    with pytest.raises(BadConfig, match="rendered otherwise") as error:
        loaded(dataset, chat_tokenizer, LENGTH, chat=ChatConfig(turns="last"))
    assert error.value.why == "turns: the dataset has 'all', the loader 'last'"
    with pytest.raises(BadConfig, match="max_length is 99, and chat says max_length=77"):
        loaded(dataset, chat_tokenizer, 99, chat=ChatConfig(max_length=77))
    for plan in (PlanConfig(pack="concat"), PlanConfig(long="crop")):
        with pytest.raises(BadConfig, match=r"pack is .* and long is"):
            loaded(dataset, chat_tokenizer, LENGTH, plan=plan)
    no_texts: dict[str, Any] = {
        "bos": "none", "eos": "<|endoftext|>", "text_field": "chat", "columns": []
    }  # fmt: skip
    for name, given in no_texts.items():
        with pytest.raises(BadConfig, match=f"documents has {name} for conversations"):
            loaded(dataset, chat_tokenizer, LENGTH, documents=DocumentConfig(**{name: given}))
    with pytest.raises(BadConfig, match="the dataset holds conversations"):
        PretrainDataLoader(str(dataset), chat_tokenizer, LENGTH)
    growing = GrowingDataset(tmp_path / "d", tokenizer=chat_tokenizer.fingerprint)
    growing.add([[1, 2, 3]])
    growing.seal()
    with pytest.raises(BadConfig, match="the dataset holds no conversations"):
        loaded(tmp_path / "d", chat_tokenizer, LENGTH)
    longer = loaded(dataset, chat_tokenizer, 2 * LENGTH, batch_size=1)
    assert next(iter(longer)).input_ids.shape == (1, 2 * LENGTH)
    longer.close()
    with pytest.raises(BadConfig, match=f"max_length is {LENGTH}, and plan says seq_len=9"):
        loaded(dataset, chat_tokenizer, LENGTH, plan=PlanConfig(seq_len=9))
    chat = ChatConfig(max_length=LENGTH)
    with loaded(dataset, chat_tokenizer, chat=chat, batch_size=1) as loader:
        assert next(iter(loader)).input_ids.shape == (1, LENGTH)


def test_shards_without_ranges_are_refused(chat_tokenizer: Tokenizer) -> None:
    class Silent(ChatSource):
        def decode(self, shard: int) -> Tokens:
            return MemorySource.decode(self, shard)

    source = Silent("s", [[[1, 2, 3]]], None, [1])
    with (
        loaded({"s": source}, chat_tokenizer, 64, batch_size=1) as loader,
        pytest.raises(ShardMismatch, match="shard 0 does not say what is trained"),
    ):
        next(iter(loader))


def test_the_first_token_of_a_document_is_no_target_whatever_the_spans_say() -> None:
    """In a packed row it would be foretold from the document before it."""
    from penstock.supply import fetch

    spans, spans_at = np.array([0, 3], np.int32), np.array([0, 2], np.int64)
    address = [np.array([one.ctypes.data], np.uint64) for one in (spans, spans_at)]
    # row, source, _, shard, document, from, count: twice the same document in one row
    segments = np.array([[0, 0, 0, 0, 0, 0, 4]] * 2, np.int32).reshape(-1)
    slots, marked, counted = np.zeros(2, np.int64), np.zeros(8, np.uint8), np.zeros(2, np.int64)
    fetch._mark_trained(segments, slots, *address, 0, 8, marked)
    assert marked.tolist() == [0, 1, 1, 0] * 2
    fetch._count_trained(segments, slots, *address, 1, 1, counted)
    assert counted.tolist() == [4, 2]


def _tool_calls(count: int) -> list[Any]:
    """Rows of examples/make_tool_calls.py."""
    path = Path(__file__).parents[2] / "examples" / "make_tool_calls.py"
    spec = importlib.util.spec_from_file_location("make_tool_calls", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look for it there
    try:
        spec.loader.exec_module(module)
        return list(module.make_rows(5, count))
    finally:
        del sys.modules[spec.name]


@pytest.mark.parametrize("made", [conversations, lambda _, count: _tool_calls(count)])
def test_rows_of_tool_conversations_are_full(made: Any, tmp_path: Path) -> None:
    """Those of the example have 288 to 683 tokens: rows of the longest that fit were filled to
    0.947, since they used up what is long."""
    file = write(tmp_path / "a.jsonl", made(5, 3000))
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    config = penstock.TrainConfig(vocab_size=3000, special_tokens=special)
    (tmp_path / "a.txt").write_bytes(file.read_bytes()[: 1 << 20])
    penstock.train_tokenizer([tmp_path / "a.txt"], tmp_path / "tokenizer", config)
    tokenizer = Tokenizer.load(tmp_path / "tokenizer")
    for length in (2048, 4096):
        out = tmp_path / f"out_{length}"
        penstock.shard_conversations(
            [file], out, ChatConfig(max_length=length), ShardConfig(val_fraction=0),
            FollowConfig(complete=True), tokenizer=tokenizer,
        )  # fmt: skip
        with loaded(out, tokenizer, length, batch_size=4) as loader:
            fills = np.concatenate([batch.fills for batch in loader])
        fills = fills[fills > 0]
        assert fills[:-1].mean() / length >= 0.995
        assert fills.mean() / length >= 0.99
