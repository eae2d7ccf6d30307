"""Numbers and paths that nobody means: refused where they are given, with what to do."""

import collections.abc
import contextlib
import dataclasses
import inspect
import math
import re
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import penstock
from penstock.cache.disk import DiskCache
from penstock.cli import app
from penstock.errors import BadConfig, PenstockError
from penstock.mirror.config import SyncConfig
from penstock.mirror.push_pull import pull, push
from penstock.options import checked_path, config_of, number, whole
from penstock.produce.dataset import FollowConfig, prepare_dataset, shard_jsonl
from penstock.store.log import Log
from penstock.store.store import open_store
from penstock.supply.balance import BalanceConfig
from penstock.supply.mixed_shards import StreamingMixedShardDataset
from penstock.supply.pretrain import PretrainDataLoader
from penstock.supply.run_file import explain, read_run
from penstock.supply.settings import LoaderRun
from penstock.tokenize.tokenizer import Tokenizer
from penstock.tokenize.train import TrainConfig, train_tokenizer
from penstock.watch.show import describe
from supply.nested import nested

NONSENSE: list[Any] = [
    math.nan, math.inf, -math.inf, -1, -(1 << 63), 1 << 63, 1 << 64, 1 << 200, True, "7", b"7",
    "", [], {}, object(), 1j, 0.5, np.float64("nan"), np.bool_(True), "x\0",
]  # fmt: skip
NEVER: list[Any] = [math.nan, "7", b"7", [], {}, 1j, "x\0", 1 << 2000]
"""What is no value of any number."""

CONFIGS: list[Any] = [
    kind
    for name in penstock.__all__
    if dataclasses.is_dataclass(kind := getattr(penstock, name)) and name.endswith("Config")
] + [SyncConfig]


def number_fields(kind: Any) -> list[str]:
    return [
        about.name
        for about in dataclasses.fields(kind)
        if {int, float} & set(typing.get_args(about.type) or (about.type,))
        and typing.get_origin(about.type) is not collections.abc.Sequence
    ]


def test_numbers() -> None:
    assert whole("n", np.int32(7)) == 7
    assert type(whole("n", np.uint64(7))) is int
    assert number("s", np.float32(0.5)) == 0.5
    assert number("s", math.inf) == math.inf
    for value in (True, 0.5, "7", None, math.nan):
        with pytest.raises(BadConfig, match="n is ") as caught:
            whole("n", value)
        assert caught.value.do == "choose a whole number"
    with pytest.raises(BadConfig, match="n is 9") as caught:
        whole("n", 9, 1, 8)
    assert caught.value.do == "choose 8 or less"
    for wrong in (True, "7", None, math.nan, 10**400):
        with pytest.raises(BadConfig, match="s is ") as caught:
            number("s", wrong)
        assert caught.value.do == "choose a number"


def test_the_configs_were_found() -> None:
    assert {"PlanConfig", "RunConfig", "ShardConfig", "TrainConfig"} <= {
        k.__name__ for k in CONFIGS
    }


@pytest.mark.parametrize("kind", CONFIGS, ids=lambda kind: kind.__name__)
def test_every_number_of_every_config_is_checked(kind: Any) -> None:
    for name in number_fields(kind):
        for value in NONSENSE:
            with contextlib.suppress(BadConfig):
                made = kind(**{name: value})
                assert not any(value is never for never in NEVER), (name, value)
                assert type(getattr(made, name)) in (int, float), (name, value)


@pytest.mark.parametrize(
    "name",
    [
        "chunk_size", "batch_size", "global_batch_size", "epochs", "seed", "max_memory_gb",
        "cache_gb", "stall_s", "rank", "world_size",
    ],
)  # fmt: skip
def test_every_number_of_a_loader_is_checked(tmp_path: Path, name: str) -> None:
    for value in NEVER:
        options: dict[str, Any] = {
            "streaming": False,
            "cache_dir": str(tmp_path / "cache"),
            name: value,
        }
        if name in ("rank", "world_size"):
            options = {"rank": 0, "world_size": 1, **options}
        with pytest.raises(BadConfig, match=f"{name} is"):
            PretrainDataLoader(str(tmp_path / "d"), **nested(**options))
    for seed in (-1, 1 << 64):
        with pytest.raises(BadConfig, match="seed is"):
            PretrainDataLoader(str(tmp_path / "d"), seed=seed)
    with pytest.raises(BadConfig, match="a batch has"):
        PretrainDataLoader(str(tmp_path / "d"), None, 1 << 24, batch_size=1 << 24)


@pytest.mark.parametrize(
    "name",
    [
        "pool_size", "refill_threshold", "max_memory_gb", "max_examples_unaugmented", "random_seed",
        "epochs", "batch_size", "rank", "world_size", "stall_s", "cache_gb",
    ],
)  # fmt: skip
def test_every_number_of_a_mixture_is_checked(tmp_path: Path, name: str) -> None:
    for value in NEVER:
        options: dict[str, Any] = {
            "streaming": False,
            "cache_dir": str(tmp_path / "cache"),
            name: value,
        }
        if name in ("rank", "world_size"):
            options = {"rank": 0, "world_size": 1, **options}
        with pytest.raises(BadConfig, match=f"{name} is"):
            StreamingMixedShardDataset(
                [str(tmp_path / "d")], ["all"], **nested(mixed=True, **options)
            )


def test_a_cache_s_numbers_are_checked(tmp_path: Path) -> None:
    for value in (*NEVER, -1):
        with pytest.raises(BadConfig, match="max_bytes is"):
            DiskCache(tmp_path, value)
    with pytest.raises(BadConfig, match="wait_s is"):
        DiskCache(tmp_path, wait_s=math.nan)


@pytest.mark.parametrize("name", ["num_processes", "max_memory_gb"])
def test_a_training_s_numbers_are_checked(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.txt").write_text("text")
    for value in (*NEVER, -1, 0):
        options: dict[str, Any] = {name: value}
        with pytest.raises(BadConfig, match=f"{name} is"):
            train_tokenizer([tmp_path / "a.txt"], tmp_path / "out", TrainConfig(), **options)


def test_more_rows_than_there_can_be_are_shown(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    shard_jsonl([tmp_path / "a.jsonl"], tmp_path / "out", follow=FollowConfig(complete=True))
    assert len(describe(Log.open(tmp_path / "out"), sample_rows=1 << 63)["sample"]) == 1


# Paths.

BAD = "a\0b"


def run_file(folder: Path, line: str) -> Path:
    (folder / "run.toml").write_text(f"[loader]\n{line}\n")
    return folder / "run.toml"


CALLS: dict[str, Callable[[Path], object]] = {
    "loader": lambda _: PretrainDataLoader(BAD),
    "loader, list": lambda _: PretrainDataLoader([BAD, "b"], **nested(stall_s=0.1)),
    "loader, cache": lambda f: PretrainDataLoader(str(f), **nested(cache_dir=BAD)),
    "loader, run_dir": lambda f: PretrainDataLoader(str(f), **nested(run_dir=BAD)),
    "loader, tokenizer": lambda f: PretrainDataLoader(str(f), BAD),
    "mixture": lambda _: StreamingMixedShardDataset([BAD], ["all"]),
    "mixture, cache": lambda f: StreamingMixedShardDataset(
        [str(f)], ["all"], **nested(mixed=True, cache_dir=BAD)
    ),
    "cache": lambda _: penstock.open_cache(BAD),
    "cache, address": lambda _: penstock.open_cache(f"file:///{BAD}"),
    "cache, quoted": lambda _: penstock.open_cache("file:///a%00b"),
    "log": lambda _: Log.open(BAD),
    "store": lambda _: open_store(BAD),
    "store, made": lambda _: open_store(BAD, make=True),
    "store, quoted": lambda _: open_store("file:///a%00b"),
    "shard": lambda f: shard_jsonl([BAD], f / "out", follow=FollowConfig(complete=True)),
    "shard, out": lambda f: shard_jsonl([f / "a"], BAD, follow=FollowConfig(complete=True)),
    "prepare": lambda f: prepare_dataset([BAD], f / "out"),
    "prepare, out": lambda f: prepare_dataset([f], BAD),
    "prepare, lines": lambda f: prepare_dataset([f], None, output=BAD),
    "push": lambda f: push(BAD, f / "out", SyncConfig(once=True)),
    "push, to": lambda f: push(f, BAD, SyncConfig(once=True)),
    "pull": lambda f: pull(BAD, f / "out", SyncConfig(once=True)),
    "pull, to": lambda f: pull(str(f), BAD, SyncConfig(once=True)),
    "tokenizer": lambda _: Tokenizer.load(BAD),
    "train": lambda f: train_tokenizer([BAD], f / "out", TrainConfig()),
    "train, out": lambda f: train_tokenizer([f / "a"], BAD, TrainConfig()),
    "run": lambda _: read_run(BAD),
    "explain": lambda _: explain(BAD, 0),
    "run, path": lambda f: explain(run_file(f, 'path = "a\\u0000b"'), 0),
    "run, cache": lambda f: explain(run_file(f, f'path = "{f}"\ncache_dir = "a\\u0000b"'), 0),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_path_with_nul_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_text('{"text": "a"}\n')
    with pytest.raises(PenstockError) as caught:
        CALLS[name](tmp_path)
    assert "\0" not in str(caught.value)


PLAIN = {name for name, call in CALLS.items() if "BAD" in call.__code__.co_names}
PLAIN -= {"cache, address"}
OPTIONAL = {"loader, cache", "loader, run_dir", "mixture, cache", "prepare, lines"}
"""Where nothing is given as "" too."""


@pytest.mark.parametrize("name", sorted(PLAIN - OPTIONAL))
def test_an_empty_path_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "BAD", "")
    (tmp_path / "a").write_text('{"text": "a"}\n')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadConfig, match="is empty"):
        CALLS[name](tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


@pytest.mark.parametrize("name", sorted(PLAIN - {"run", "explain"}))
def test_an_address_without_a_bucket_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was once a directory called "s3:"."""
    (tmp_path / "a").write_text('{"text": "a"}\n')
    monkeypatch.chdir(tmp_path)
    for bad, scheme in (("s3://", "s3"), ("gs:///", "gs")):
        monkeypatch.setitem(globals(), "BAD", bad)
        with pytest.raises(BadConfig, match=f" is {bad}, which names no bucket") as caught:
            CALLS[name](tmp_path)
        assert caught.value.do == f"write it as {scheme}://bucket/prefix"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]


def test_a_file_where_a_dataset_is_meant_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    made = tmp_path / "out"
    shard_jsonl([tmp_path / "a.jsonl"], made, follow=FollowConfig(complete=True))
    calls: list[Callable[[Path], object]] = [
        penstock.verify,
        lambda file: penstock.verify(f"file://{file}"),
        lambda file: Log.open(file),
        lambda file: push(file, tmp_path / "there", SyncConfig(once=True)),
        lambda file: pull(file, tmp_path / "there", SyncConfig(once=True)),
        lambda file: prepare_dataset([tmp_path / "a.jsonl"], file),
    ]
    for name, do in (
        ("a.jsonl", "give a directory: that of a dataset, or a new one to write to"),
        ("out/shard_00000.parquet", f"give {made}, the dataset that the file is in"),
    ):
        file = tmp_path / name
        told = (
            f"{file.name} is a file, not a directory\n  where: {file}\n"
            "  why:   a dataset is a directory, or a prefix in a bucket, with a log in it\n"
            f"  do:    {do}"
        )
        for call in calls:
            with pytest.raises(BadConfig) as caught:
                call(file)
            assert str(caught.value) == told
        for command in ("verify", "show"):
            answer = CliRunner().invoke(app, [command, str(file)])
            assert answer.exit_code != 0
            assert str(answer.exception) == told


def test_paths() -> None:
    assert checked_path("--input", Path("a") / "b") == "a/b"
    for wrong in ("a\0", None, 7, b"a"):
        with pytest.raises(BadConfig, match="--input is") as caught:
            checked_path("--input", wrong)
        assert caught.value.do == "give a path or an address, without NUL"


def taking_configs() -> Iterator[tuple[str, str]]:
    """Every public function and class that takes a config, with the name it has there."""
    for name in penstock.__all__:
        with contextlib.suppress(TypeError, ValueError):  # no function, or one without a signature
            for about in inspect.signature(getattr(penstock, name)).parameters.values():
                if re.search(r"(Config|Run) \| None$", str(about.annotation)):
                    yield name, about.name
    yield "LoaderRun", "balance"


@pytest.mark.parametrize(("name", "option"), [*taking_configs()])
@pytest.mark.parametrize("given", [{}, {"stall_s": 7}, "x", 7])
def test_what_is_no_config_is_refused_by_name(name: str, option: str, given: Any) -> None:
    """A dict was an AttributeError from somewhere within, and an empty one was not looked at."""
    public = getattr(penstock, name)
    others = {
        about.name: [1.0] if about.name == "lengths" else 1 if about.name == "ranks" else "none"
        for about in inspect.signature(public).parameters.values()
        if about.default is about.empty
    }
    with pytest.raises(BadConfig) as error:
        public(**(others | {option: given}))
    unknown = "'stall_s' is not an option of "
    assert error.value.what.startswith((f"{option} is {given!r}", unknown) if given else option)
    assert error.value.what.startswith(unknown) or f"give {option}=" in error.value.do


def test_a_dict_is_shown_as_the_config_that_it_might_be() -> None:
    with pytest.raises(BadConfig) as error:
        config_of("balance", {"max_tokens": 32, "quadratic": 0}, BalanceConfig)
    assert error.value.do == "give balance=BalanceConfig(max_tokens=32, quadratic=0)"
    with pytest.raises(BadConfig, match="'max_token' is not an option of BalanceConfig") as error:
        config_of("balance", {"max_token": 32}, BalanceConfig)
    assert "did you mean max_tokens?" in error.value.do
    with pytest.raises(BadConfig, match="events is"):
        LoaderRun(events="log.jsonl")  # type: ignore[arg-type]
