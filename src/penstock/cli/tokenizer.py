"""`penstock tokenizer train` and `penstock tokenizer eval`."""

import json
from typing import Annotated

import typer

import penstock
from penstock import plugins
from penstock.cli.command import AsJson, Fields, Inputs, Plugins, options, say, watched
from penstock.options import parse_bytes


@options(
    config=Fields(
        "TrainConfig", "vocab_size", "special_tokens", "pattern", "order", "min_frequency",
        "min_count", "text_field", "decode", "suffixes",
    )
)  # fmt: skip
def train(
    inputs: Inputs,
    output: Annotated[str, typer.Option("--output", help="The directory to write.")],
    num_processes: Annotated[
        int | None, typer.Option("--num_processes", help="Threads that count.")
    ] = None,
    max_memory_gb: Annotated[
        float | None, typer.Option("--max_memory_gb", help="While counting; above it, it spills.")
    ] = None,
    plugin: Plugins = None,
    *,
    config: "penstock.TrainConfig",
) -> None:
    """Train a byte-level BPE tokenizer on files. After a kill the same command resumes.

    Example: penstock tokenizer train --inputs src --output tokenizer --vocab_size 65536
    """
    plugins.load(plugin or ())
    with watched("tokenizer") as events:
        trained = penstock.train_tokenizer(
            inputs,
            output,
            config,
            num_processes=num_processes,
            max_memory_gb=max_memory_gb,
            events=events,
        )
    stats = trained.stats
    refused = [f"{count:,} {reason}" for reason, count in stats["rejected"].items()]
    say(
        f"{output}: {stats['vocab_size']:,} tokens from {stats['documents']:,} documents of "
        f"{stats['text_bytes']:,} bytes, "
        f"{stats['distinct']:,} distinct pretokens of {stats['pretokens']:,}; "
        f"{stats['invalid_utf8']:,} invalid UTF-8 parts replaced; "
        f"refused: {', '.join(refused) or 'none'}; "
        f"{stats['count_seconds']:.1f} s counting, {stats['merge_seconds']:.1f} s merging"
    )


@options(read=Fields("ReadConfig", "suffixes", "text_field", "decode"))
def eval(
    tokenizers: Annotated[list[str], typer.Argument(help="Tokenizers: files or directories.")],
    inputs: Inputs,
    pattern: Annotated[
        str | None, typer.Option("--pattern", help="Of .tiktoken files, which name none.")
    ] = None,
    max_bytes_per_file: Annotated[
        str | None, typer.Option("--max_bytes_per_file", help="Read no more of each file.")
    ] = None,
    plugin: Plugins = None,
    as_json: AsJson = False,
    *,
    read: "penstock.ReadConfig",
) -> None:
    """Compare tokenizers on files: bytes per token by language, tokens per word, speed.

    Example: penstock tokenizer eval tokenizer other.json --inputs held.jsonl
    """
    from penstock.tokenize.evaluate import compare

    plugins.load(plugin or ())
    most = None
    if max_bytes_per_file is not None:
        most = parse_bytes(max_bytes_per_file, "--max_bytes_per_file")
    with watched("tokenizer") as events:
        scores = compare(
            {path: penstock.Tokenizer.load(path, pattern=pattern) for path in tokenizers},
            inputs,
            read=read,
            max_bytes_per_file=most,
            events=events,
        )
    if as_json:
        say(json.dumps([score.as_json() for score in scores], indent=2))
        return
    width = max(len(name) for name in ("tokenizer", *(score.tokenizer for score in scores)))
    columns = max(len(name) for name in ("language", *(score.language for score in scores)))
    say(
        f"{'language':{columns}}  {'tokenizer':{width}}  {'MB':>8}  bytes/token  tokens/word"
        f"  {'MB/s':>6}"
    )
    for score in scores:
        say(
            f"{score.language:{columns}}  {score.tokenizer:{width}}  {score.text_bytes / 1e6:8.1f}"
            f"  {score.bytes_per_token:11.3f}  {score.fertility:11.3f}  {score.mb_per_s:6.0f}"
        )
