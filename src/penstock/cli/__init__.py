"""The command line: one command per job.

Options may be typed with dashes or underscores: --rows_per_file and --rows-per-file are one.
Heavy imports stand inside the commands, so that `penstock --help` answers at once.
"""

import contextlib
import dataclasses
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from penstock.cli import sync
from penstock.errors import BadConfig, PenstockError
from penstock.work.values import parse_bytes, parse_seconds, printable, printable_name

_SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda token: token.replace("-", "_"),
}
app = typer.Typer(
    help="Turn raw files into training batches, while the data is still being made.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings=_SETTINGS,
)
tokenizer_app = typer.Typer(
    help="Train a tokenizer, or compare some.", no_args_is_help=True, context_settings=_SETTINGS
)
app.add_typer(tokenizer_app, name="tokenizer")


def say(text: str, file: TextIO | None = None) -> None:
    """Print what may hold names from data, which must not reach a terminal as they are."""
    print(printable(text), file=file or sys.stdout)


@app.callback()
def penstock_command() -> None:
    """Keep `penstock shard` a subcommand even while there are few."""


@app.command()
def shard(
    input: Annotated[list[str], typer.Option("--input", help="JSONL file, growing or complete.")],
    parquet_dir: Annotated[str, typer.Option("--parquet_dir", help="The dataset to write.")],
    rows_per_file: Annotated[
        int, typer.Option("--rows_per_file", help="Documents in a shard.")
    ] = 50_000,
    bytes_per_file: Annotated[
        str, typer.Option("--bytes_per_file", help="Text in a shard, if that comes first.")
    ] = "128MB",
    val_fraction: Annotated[
        float, typer.Option("--val_fraction", help="Share set aside for validation.")
    ] = 0.01,
    seed: Annotated[int, typer.Option("--seed", help="Of the shuffle and the split.")] = 0,
    text_field: Annotated[
        str, typer.Option("--text_field", help="The field that holds the document.")
    ] = "text",
    max_line_bytes: Annotated[
        str, typer.Option("--max_line_bytes", help="A longer line is refused.")
    ] = "64MB",
    complete: Annotated[
        bool, typer.Option("--complete", help="The inputs are complete: read them and seal.")
    ] = False,
    until_idle: Annotated[
        str | None,
        typer.Option("--until_idle", help="Take this much silence for the end, e.g. 60s."),
    ] = None,
    max_rejects: Annotated[
        float, typer.Option("--max_rejects", help="Share that may be refused before it stops.")
    ] = 0.01,
    threads: Annotated[
        int | None, typer.Option("--threads", help="Shards encoded side by side.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", help="Count tokens with this one.")
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Store the tokens beside the text.")
    ] = False,
) -> None:
    """Turn JSONL, finished or still growing, into the shards of a live dataset.

    An input has ended when INPUT.done is there (penstock's producers leave it), when it is
    compressed, or when --complete or --until-idle says so. Killed, it goes on where it was.
    """
    from penstock.shard.follow import FollowConfig, shard_jsonl
    from penstock.shard.write import ShardConfig
    from penstock.watch.progress import progress_bar
    from penstock.work.events import Events

    config = ShardConfig(
        rows_per_file=rows_per_file,
        bytes_per_file=parse_bytes(bytes_per_file, "--bytes_per_file"),
        val_fraction=val_fraction,
        seed=seed,
        text_field=text_field,
        max_line_bytes=parse_bytes(max_line_bytes, "--max_line_bytes"),
    )
    optional = {} if threads is None else {"threads": threads}
    follow = FollowConfig(
        complete=complete,
        until_idle_s=None if until_idle is None else parse_seconds(until_idle, "--until_idle"),
        max_rejects=max_rejects,
        **optional,
    )
    counter = None
    if tokenizer is not None:
        from penstock.tokenize.tokenizer import Tokenizer

        counter = Tokenizer.load(tokenizer)
    local = "://" not in parquet_dir
    events = Events("shard", path=Path(parquet_dir) / "_events.jsonl" if local else None)
    with contextlib.closing(events), progress_bar(events, "shard"):
        outcome = shard_jsonl(
            input, parquet_dir, config, follow, tokenizer=counter, tokens=tokens, events=events
        )
    state = outcome.state
    kept = sum(known.kept for known in state.inputs.values())
    dropped = sum(sum(known.dropped.values()) for known in state.inputs.values())
    say(
        f"{parquet_dir}: {'sealed' if outcome.sealed else 'not sealed'}, "
        f"{len(state.split('train')):,} shards, {kept:,} documents kept, {dropped:,} refused"
    )
    if outcome.stopped_by is not None and not outcome.sealed:
        say("stopped by a signal; the same command goes on from here", file=sys.stderr)
        raise typer.Exit(128 + outcome.stopped_by)


@app.command()
def chunk(
    inputs: Annotated[
        list[str],
        typer.Option("--inputs", help="Files, globs, directories, addresses; more may follow it."),
    ],
    max_tokens: Annotated[
        int, typer.Option("--max_tokens", help="Tokens of a chunk: the trainer's --max_seq_len.")
    ] = 16_384,
    parquet_dir: Annotated[
        str | None, typer.Option("--parquet_dir", help="The dataset to write.")
    ] = None,
    output: Annotated[
        str | None,
        typer.Option("--output", help="Write JSON lines here; penstock shard may follow them."),
    ] = None,
    more: Annotated[
        list[str] | None, typer.Argument(hidden=True, help="More inputs, after --inputs.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", help="Counts the tokens; without it, ./tokenizer is taken."),
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Store the tokens beside the text.")
    ] = False,
    reserve_tokens: Annotated[
        int, typer.Option("--reserve_tokens", help="Of a chunk's, left for special ones.")
    ] = 1,
    language: Annotated[
        str, typer.Option("--language", help="Of all documents; auto goes by name and content.")
    ] = "auto",
    preset: Annotated[
        str, typer.Option("--filter", help="Filter documents by a preset: code, web or none.")
    ] = "none",
    secrets: Annotated[
        str | None, typer.Option("--secrets", help="keep, redact or reject keys and passwords.")
    ] = None,
    pii: Annotated[
        str | None, typer.Option("--pii", help="keep, redact or reject personal data.")
    ] = None,
    rule: Annotated[
        list[str] | None, typer.Option("--rule", help="A filter rule of a plugin, by its reason.")
    ] = None,
    dedup: Annotated[
        str, typer.Option("--dedup", help="Drop what was seen before: none, exact, near or batch.")
    ] = "none",
    benchmark: Annotated[
        list[str] | None,
        typer.Option("--benchmark", help="Drop documents that hold items of this file."),
    ] = None,
    processor: Annotated[
        list[str] | None, typer.Option("--processor", help="A DataProcessor: name or module:Class.")
    ] = None,
    plugin: Annotated[
        list[str] | None, typer.Option("--plugin", help="A module to import first.")
    ] = None,
    suffixes: Annotated[
        str | None, typer.Option("--suffixes", help="Of trees and archives read these: .c,.h,.cpp")
    ] = None,
    text_field: Annotated[
        str, typer.Option("--text_field", help="Of JSON lines and parquet files.")
    ] = "text",
    decode: Annotated[
        str, typer.Option("--decode", help="What is not UTF-8: latin-1, or reject.")
    ] = "latin-1",
    max_document_bytes: Annotated[
        str, typer.Option("--max_document_bytes", help="A longer document is refused.")
    ] = "256MB",
    rows_per_file: Annotated[
        int, typer.Option("--rows_per_file", help="Chunks in a shard, to the next whole document.")
    ] = 50_000,
    bytes_per_file: Annotated[
        str, typer.Option("--bytes_per_file", help="Text in a shard, if that comes first.")
    ] = "128MB",
    val_fraction: Annotated[
        float, typer.Option("--val_fraction", help="Share set aside for validation.")
    ] = 0.01,
    seed: Annotated[int, typer.Option("--seed", help="Of the shuffle and the split.")] = 0,
    workers: Annotated[
        int | None, typer.Option("--workers", help="Processes that compute.")
    ] = None,
    engine: Annotated[
        str, typer.Option("--engine", help="Where they run: local, or ray.")
    ] = "local",
    max_memory: Annotated[
        str, typer.Option("--max_memory", help="Of all processes together.")
    ] = "2GB",
    max_rejects: Annotated[
        float, typer.Option("--max_rejects", help="Share that may be damaged before it stops.")
    ] = 0.01,
) -> None:
    """Cut source files into chunks at function boundaries, into the shards of a live dataset.

    Killed, the same command goes on where it was; the result is the same, byte for byte, for any
    number of workers, here or on a Ray cluster.
    """
    from penstock.ingest.formats import ReadConfig
    from penstock.prepare.chunk import ChunkConfig
    from penstock.prepare.steps import make_steps
    from penstock.shard.produce import prepare_dataset
    from penstock.shard.write import ShardConfig
    from penstock.watch.progress import progress_bar
    from penstock.work.events import Events
    from penstock.work.run import RunConfig

    if parquet_dir is None and output is None:
        raise BadConfig("nothing is to be written", do="name --parquet_dir, --output, or both")
    steps = make_steps(
        processors=tuple(processor or ()),
        preset=preset,
        secrets=secrets,
        pii=pii,
        rules=tuple(rule or ()),
        benchmarks=tuple(benchmark or ()),
        dedup=dedup,
        chunk=ChunkConfig(max_tokens=max_tokens, reserve_tokens=reserve_tokens, language=language),
    )
    read = ReadConfig(
        text_field=text_field,
        decode=decode,
        max_document_bytes=parse_bytes(max_document_bytes, "--max_document_bytes"),
        suffixes=frozenset(suffixes.split(",")) if suffixes else None,
    )
    config = ShardConfig(
        rows_per_file=rows_per_file,
        bytes_per_file=parse_bytes(bytes_per_file, "--bytes_per_file"),
        val_fraction=val_fraction,
        seed=seed,
    )
    optional = {} if workers is None else {"workers": workers}
    run = RunConfig(
        engine=engine,
        max_memory_bytes=parse_bytes(max_memory, "--max_memory"),
        max_rejects=max_rejects,
        plugins=tuple(plugin or ()),
        **optional,
    )
    local = parquet_dir is not None and output is None and "://" not in parquet_dir
    events = Events("chunk", path=Path(parquet_dir or "") / "_events.jsonl" if local else None)
    with contextlib.closing(events), progress_bar(events, "chunk"):
        outcome = prepare_dataset(
            [*inputs, *(more or [])],
            parquet_dir,
            steps,
            config,
            run,
            read=read,
            tokenizer=tokenizer or _tokenizer_here(),
            tokens=tokens,
            output=output,
            events=events,
        )
    state = outcome.state
    known = state.inputs.values()
    say(
        f"{outcome.url}: {'sealed' if outcome.sealed else 'not sealed'}, "
        f"{sum(i.read for i in known):,} documents read, {sum(i.kept for i in known):,} kept as "
        f"{sum(i.rows for i in known):,} chunks in {len(state.split('train')):,} shards"
    )
    dropped: dict[str, int] = {}
    for one in known:
        for reason, count in one.dropped.items():
            dropped[reason] = dropped.get(reason, 0) + count
    for reason, count in sorted(dropped.items(), key=lambda item: -item[1]):
        say(f"  {count:,} not kept: {reason}")
    if outcome.redacted:
        say(f"  {outcome.redacted:,} redacted: see the columns secrets and pii in _features")
    if outcome.stopped_by is not None and not outcome.sealed:
        say("stopped by a signal; the same command goes on from here", file=sys.stderr)
        raise typer.Exit(128 + outcome.stopped_by)


def _tokenizer_here() -> str:
    """The tokenizer that `penstock tokenizer train --output tokenizer` leaves."""
    for name in ("tokenizer", "tokenizer.json"):
        if os.path.exists(name):
            return name
    raise BadConfig(
        "no tokenizer is given, and there is none in ./tokenizer",
        why="a chunk has at most --max_tokens tokens of a tokenizer",
        do="name one with --tokenizer, or make one: "
        "penstock tokenizer train --inputs … --output tokenizer",
    )


app.command()(sync.push)
app.command()(sync.pull)


@app.command()
def verify(
    dataset: Annotated[str, typer.Argument(help="A dataset's directory or address.")],
    full: Annotated[
        bool, typer.Option("--full", help="Also every hash, row count and split.")
    ] = False,
    expect: Annotated[
        str | None,
        typer.Option("--expect", help="A head that verify printed before: is it still there?"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Prove that a dataset is what its log says; exit code 1 and the exact fault if it is not."""
    from penstock.shard.verify import verify as check
    from penstock.store.backends import open_store
    from penstock.watch.progress import progress_bar
    from penstock.work.events import Events

    events = Events("verify")
    with progress_bar(events, "verify"):
        verdict = check(open_store(dataset), full=full, expect=expect, events=events)
    state = verdict.state
    rows = sum(f.rows for f in state.files.values() if f.split in ("train", "val"))
    if as_json:
        about = {
            "dataset": dataset,
            "ok": not verdict.faults,
            "full": full,
            "sealed": state.sealed is not None,
            "records": state.n + 1,
            "head": f"{state.n}:{state.head}",
            "files": verdict.files_checked,
            "rows": rows,
            "coming": verdict.coming,
            "faults": [
                {"what": fault.what, "where": fault.where, "why": fault.why}
                for fault in verdict.faults
            ],
        }
        print(json.dumps(about, indent=2))
    else:
        for fault in verdict.faults:
            say(f"fault: {fault.what}\n  where: {fault.where}\n  why:   {fault.why}")
        say(
            f"{dataset}: {'FAULTY' if verdict.faults else 'ok'} "
            f"({'full' if full else 'quick'}), {state.n + 1:,} records, "
            f"{verdict.files_checked:,} files, {rows:,} rows, "
            f"{'sealed' if state.sealed else 'live'}"
            + (f"; {len(verdict.coming):,} files come merged, later" if verdict.coming else "")
        )
        print(f"head {state.n}:{state.head}")
    if verdict.faults:
        raise typer.Exit(1)


@app.command()
def show(
    dataset: Annotated[str, typer.Argument(help="A dataset's directory or address.")],
    rows: Annotated[int, typer.Option("--rows", help="Sample rows to show.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Describe a dataset: shards, rows, tokens, inputs, rejects, sealed or live, sample rows."""
    from penstock.store.log import Log
    from penstock.watch.show import describe, render

    about = describe(Log.open(dataset), sample_rows=rows)
    say(json.dumps(about, indent=2) if as_json else render(about))


@tokenizer_app.command("train")
def tokenizer_train(
    inputs: Annotated[
        list[str], typer.Option("--inputs", help="Files or directories; more may follow it.")
    ],
    output: Annotated[str, typer.Option("--output", help="The directory to write.")],
    more: Annotated[
        list[str] | None, typer.Argument(hidden=True, help="More inputs, after --inputs.")
    ] = None,
    vocab_size: Annotated[
        int, typer.Option("--vocab_size", help="Tokens, special ones included.")
    ] = 65_536,
    special_tokens: Annotated[
        str, typer.Option("--special_tokens", help="Texts that are one token, by commas.")
    ] = "<|endoftext|>",
    pattern: Annotated[
        str,
        typer.Option("--pattern", help="gpt2, cl100k, o200k, qwen2, nanochat, or a regex."),
    ] = "cl100k",
    order: Annotated[
        str, typer.Option("--order", help="Whose ties and ids: hf or rustbpe.")
    ] = "hf",
    min_frequency: Annotated[
        int, typer.Option("--min_frequency", help="Do not merge a pair that is rarer.")
    ] = 0,
    min_count: Annotated[
        int, typer.Option("--min_count", help="Leave pretokens out that are rarer.")
    ] = 1,
    text_field: Annotated[
        str, typer.Option("--text_field", help="Of JSON lines and parquet files.")
    ] = "text",
    num_processes: Annotated[
        int | None, typer.Option("--num_processes", help="Threads that count.")
    ] = None,
    max_memory_gb: Annotated[
        float | None, typer.Option("--max_memory_gb", help="While counting; then it spills.")
    ] = None,
) -> None:
    """Train a byte-level BPE tokenizer on files; killed, the same command goes on."""
    from penstock.tokenize.train import TrainConfig, train_tokenizer
    from penstock.watch.progress import progress_bar
    from penstock.work.events import Events

    config = TrainConfig(
        vocab_size=vocab_size,
        special_tokens=tuple(text for text in special_tokens.split(",") if text),
        pattern=pattern,
        order=order,
        min_frequency=min_frequency,
        min_count=min_count,
        text_field=text_field,
    )
    events = Events("tokenizer")
    with contextlib.closing(events), progress_bar(events, "tokenizer"):
        trained = train_tokenizer(
            [*inputs, *(more or [])],
            output,
            config,
            num_processes=num_processes,
            max_memory_gb=max_memory_gb,
            events=events,
        )
    stats = trained.stats
    refused = sum(stats["rejected"].values())
    say(
        f"{output}: {stats['vocab_size']:,} tokens from {stats['text_bytes']:,} bytes, "
        f"{stats['distinct']:,} distinct pretokens of {stats['pretokens']:,}; "
        f"{stats['invalid_utf8']:,} invalid UTF-8 parts replaced, {refused:,} rows refused; "
        f"{stats['count_seconds']:.1f} s counting, {stats['merge_seconds']:.1f} s merging"
    )


@tokenizer_app.command("eval")
def tokenizer_eval(
    tokenizers: Annotated[list[str], typer.Argument(help="Tokenizers: files or directories.")],
    inputs: Annotated[list[str], typer.Option("--inputs", help="Text to encode; repeatable.")],
    pattern: Annotated[
        str | None, typer.Option("--pattern", help="Of .tiktoken files, which name none.")
    ] = None,
    text_field: Annotated[
        str, typer.Option("--text_field", help="Of JSON lines and parquet files.")
    ] = "text",
    max_bytes_per_file: Annotated[
        str | None, typer.Option("--max_bytes_per_file", help="Read no more of each.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Compare tokenizers on files: bytes per token by language, tokens per word, speed."""
    from penstock.tokenize.evaluate import compare
    from penstock.tokenize.tokenizer import Tokenizer

    most = None
    if max_bytes_per_file is not None:
        most = parse_bytes(max_bytes_per_file, "--max_bytes_per_file")
    loaded = {path: Tokenizer.load(path, pattern=pattern) for path in tokenizers}
    scores = compare(
        loaded,
        [Path(path) for path in inputs],
        text_field=text_field,
        max_bytes_per_file=most,
    )
    if as_json:
        say(json.dumps([score.as_json() for score in scores], indent=2))
        return
    width = max(len(score.tokenizer) for score in scores)
    columns = max(len(score.language) for score in scores)
    say(
        f"{'language':{columns}}  {'tokenizer':{width}}  {'MB':>8}  bytes/token  tokens/word"
        f"  {'MB/s':>6}"
    )
    for score in scores:
        say(
            f"{score.language:{columns}}  {score.tokenizer:{width}}  {score.text_bytes / 1e6:8.1f}"
            f"  {score.bytes_per_token:11.3f}  {score.fertility:11.3f}  {score.mb_per_s:6.0f}"
        )


@app.command()
def explain(
    config: Annotated[str, typer.Option("--config", help="The run: a TOML file with [loader].")],
    batch: Annotated[
        int | None, typer.Option("--batch", help="Number of the batch, from 0.")
    ] = None,
    state: Annotated[
        str, typer.Option("--state", help="A loader's state, as JSON, of the run that is meant.")
    ] = "",
    bans: Annotated[
        int | None, typer.Option("--bans", help="How many bans there were when the run began.")
    ] = None,
    ban: Annotated[
        str, typer.Option("--ban", help="Record a doc_id that the next run must not see.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="As JSON, a line for each span.")] = False,
) -> None:
    """Say what was in a batch: every range of tokens, its document, file and bytes, and why.

    Nothing but token counts is read up to that batch.
    """
    from penstock.supply.run_file import add_ban, explain_step, find_document, read_state

    if batch is None and not ban:
        raise BadConfig("--batch is not given", do="name a batch, or a document to --ban")
    if ban:
        if not ban.isdecimal() or int(ban) >= 1 << 64:
            raise BadConfig(f"--ban is {ban!r}", do="give a doc_id, a number of 64 bits")
        found = find_document(config, int(ban))
        seen = f"it is in {found}" if found else "no shard was seen that has it"
        say(f"{add_ban(config, int(ban))}: document {ban} is banned from the next run on; {seen}")
    if batch is None:
        return
    known = read_state(state) if state else None
    for span in explain_step(config, batch, state=known, bans=bans):
        say(json.dumps(dataclasses.asdict(span)) if as_json else printable_name(str(span)))


def main(run: Callable[[], Any] = app) -> None:
    """Run the command; an error of ours is a message and exit code 1, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        run()
    except PenstockError as error:
        say(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, MemoryError) as error:
        why = f"{type(error).__name__}: {error}"
        say(
            f"the system refused\n  why:    {why}\n  do:     mend that and run again",
            file=sys.stderr,
        )
        sys.exit(1)
