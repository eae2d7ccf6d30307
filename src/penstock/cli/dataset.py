"""`penstock verify`, `penstock show`, `penstock explain` and `penstock estimate`."""

import contextlib
import dataclasses
import json
import os
import sys
from typing import Annotated

import typer

import penstock
from penstock.cli.command import AsJson, Dataset, say, watched
from penstock.errors import BadConfig, PenstockError
from penstock.options import printable_name


def verify(
    dataset: Dataset,
    full: Annotated[
        bool, typer.Option("--full", help="Also every hash, row count and split.")
    ] = False,
    expect: Annotated[
        str | None,
        typer.Option("--expect", help="A head that verify printed before: is it still there?"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Prove that a dataset is what its log says; exit code 1 and the exact fault if it is not.

    Of several generations the newest that holds anything, or the one with the --expect-ed record.

    Example: penstock verify data/cpp --full
    """
    from penstock.store.log import generations, newest_filled, split_generation

    meant, all_of_them = generations(dataset)
    if split_generation(dataset)[1] is None and len(all_of_them) > 1:
        meant = newest_filled(all_of_them)
    if expect is not None and len(all_of_them) > 1:
        meant = _with_record(all_of_them, expect) or meant
    others = [url for url in all_of_them if url != meant]
    dataset = meant if others else dataset
    with watched("verify") as events:
        verdict = penstock.verify(dataset, full=full, expect=expect, events=events)
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
            "left_out": verdict.left_out,
            "others": others,
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
            + (
                f"; {len(verdict.left_out):,} files were left out (pull --only)"
                if verdict.left_out
                else ""
            )
        )
        print(f"head {state.n}:{state.head}")
        for url in others:
            say(f"not looked at: {url}, another generation")
    if verdict.faults:
        raise typer.Exit(1)


def _with_record(urls: list[str], expect: str) -> str:
    """The generation that has a record with this head; empty if none has."""
    number, _, sha256 = expect.rpartition(":")
    for url in urls:
        with contextlib.suppress(PenstockError):
            log = penstock.Log.open(url)
            n = int(number) if number.isdecimal() else log.state.n
            if n <= log.state.n and log.record(n).sha256 == sha256:
                return url
    return ""


def show(
    dataset: Dataset,
    rows: Annotated[int, typer.Option("--rows", help="Sample rows to show.")] = 3,
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", help="Show conversations with what is trained in colour."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Describe a dataset: shards, rows, tokens, inputs, rejects, sealed or live, sample rows.

    Of several generations the newest that holds anything, unless DATASET/_gen/00001, 00002, …
    names another.

    Example: penstock show data/cpp --rows 1
    """
    from penstock.store.log import generations, newest_filled, split_generation
    from penstock.watch.show import describe, render

    meant, all_of_them = generations(dataset)
    if split_generation(dataset)[1] is None and len(all_of_them) > 1:
        meant = newest_filled(all_of_them)
    others = [url for url in all_of_them if url != meant]
    log = penstock.Log.open(meant if others else dataset)
    colours = not as_json and sys.stdout.isatty() and "NO_COLOR" not in os.environ
    about = describe(log, sample_rows=rows, others=others, tokenizer=tokenizer, colours=colours)
    say(json.dumps(about, indent=2) if as_json else render(about))
    for row in about["sample"] if not as_json else []:
        if "shown" in row:  # it is made printable already, but for its colours
            print(f"\n-- line {row['line']:,}\n{row['shown']}")


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
    as_json: AsJson = False,
) -> None:
    """Say what was in a batch: every range of tokens, its document, file and bytes, and why.

    Nothing but token counts is read up to that batch.

    Example: penstock explain --config pipeline.toml --batch 1234
    """
    from penstock.supply.run_file import add_ban, explain_choices, find_document, read_state

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
    for span in penstock.explain(config, batch, state=known, bans=bans):
        say(json.dumps(dataclasses.asdict(span)) if as_json else printable_name(str(span)))
    if not as_json:
        say(explain_choices(config, known))


def estimate(
    run: Annotated[str, typer.Argument(help="The run: a TOML file with [loader].")],
    hosts: Annotated[int, typer.Option("--hosts", help="Hosts that train.")] = 1,
    ranks_per_host: Annotated[int, typer.Option("--ranks_per_host", help="Ranks of each.")] = 8,
    gbit: Annotated[float, typer.Option("--gbit", help="Gbit/s of each host's network.")] = 25.0,
    tokens_per_s: Annotated[
        float | None,
        typer.Option("--tokens_per_s", help="Tokens that the trainer takes, on all ranks."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a run would ask of hosts, network and bucket, from the logs of its data.

    Example: penstock estimate run.toml --hosts 64 --gbit 25 --tokens_per_s 2e7
    """
    found = penstock.estimate(
        run, hosts=hosts, ranks_per_host=ranks_per_host, gbit=gbit, tokens_per_s=tokens_per_s
    )
    about = {**dataclasses.asdict(found), "limit": found.limit}
    say(json.dumps(about, indent=2) if as_json else str(found))
