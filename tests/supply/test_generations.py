"""A dataset that was made anew: a loader opens the generation that fits, and stays with its own."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from penstock import (
    ChunkConfig,
    DocumentConfig,
    FilterConfig,
    LoaderRun,
    PlanConfig,
    PretrainDataLoader,
    RunConfig,
    ShardConfig,
    TrainConfig,
    explain,
    prepare_dataset,
    tokenize_dataset,
    train_tokenizer,
)
from penstock.errors import BadConfig, NoDataset, StateMismatch
from penstock.work.events import Event, Events

CONFIG: Final = ShardConfig(rows_per_file=40, val_fraction=0.1)
MakeSources = Callable[[int, int], dict[str, bytes]]


@pytest.fixture
def make(tmp_path: Path, sources: MakeSources, tokenizer_folder: Path) -> Callable[..., str]:
    """Cuts the same files, with other budgets and filters: where the generation is."""
    tree = tmp_path / "tree"
    for name, raw in sources(5, 60).items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_bytes(raw)

    def run(max_tokens: int, **options: Any) -> str:
        first = [FilterConfig(min_bytes=options.pop("min_bytes", 1), secrets="keep")]
        return prepare_dataset(
            [tree], tmp_path / "data", [*first, ChunkConfig(max_tokens=max_tokens)], CONFIG,
            RunConfig(workers=1), tokenizer=tokenizer_folder, **options,
        ).url  # fmt: skip

    return run


def opened(data: Path, tokenizer: Path | None, length: int, **options: Any) -> str:
    with PretrainDataLoader(str(data), tokenizer, length, batch_size=2, **options) as loader:
        url: str = loader.sources[0].url
        return url


def test_the_one_that_fits_is_opened(
    make: Callable[..., str], tmp_path: Path, tokenizer_folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    data = tmp_path / "data"
    urls = {length: make(length) for length in (96, 64, 128)}
    assert urls[96] == str(data)
    assert urls[128] == f"{data}/_gen/00003"
    for length, url in urls.items():
        assert opened(data, tokenizer_folder, length) == url
        caplog.clear()
    newer = make(64, min_bytes=200)
    assert newer == f"{data}/_gen/00004"
    with caplog.at_level(logging.WARNING):
        assert opened(data, tokenizer_folder, 64) == newer
    (told,) = [record.message for record in caplog.records]
    assert f"{newer}: opened of 4 generations (sealed, chunks of 64 tokens); " in told
    assert f"{data}: sealed, chunks of 96 tokens" in told
    # who names one means that one
    assert opened(Path(urls[64]), tokenizer_folder, 64) == urls[64]
    assert opened(data / "_gen" / "00001", tokenizer_folder, 96) == str(data)
    with pytest.raises(BadConfig, match="rows of 80 tokens from a dataset of chunks of 64") as bad:
        opened(data, tokenizer_folder, 80)
    assert f"there is {urls[128]}: sealed, chunks of 128 tokens" in bad.value.do
    any_length = DocumentConfig(other_length=True)
    assert opened(data, tokenizer_folder, 80, documents=any_length) == newer


def test_an_empty_one_hides_nothing(
    make: Callable[..., str], tmp_path: Path, tokenizer_folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Options that refuse every document make a generation, the newest, with nothing in it."""
    data, good = tmp_path / "data", make(64)
    empty = make(64, min_bytes=1 << 30)
    assert empty != good
    with caplog.at_level(logging.WARNING):
        assert opened(data, tokenizer_folder, 64) == good
    assert f"{empty}: empty, chunks of 64 tokens" in caplog.text
    with pytest.raises(NoDataset, match="has no shards"):  # who names it means it
        opened(Path(empty), tokenizer_folder, 64)


def test_tokens_of_the_tokenizer_that_is_given(
    make: Callable[..., str], tmp_path: Path, tokenizer_folder: Path
) -> None:
    data, other = tmp_path / "data", tmp_path / "other"
    make(96)
    train_tokenizer([tmp_path / "tree"], other, TrainConfig(vocab_size=300))
    tokenized = tokenize_dataset(data, other).url
    assert opened(data, other, 96) == tokenized
    assert opened(data, tokenizer_folder, 96) == str(data)
    assert opened(data, None, 96) == tokenized


def test_one_that_is_still_made_does_not_come_before_a_sealed_one(
    make: Callable[..., str], tmp_path: Path, tokenizer_folder: Path
) -> None:
    data = tmp_path / "data"
    make(96)
    events = Events("chunk")

    def stop(event: Event) -> None:
        if event["kind"] == "commit":
            raise KeyboardInterrupt

    events.listen(stop)
    for length, options in ((96, {"min_bytes": 200}), (64, {})):
        with pytest.raises(KeyboardInterrupt):
            make(length, events=events, **options)
        if length == 96:
            assert opened(data, tokenizer_folder, 96) == str(data)
            assert make(96, min_bytes=200) == f"{data}/_gen/00002"
    run = LoaderRun(stall_s=0.1)
    assert opened(data, tokenizer_folder, 64, run=run) == f"{data}/_gen/00003"
    with pytest.raises(BadConfig, match="the dataset is not sealed"):
        opened(data, tokenizer_folder, 64, streaming=False)


def test_a_run_in_lanes_resumes_though_the_newest_generation_has_too_few_shards(
    make: Callable[..., str], tmp_path: Path, tokenizer_folder: Path
) -> None:
    make(96)

    def loader() -> PretrainDataLoader:
        plan = PlanConfig(lanes=4)
        return PretrainDataLoader(
            str(tmp_path / "data"), tokenizer_folder, 96, global_batch_size=4, plan=plan
        )

    with loader() as first:
        next(iter(first))
        state = first.state_dict()
        rest = [batch.input_ids.tolist() for batch in first]
    make(96, min_bytes=2000)
    with loader() as again:
        assert again.sources[0].num_known < 4
        again.load_state_dict(state)
        assert [batch.input_ids.tolist() for batch in again] == rest
    with loader() as again, pytest.raises(BadConfig, match="shards for 4 lanes"):
        next(iter(again))


def test_a_run_resumes_on_the_generation_that_it_began_with(
    make: Callable[..., str], tmp_path: Path, tokenizer_folder: Path
) -> None:
    data = tmp_path / "data"
    make(96)

    def loader(path: Path = data) -> PretrainDataLoader:
        return PretrainDataLoader(str(path), tokenizer_folder, 96, batch_size=2)

    with loader() as first:
        batches = [batch.input_ids.tolist() for batch, _ in zip(first, range(5), strict=False)]
        state = json.loads(json.dumps(first.state_dict()))
        rest = [batch.input_ids.tolist() for batch in first]
    config = tmp_path / "run.toml"
    config.write_text(
        f'[loader]\npath = "data"\ntokenizer = "{tokenizer_folder}"\nchunk_size = 96\n'
        "batch_size = 2\n"
    )
    before = explain(config, 3)
    newer = make(96, min_bytes=300)
    with loader() as again:
        assert again.sources[0].url == newer
        assert [batch.input_ids.tolist() for batch in again][:5] != batches
        again.load_state_dict(state)
        assert again.sources[0].url == str(data)
        assert [batch.input_ids.tolist() for batch in again] == rest
    assert explain(config, 3, state=state) == before
    assert explain(config, 3) != before
    with loader(Path(newer)) as named, pytest.raises(StateMismatch, match="dataset id"):
        named.load_state_dict(state)
