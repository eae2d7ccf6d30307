"""Conversations into masked, packed tokens: penstock beside transformers, TRL and others.

scripts/rivals sft
python benchmarks/bench_sft.py [--rows 4000] [--contenders penstock trl …] [--rivals PYTHON]

All take the same rows (generated, with tools and calls), the same tokenizer (Qwen's, from the
package dashscope) and the same template (chatml with generation blocks), each in one process of its
own. Loading the tokenizer and reading the rows into memory is not counted. What is counted:
    penstock           raw JSONL to shards on disk, and all packed batches from them
    penstock_render    rows as bytes to ids and masks, verified
    penstock_prepared  batches with labels from shards that are there; beside it documents
    transformers       apply_chat_template with the assistant mask, no packing
    trl                SFTTrainer: tokenise, mask, pack (bfd)
    axolotl            chat_template strategy, tokenize_prompt, no packing
    nanochat           pieces by tiktoken, lists and masks, as nanochat renders; no packing
"""

import argparse
import importlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
LENGTH = 2048
OURS = ("penstock", "penstock_render", "penstock_prepared")
THEIRS = ("nanochat", "transformers", "trl", "axolotl")
SAME = ("penstock", "penstock_render", "transformers", "trl", "axolotl")
"""Those that render the same text by the same template, so that their speeds can be compared."""
Answer = dict[str, Any]


def timed(work: Callable[[], int]) -> Answer:
    """Run something that says how many tokens it made."""
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    tokens = work()
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"tokens": tokens, "wall_s": wall, "cpu_s": cpu}


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_bytes().splitlines()]


# Ours.


def penstock(folder: Path) -> Answer:
    from penstock import (
        ChatConfig,
        ConversationDataLoader,
        FollowConfig,
        ShardConfig,
        Tokenizer,
        shard_conversations,
    )

    tokenizer = Tokenizer.load(folder / "tokenizer.json", parallel=False)
    tokenizer.encode("<|im_end|>", allowed_special=tokenizer.special_tokens)
    out = Path(tempfile.mkdtemp(dir=folder)) / "dataset"
    told: Answer = {}

    def work() -> int:
        shard_conversations(
            [folder / "rows.jsonl"], out, ChatConfig(max_length=LENGTH),
            ShardConfig(val_fraction=0), FollowConfig(complete=True, threads=1),
            tokenizer=tokenizer,
        )  # fmt: skip
        tokens = trained = places = 0
        with ConversationDataLoader(str(out), tokenizer, LENGTH, batch_size=8) as loader:
            for batch in loader:
                tokens += int(batch.fills.sum())
                trained += int((batch.labels != -100).sum())
                places += batch.input_ids.size
        told.update(trained=trained, fill=tokens / places)
        return tokens

    return {**timed(work), **told}


def penstock_render(folder: Path) -> Answer:
    from penstock import ChatConfig, Tokenizer
    from penstock.chat.formats import RowReader
    from penstock.chat.jinja import open_template
    from penstock.chat.render import Renderer

    tokenizer = Tokenizer.load(folder / "tokenizer.json", parallel=False)
    renderer = Renderer(
        tokenizer, open_template("chatml", tokenizer), ChatConfig(max_length=1 << 20)
    )
    lines = (folder / "rows.jsonl").read_bytes().splitlines()
    reader = RowReader("messages")
    told: Answer = {}

    def work() -> int:
        tokens = trained = 0
        for first in range(0, len(lines), 2000):
            samples = renderer.render([reader.read(line) for line in lines[first : first + 2000]])
            tokens += len(samples.tokens.values)
            trained += int(samples.trained.sum())
        told.update(trained=trained)
        return tokens

    return {**timed(work), **told}


def penstock_prepared(folder: Path) -> Answer:
    from penstock import (
        ChatConfig,
        ConversationDataLoader,
        FollowConfig,
        PretrainDataLoader,
        ShardConfig,
        Tokenizer,
        shard_conversations,
        shard_jsonl,
    )

    tokenizer = Tokenizer.load(folder / "tokenizer.json", parallel=False)
    out = Path(tempfile.mkdtemp(dir=folder))
    done, config = FollowConfig(complete=True), ShardConfig(val_fraction=0)
    rows = folder / "rows.jsonl"
    chat = ChatConfig(max_length=LENGTH)
    shard_conversations([rows], out / "chat", chat, config, done, tokenizer=tokenizer)
    texts = out / "texts.jsonl"
    with texts.open("w") as file:
        for row in rows_of(folder):
            file.write(json.dumps({"text": json.dumps(row, ensure_ascii=False)}) + "\n")
    shard_jsonl([texts], out / "text", config, done, tokenizer=tokenizer, tokens=True)

    def read(loader: Any) -> int:
        tokens = 0
        for batch in loader:
            tokens += int(batch.fills.sum())
            assert batch.labels.shape == batch.input_ids.shape
        return tokens

    found: dict[str, Answer] = {}
    for name, make in (
        ("documents", lambda: PretrainDataLoader(
            str(out / "text"), tokenizer, LENGTH, batch_size=8, epochs=8)),
        ("chat", lambda: ConversationDataLoader(
            str(out / "chat"), tokenizer, LENGTH, batch_size=8, epochs=8)),
    ):  # fmt: skip
        with make() as loader:
            next(iter(loader))
            found[name] = timed(lambda: read(loader))
    return {**found["chat"], "documents": found["documents"]}


# Theirs, in .venv-rivals/sft.


def _tokenizer(folder: Path) -> Any:
    transformers: Any = importlib.import_module("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
    )  # fmt: skip
    tokenizer.chat_template = (folder / "template.jinja").read_text()
    return tokenizer


def transformers(folder: Path) -> Answer:
    tokenizer, rows = _tokenizer(folder), rows_of(folder)
    told: Answer = {}

    def work() -> int:
        tokens = trained = 0
        for row in rows:
            made = tokenizer.apply_chat_template(
                row["messages"], tools=row.get("tools"), tokenize=True, return_dict=True,
                return_assistant_tokens_mask=True,
            )  # fmt: skip
            tokens += len(made["input_ids"])
            trained += sum(made["assistant_masks"])
        told.update(trained=trained)
        return tokens

    return {**timed(work), **told}


def trl(folder: Path) -> Answer:
    hub: Any = importlib.import_module("transformers")
    datasets: Any = importlib.import_module("datasets")
    library: Any = importlib.import_module("trl")
    datasets.disable_progress_bars()
    datasets.disable_caching()
    tokenizer = _tokenizer(folder)
    # its columns are the fields of the first row, which may have no tools
    rows = [{"messages": row["messages"], "tools": row.get("tools")} for row in rows_of(folder)]
    table = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    model = hub.LlamaForCausalLM(
        hub.LlamaConfig(
            hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
            num_key_value_heads=1, vocab_size=len(tokenizer),
        )
    )  # fmt: skip
    told: Answer = {}

    def work() -> int:
        trainer = library.SFTTrainer(
            model=model, processing_class=tokenizer, train_dataset=table,
            args=library.SFTConfig(
                output_dir=str(folder / "trl"), max_length=LENGTH, packing=True,
                assistant_only_loss=True, use_cpu=True, bf16=False, report_to="none",
            ),
        )  # fmt: skip
        made = trainer.train_dataset
        tokens = sum(map(len, made["input_ids"]))
        told.update(fill=tokens / (LENGTH * len(made)))
        return tokens

    return {**timed(work), **told}


def axolotl(folder: Path) -> Answer:
    strategies: Any = importlib.import_module("axolotl.prompt_strategies.chat_template")
    dicts: Any = importlib.import_module("axolotl.utils.dict")
    tokenizer, rows = _tokenizer(folder), rows_of(folder)
    cfg = dicts.DictDefault({"sequence_len": 1 << 20, "train_on_inputs": False})
    data = {"field_messages": "messages", "roles_to_train": ["assistant"], "train_on_eos": "turn",
            "chat_template": "tokenizer_default", "type": "chat_template"}  # fmt: skip
    strategy = strategies.load(tokenizer, cfg, data)
    told: Answer = {}

    def work() -> int:
        tokens = trained = 0
        for row in rows:
            made = strategy.tokenize_prompt(row)
            tokens += len(made["input_ids"])
            trained += sum(label != -100 for label in made["labels"])
        told.update(trained=trained)
        return tokens

    return {**timed(work), **told}


def nanochat(folder: Path) -> Answer:
    """Pieces, each encoded by tiktoken, into lists of ids and of masks."""
    tiktoken: Any = importlib.import_module("tiktoken")
    load: Any = importlib.import_module("tiktoken.load")
    about = json.loads((folder / "tiktoken.json").read_text())
    encoding = tiktoken.Encoding(
        "qwen", pat_str=about["pattern"], special_tokens=about["special"],
        mergeable_ranks=load.load_tiktoken_bpe(about["ranks"]),
    )  # fmt: skip
    start, end = about["special"]["<|im_start|>"], about["special"]["<|im_end|>"]
    encode, rows = encoding.encode_ordinary, rows_of(folder)
    told: Answer = {}

    def call(one: dict[str, Any]) -> str:
        arguments = json.dumps(one["function"]["arguments"], ensure_ascii=False)
        name = one["function"]["name"]
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'

    def work() -> int:
        tokens = trained = 0
        newline = encode("\n")
        for row in rows:
            ids: list[int] = []
            mask: list[int] = []

            def add(some: list[int], kept: int) -> None:
                ids.extend(some)  # noqa: B023
                mask.extend([kept] * len(some))  # noqa: B023

            messages = row["messages"]
            if row.get("tools"):
                listed = "".join("\n" + json.dumps(tool) for tool in row["tools"])
                add([start], 0)
                add(encode("system\n# Tools\n<tools>" + listed + "\n</tools>"), 0)
                add([end], 0)
                add(newline, 0)
            for message in messages:
                is_ours = message["role"] == "assistant"
                text = message.get("content") or ""
                for one in message.get("tool_calls") or ():
                    text += call(one)
                add([start], 0)
                add(encode(message["role"] + "\n"), 0)
                add(encode(text), int(is_ours))
                add([end], int(is_ours))
                add(newline, 0)
            tokens += len(ids)
            trained += sum(mask)
        told.update(trained=trained)
        return tokens

    return {**timed(work), **told}


# All of them.


def prepare(folder: Path, count: int, rivals: str) -> None:
    """Rows, tokenizer and template, once."""
    import importlib.util

    from penstock.chat.jinja import preset_jinja
    from penstock.tokenize.patterns import find_pattern
    from penstock.tokenize.tokenizer import Tokenizer

    spec = importlib.util.spec_from_file_location("made", ROOT / "tests" / "chat" / "made.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    rows = made.conversations(23, count)
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8"
    )
    code = "import dashscope, pathlib; print(pathlib.Path(dashscope.__file__).parent)"
    said = subprocess.run([rivals, "-c", code], capture_output=True, text=True, check=True).stdout
    ranks = Path(said.strip()) / "resources" / "qwen.tiktoken"
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    first = len(ranks.read_bytes().splitlines())
    special = {name: first + k for k, name in enumerate(names)}
    tokenizer = Tokenizer.load(ranks, pattern="qwen2", special_tokens=special, ready=False)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer.content))
    (folder / "template.jinja").write_text(preset_jinja("chatml"))
    about = {"ranks": str(ranks), "special": special, "pattern": find_pattern("qwen2").regex}
    (folder / "tiktoken.json").write_text(json.dumps(about))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--contenders", nargs="+", default=[*OURS, *THEIRS])
    parser.add_argument("--rivals", default=str(ROOT / ".venv-rivals" / "sft" / "bin" / "python"))
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        print(json.dumps(globals()[given.job](given.folder)))
        return
    from measure import DATA, keep, table, warm

    folder = DATA / f"sft_{given.rows}"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "tiktoken.json").exists():
        prepare(folder, given.rows, given.rivals)
    load = os.getloadavg()[0]
    found: dict[str, Answer] = {}
    for name in given.contenders:
        python = sys.executable if name in OURS else given.rivals
        command = [python, str(Path(__file__).resolve()), "--job", name, "--folder", str(folder)]
        quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(
            command, env={**os.environ, **quiet}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            print(f"{name} failed: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
            continue
        found[name] = json.loads(done.stdout.splitlines()[-1])
    made = {name: found[name]["tokens"] for name in SAME if name in found}
    if made and max(made.values()) > 1.01 * min(made.values()):
        raise SystemExit(f"they did not render the same: {made}")
    base = found.get("trl", {}).get("cpu_s", 0) / max(1, found.get("trl", {}).get("tokens", 1))
    lines = [["", "tokens", "k tokens/s", "k tokens/CPU-s", "x TRL by CPU", "trained", "fill"]]
    for name, one in found.items():
        each = one["cpu_s"] / one["tokens"]
        lines.append(
            [name, f"{one['tokens']:,}", f"{one['tokens'] / one['wall_s'] / 1e3:,.0f}",
             f"{1 / each / 1e3:,.0f}", f"{base / each:.1f}" if base else "",
             f"{one['trained']:,}" if "trained" in one else "",
             f"{one['fill']:.4f}" if "fill" in one else ""]
        )  # fmt: skip
    table(f"{given.rows:,} conversations, load {load:.1f} when it began", lines)
    if (documents := found.get("penstock_prepared", {}).get("documents")) is not None:
        speed = documents["tokens"] / documents["cpu_s"] / 1e6
        print(f"  documents by the same plan: {speed:,.1f} M tokens/CPU-s")
    keep("sft", {"rows": given.rows, "sha256": warm(folder / "rows.jsonl"), "load": load,
                 "runs": found})  # fmt: skip


if __name__ == "__main__":
    main()
