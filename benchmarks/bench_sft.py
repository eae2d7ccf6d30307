"""Conversations into masked, packed tokens: penstock beside transformers, TRL and others.

scripts/rivals sft
python benchmarks/bench_sft.py [--rows 12000] [--contenders penstock trl …] [--rivals PYTHON]

All take the same rows (generated, with tools and calls), the same tokenizer (Qwen's, from the
package dashscope) and the same template (chatml with generation blocks), each in one process of its
own. Loading the tokenizer and parsing the rows is not counted for the others. Each goes over the
first FEW rows before it is timed: what that takes more than its share is `start`, told apart. What
is counted, in CPU time of the process and its children:
    penstock           raw JSONL to shards on disk, and all packed batches with labels from them
    penstock_render    rows as bytes to ids and masks, verified, no packing
    penstock_prepared  batches with labels from shards that are there; beside it documents
    transformers       apply_chat_template with the assistant mask, no packing
    trl                SFTTrainer: tokenise, mask, pack (bfd)
    axolotl            chat_template strategy, tokenize_prompt, no packing
    nanochat           pieces by tiktoken, lists and masks, best fit from a buffer, as nanochat does
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
FEW = 200
EPOCHS = 24
"""Of prepared shards: one is over in 50 ms."""
OURS = ("penstock", "penstock_render", "penstock_prepared")
THEIRS = ("nanochat", "transformers", "trl", "axolotl")
SAME = ("penstock", "penstock_render", "nanochat", "transformers", "trl", "axolotl")
"""Those that render the same text, so that their speeds can be compared."""
Answer = dict[str, Any]
Work = Callable[[Path], Callable[[], Answer]]
"""Given a file of rows, what is to be timed; its answer has `tokens`."""


def _cpu_s() -> float:
    """Of this process and its children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def timed(work: Callable[[], Answer]) -> Answer:
    """Run something that says how many tokens it made."""
    before, began = _cpu_s(), time.perf_counter()
    told = work()
    wall, cpu = time.perf_counter() - began, _cpu_s() - before
    return {**told, "wall_s": wall, "cpu_s": cpu}


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


# Ours.


def penstock(folder: Path) -> Work:
    from penstock import (
        ChatConfig,
        ConversationDataLoader,
        FollowConfig,
        ShardConfig,
        Tokenizer,
        shard_conversations,
    )

    tokenizer = Tokenizer.load(folder / "tokenizer.json", parallel=False)

    def work(rows: Path) -> Callable[[], Answer]:
        out = Path(tempfile.mkdtemp(dir=folder)) / "dataset"

        def made() -> Answer:
            shard_conversations(
                [rows], out, ChatConfig(max_length=LENGTH),
                ShardConfig(val_fraction=0), FollowConfig(complete=True, threads=1),
                tokenizer=tokenizer,
            )  # fmt: skip
            tokens = trained = places = 0
            with ConversationDataLoader(str(out), tokenizer, LENGTH, batch_size=8) as loader:
                for batch in loader:
                    tokens += int(batch.fills.sum())
                    trained += int((batch.labels != -100).sum())
                    places += LENGTH * int((batch.fills > 0).sum())
            return {"tokens": tokens, "trained": trained, "fill": tokens / places}

        return made

    return work


def penstock_render(folder: Path) -> Work:
    from penstock import ChatConfig, Tokenizer
    from penstock.chat.formats import RowReader
    from penstock.chat.jinja import open_template
    from penstock.chat.render import Renderer

    tokenizer = Tokenizer.load(folder / "tokenizer.json", parallel=False)
    renderer = Renderer(
        tokenizer, open_template("chatml", tokenizer), ChatConfig(max_length=1 << 20)
    )
    reader = RowReader("messages")

    def work(rows: Path) -> Callable[[], Answer]:
        lines = rows.read_bytes().splitlines()

        def made() -> Answer:
            tokens = trained = 0
            for first in range(0, len(lines), 1000):
                some = [reader.read(line) for line in lines[first : first + 1000]]
                samples = renderer.render(some)
                tokens += len(samples.tokens.values)
                trained += int(samples.trained.sum())
            return {"tokens": tokens, "trained": trained}

        return made

    return work


def penstock_prepared(folder: Path) -> Work:
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
    done, config = FollowConfig(complete=True), ShardConfig(val_fraction=0)
    chat = ChatConfig(max_length=LENGTH)

    def read(loader: Any) -> Callable[[], Answer]:
        def made() -> Answer:
            tokens = 0
            for batch in loader:
                tokens += int(batch.fills.sum())
                assert batch.labels.shape == batch.input_ids.shape
            return {"tokens": tokens}

        return made

    def work(rows: Path) -> Callable[[], Answer]:
        out = Path(tempfile.mkdtemp(dir=folder))
        shard_conversations([rows], out / "chat", chat, config, done, tokenizer=tokenizer)
        texts = out / "texts.jsonl"
        with texts.open("w") as file:
            for row in rows_of(rows):
                file.write(json.dumps({"text": json.dumps(row, ensure_ascii=False)}) + "\n")
        shard_jsonl([texts], out / "text", config, done, tokenizer=tokenizer, tokens=True)
        args: dict[str, Any] = {"batch_size": 8, "epochs": EPOCHS}
        with PretrainDataLoader(str(out / "text"), tokenizer, LENGTH, **args) as loader:
            next(iter(loader))
            documents = timed(read(loader))

        def made() -> Answer:
            with ConversationDataLoader(str(out / "chat"), tokenizer, LENGTH, **args) as loader:
                return {**read(loader)(), "documents": documents}

        return made

    return work


# Theirs, in .venv-rivals/sft.


def _tokenizer(folder: Path) -> Any:
    transformers: Any = importlib.import_module("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
    )  # fmt: skip
    tokenizer.chat_template = (folder / "template.jinja").read_text()
    return tokenizer


def transformers(folder: Path) -> Work:
    tokenizer = _tokenizer(folder)

    def work(path: Path) -> Callable[[], Answer]:
        rows = rows_of(path)

        def made() -> Answer:
            tokens = trained = 0
            for row in rows:
                made = tokenizer.apply_chat_template(
                    row["messages"], tools=row.get("tools"), tokenize=True, return_dict=True,
                    return_assistant_tokens_mask=True,
                )  # fmt: skip
                tokens += len(made["input_ids"])
                trained += sum(made["assistant_masks"])
            return {"tokens": tokens, "trained": trained}

        return made

    return work


def trl(folder: Path) -> Work:
    hub: Any = importlib.import_module("transformers")
    datasets: Any = importlib.import_module("datasets")
    library: Any = importlib.import_module("trl")
    datasets.disable_progress_bars()
    datasets.disable_caching()
    tokenizer = _tokenizer(folder)
    model = hub.LlamaForCausalLM(
        hub.LlamaConfig(
            hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
            num_key_value_heads=1, vocab_size=len(tokenizer),
        )
    )  # fmt: skip

    def work(path: Path) -> Callable[[], Answer]:
        # its columns are the fields of the first row, which may have no tools
        rows = [{"messages": row["messages"], "tools": row.get("tools")} for row in rows_of(path)]
        table = datasets.Dataset.from_list(rows, on_mixed_types="use_json")

        def made() -> Answer:
            trainer = library.SFTTrainer(
                model=model, processing_class=tokenizer, train_dataset=table,
                args=library.SFTConfig(
                    output_dir=str(folder / "trl"), max_length=LENGTH, packing=True,
                    assistant_only_loss=True, use_cpu=True, bf16=False, report_to="none",
                ),
            )  # fmt: skip
            # counted in Arrow: as Python lists it would be a third of its time
            ids = trainer.train_dataset.data.column("input_ids")
            tokens = sum(len(chunk.flatten()) for chunk in ids.chunks)
            return {"tokens": tokens, "fill": tokens / (LENGTH * len(ids))}

        return made

    return work


def axolotl(folder: Path) -> Work:
    strategies: Any = importlib.import_module("axolotl.prompt_strategies.chat_template")
    dicts: Any = importlib.import_module("axolotl.utils.dict")
    tokenizer = _tokenizer(folder)
    cfg = dicts.DictDefault({"sequence_len": 1 << 20, "train_on_inputs": False})
    data = {"field_messages": "messages", "roles_to_train": ["assistant"], "train_on_eos": "turn",
            "chat_template": "tokenizer_default", "type": "chat_template"}  # fmt: skip
    strategy = strategies.load(tokenizer, cfg, data)

    def work(path: Path) -> Callable[[], Answer]:
        rows = rows_of(path)

        def made() -> Answer:
            tokens = trained = 0
            for row in rows:
                made = strategy.tokenize_prompt(row)
                tokens += len(made["input_ids"])
                trained += sum(label != -100 for label in made["labels"])
            return {"tokens": tokens, "trained": trained}

        return made

    return work


def nanochat(folder: Path) -> Work:
    """Pieces, each encoded by tiktoken, into lists of ids and of masks; 8 rows at a time, by best
    fit from a buffer of 100, as tensors."""
    tiktoken: Any = importlib.import_module("tiktoken")
    load: Any = importlib.import_module("tiktoken.load")
    torch: Any = importlib.import_module("torch")
    torch.set_num_threads(1)
    about = json.loads((folder / "tiktoken.json").read_text())
    encoding = tiktoken.Encoding(
        "qwen", pat_str=about["pattern"], special_tokens=about["special"],
        mergeable_ranks=load.load_tiktoken_bpe(about["ranks"]),
    )  # fmt: skip
    start, end = about["special"]["<|im_start|>"], about["special"]["<|im_end|>"]
    pad, encode = about["special"]["<|endoftext|>"], encoding.encode_ordinary
    newline = encode("\n")

    def call(one: dict[str, Any]) -> str:
        arguments = json.dumps(one["function"]["arguments"], ensure_ascii=False)
        name = one["function"]["name"]
        return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'

    def render(row: dict[str, Any]) -> tuple[list[int], list[int]]:
        ids: list[int] = []
        mask: list[int] = []

        def add(some: list[int], kept: int) -> None:
            ids.extend(some)
            mask.extend([kept] * len(some))

        messages = row["messages"]
        if row.get("tools"):
            system = ""
            if messages[0]["role"] == "system":
                system, messages = messages[0]["content"] + "\n\n", messages[1:]
            listed = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in row["tools"])
            add([start], 0)
            add(encode(f"system\n{system}{about['before']}{listed}{about['after']}"), 0)
            add([end], 0)
            add(newline, 0)
        for message in messages:
            is_ours = message["role"] == "assistant"
            texts = [message.get("content") or "", *map(call, message.get("tool_calls") or ())]
            add([start], 0)
            add(encode(message["role"] + "\n"), 0)
            add(encode("\n".join(filter(None, texts))), int(is_ours))
            add([end], int(is_ours))
            add(newline, 0)
        return ids, mask

    def work(path: Path) -> Callable[[], Answer]:
        rows = rows_of(path)

        def made() -> Answer:
            tokens = trained = places = 0
            left = iter(rows)
            buffer: list[tuple[list[int], list[int]]] = []
            done = False
            while not done or buffer:
                packed: list[list[int]] = []
                masks: list[list[int]] = []
                while len(packed) < 8 and (not done or buffer):
                    ids: list[int] = []
                    mask: list[int] = []
                    while len(ids) < LENGTH:
                        while len(buffer) < 100 and not done:
                            row = next(left, None)
                            done = row is None
                            if row is not None:
                                some, flags = render(row)
                                # what is longer than a row would clog the buffer for ever
                                buffer.append((some[:LENGTH], flags[:LENGTH]))
                        best, best_size = -1, 0
                        for k, (some, _) in enumerate(buffer):
                            if best_size < len(some) <= LENGTH - len(ids):
                                best, best_size = k, len(some)
                        if best < 0:
                            break
                        some, flags = buffer.pop(best)
                        ids.extend(some)
                        mask.extend(flags)
                    tokens += len(ids)
                    trained += sum(mask)
                    places += LENGTH
                    rest = LENGTH - len(ids)
                    packed.append(ids + [pad] * rest)
                    masks.append(mask + [0] * rest)
                if packed:
                    inputs = torch.tensor(packed, dtype=torch.long)
                    targets = inputs.clone()
                    targets[torch.tensor(masks, dtype=torch.int8) == 0] = -1
            return {"tokens": tokens, "trained": trained, "fill": tokens / places}

        return made

    return work


# All of them.


def prepare(folder: Path, count: int, rivals: str) -> None:
    """Rows, tokenizer and template, once."""
    import importlib.util

    from penstock.chat.jinja import preset_jinja
    from penstock.chat.templates import _TOOLS_AFTER, _TOOLS_BEFORE
    from penstock.tokenize.patterns import find_pattern
    from penstock.tokenize.tokenizer import Tokenizer

    spec = importlib.util.spec_from_file_location("made", ROOT / "tests" / "chat" / "made.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    rows = [json.dumps(row, ensure_ascii=False) + "\n" for row in made.conversations(23, count)]
    (folder / "rows.jsonl").write_text("".join(rows), "utf-8")
    (folder / "few.jsonl").write_text("".join(rows[:FEW]), "utf-8")
    code = "import dashscope, pathlib; print(pathlib.Path(dashscope.__file__).parent)"
    said = subprocess.run([rivals, "-c", code], capture_output=True, text=True, check=True).stdout
    ranks = Path(said.strip()) / "resources" / "qwen.tiktoken"
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    first = len(ranks.read_bytes().splitlines())
    special = {name: first + k for k, name in enumerate(names)}
    tokenizer = Tokenizer.load(ranks, pattern="qwen2", special_tokens=special, ready=False)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer.content))
    (folder / "template.jinja").write_text(preset_jinja("chatml"))
    about = {"ranks": str(ranks), "special": special, "pattern": find_pattern("qwen2").regex,
             "before": _TOOLS_BEFORE, "after": _TOOLS_AFTER}  # fmt: skip
    (folder / "tiktoken.json").write_text(json.dumps(about))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=12_000)
    parser.add_argument("--contenders", nargs="+", default=[*OURS, *THEIRS])
    parser.add_argument("--rivals", default=str(ROOT / ".venv-rivals" / "sft" / "bin" / "python"))
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        began = time.perf_counter()
        work: Work = globals()[given.job](given.folder)
        first = timed(work(given.folder / "few.jsonl"))
        start_s = time.perf_counter() - began
        told = timed(work(given.folder / "rows.jsonl"))
        told["start_s"] = start_s - FEW * told["wall_s"] / given.rows
        told["first_s"] = first["wall_s"]
        print(json.dumps(told))
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
        command = [python, str(Path(__file__).resolve()), "--job", name, "--folder", str(folder),
                   "--rows", str(given.rows)]  # fmt: skip
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
    lines = [
        ["", "tokens", "k tokens/s", "k tokens/CPU-s", "x TRL by CPU", "start s", "trained", "fill"]
    ]
    for name, one in found.items():
        each = one["cpu_s"] / one["tokens"]
        lines.append(
            [name, f"{one['tokens']:,}", f"{one['tokens'] / one['wall_s'] / 1e3:,.0f}",
             f"{1 / each / 1e3:,.0f}", f"{base / each:.1f}" if base else "",
             f"{one['start_s']:.1f}",
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
