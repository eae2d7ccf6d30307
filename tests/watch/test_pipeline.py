"""What the page is told of a directory: datasets, stages, losses; damaged and growing ones too."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from penstock import WatchConfig, log_loss
from penstock.errors import BadConfig
from penstock.store.log import Log
from penstock.watch import pipeline as module
from penstock.watch import rejects
from penstock.watch.pipeline import Pipeline, Stage, Tail, find_spikes
from penstock.watch.workplace import Watch
from penstock.work.events import EVENTS, Events
from supply.datasets import GrowingDataset, made_dataset
from watch.made import make_shop


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    return make_shop(tmp_path_factory.mktemp("pipeline") / "shop", tokenizer_folder)


def test_all_of_a_directory_is_found(shop: Path) -> None:
    about = json.loads(json.dumps(Pipeline(str(shop)).overview(), allow_nan=False))
    datasets = {one["key"]: one for one in about["datasets"]}
    assert datasets.keys() == {"cpp", "prose"}
    cpp = datasets["cpp"]
    state = Log.open(shop / "cpp").state
    train = state.split("train")
    assert cpp["sealed"] is True
    assert cpp["shards"] == len(train) == len(cpp["bins"])
    assert cpp["rows"] == sum(file.rows for file in train)
    assert cpp["tokens"] == sum(file.tokens or 0 for file in train)
    assert cpp["steps"] == ["filter", "dedup", "chunk"]
    assert cpp["rejects"]["near_duplicate"] == 6
    assert cpp["timeline"][-1][1] == len(train)
    assert cpp["timeline"] == sorted(cpp["timeline"])
    stages = {(one["where"], one["name"]): one for one in about["stages"]}
    assert stages.keys() == {("cpp", "chunk"), ("prose", "shard")}
    assert stages["cpp", "chunk"]["state"] == "sealed"
    (loss,) = about["losses"]
    assert loss["steps"] == 40
    assert loss["spikes"] == [24]
    assert 0.5 < loss["waited"][0] < 0.6


@pytest.mark.parametrize("name", ["cpp", "."])
def test_a_dataset_itself_may_be_named(shop: Path, name: str) -> None:
    about = Pipeline(str(shop / name)).overview()
    assert any(one["key"] == "cpp" for one in about["datasets"])


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="there is no directory") as error:
        Pipeline(str(tmp_path / "nothing"))
    assert "name a dataset" in error.value.do


def test_what_comes_is_seen(tmp_path: Path) -> None:
    shown = Pipeline(str(tmp_path))
    assert shown.overview()["datasets"] == []
    nothing = shown.stamp()
    growing = GrowingDataset(tmp_path / "live")
    shown._looked_at = 0.0
    assert shown.stamp() != nothing
    assert shown.overview()["datasets"][0]["shards"] == 0
    stamps = [shown.stamp()]
    assert shown.stamp() == stamps[0]
    for k in range(3):
        growing.add([[k, k]])
        stamps.append(shown.stamp())
        (dataset,) = shown.overview()["datasets"]
        assert (dataset["shards"], dataset["sealed"]) == (k + 1, False)
    events = Events("shard", path=tmp_path / "live" / "_events.jsonl")
    events.emit("start", inputs=[])
    events.emit("progress", input="a", at=10, size=30, read=1, refused=0)
    shown._looked_at = 0.0
    (stage,) = shown.overview()["stages"]
    assert (stage["state"], stage["now"]["at"]) == ("running", 10)
    stamps.append(shown.stamp())
    events.emit("wait", message="for more")
    stamps.append(shown.stamp())
    events.close()
    log_loss(1, 3.5, run_dir=tmp_path, tokens=7)
    growing.seal()
    shown._looked_at = 0.0
    about = shown.overview()
    assert about["stages"][0]["message"] == "for more"
    assert about["datasets"][0]["sealed"] is True
    assert about["losses"][0]["loss"] == [3.5]
    stamps.append(shown.stamp())
    assert len(set(stamps)) == len(stamps)


def test_a_damaged_dataset_is_told_and_hides_no_other(tmp_path: Path) -> None:
    made_dataset(tmp_path / "good")
    made_dataset(tmp_path / "bad")
    record = tmp_path / "bad" / "_log" / f"{2:020d}.json"
    record.chmod(0o644)
    record.write_bytes(record.read_bytes().replace(b'"rows"', b'"rowz"', 1))
    about = {one["key"]: one for one in Pipeline(str(tmp_path)).overview()["datasets"]}
    assert about["good"]["error"] is None
    assert about["bad"]["error"]["what"]


def test_the_log_of_a_damaged_dataset_is_not_said_to_be_missing(tmp_path: Path) -> None:
    (tmp_path / "bad" / "_log").mkdir(parents=True)
    (tmp_path / "bad" / "_log" / f"{0:020}.json").write_text("x")
    watch = Watch(str(tmp_path), WatchConfig())
    watch.overview()
    with pytest.raises(BadConfig, match="the log of bad cannot be read") as caught:
        watch.log("bad")
    assert caught.value.why == "this is not a record"
    assert caught.value.do == "see Pipeline for what is wrong with it"


def test_links_are_not_followed(tmp_path: Path) -> None:
    made_dataset(tmp_path / "outside" / "data")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "outside" / "run.toml").write_text("[loader]\n")
    log_loss(1, 2.0, run_dir=tmp_path / "outside")
    (tmp_path / "outside" / "_events.jsonl").write_text('{"stage": "s", "kind": "start"}\n')
    for name in ("run.toml", "loss.jsonl", "_events.jsonl"):
        (tmp_path / "root" / name).symlink_to(tmp_path / "outside" / name)
    shown = Pipeline(str(tmp_path / "root"))
    about = shown.overview()
    assert (about["datasets"], about["stages"], about["losses"]) == ([], [], [])
    assert shown.run_files == {}
    beside = Pipeline(str(tmp_path / "outside"))
    assert len(beside.overview()["losses"]) == len(beside.run_files) == 1


def test_rubbish_in_events_and_losses_is_no_harm(tmp_path: Path) -> None:
    deep, huge = "[" * 100_000, "1" + "0" * 400
    made = [
        '{"stage": "a", "kind": "progress", "at": NaN, "size": Infinity, "read": "x", "more": NaN}',
        '{"stage": "a", "kind": "ledger", "step": NaN, "sources": [1, {"trained": NaN}]}',
        f'{{"stage": "a", "kind": "warn", "message": "{"m" * 10_000}", "time": {huge}}}',
        deep,
        *(f'{{"stage": "s{k}", "kind": "start"}}' for k in range(1000)),
    ]
    (tmp_path / "_events.jsonl").write_text("\n".join([*made, ""]))
    losses = ['{"step": 1, "loss": NaN}', f'{{"step": 2, "loss": {huge}}}', deep, "{}"]
    losses += [f'{{"step": {huge}, "loss": 1}}', '{"step": 3, "loss": 2, "took_s": null}']
    (tmp_path / "loss.jsonl").write_text("\n".join([*losses, ""]))
    (tmp_path / "deep.jsonl").write_text(deep)
    about = Pipeline(str(tmp_path)).overview()
    json.dumps(about, allow_nan=False)
    assert len(about["stages"]) == module.MOST_STAGES
    stage = about["stages"][0]
    assert stage["now"] == {"at": 0.0, "size": 0.0, "read": 0.0}
    assert len(stage["notices"][0]["message"]) == module.MOST_MESSAGE
    (loss,) = about["losses"]
    assert (loss["step"], loss["loss"]) == ([1, 3], [None, 2.0])


def test_a_line_without_end_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TAIL_BYTES", 1000)
    path = tmp_path / "events"
    path.write_text("")
    tail = Tail(path, 1000)
    with path.open("a") as file:
        for part in ("x" * 900, "x" * 900, "x" * 900, '\n{"a": 1}\n'):
            file.write(part)
            file.flush()
            found = list(tail.read())
            assert len(tail._rest) <= 1000
    assert found == [{"a": 1}]


def test_rates_and_backlogs_over_time() -> None:
    stage = Stage("chunk")
    stage.take({"time": 100.0, "kind": "start"})
    for k in range(3000):
        stage.take(
            {"time": 100.0 + k, "kind": "progress", "at": 2e6 * k, "size": 6e9, "read": 10 * k}
        )
    stage.take({"time": 3200.0, "kind": "end", "sealed": True})
    about = stage.about(3201.0)
    assert about["state"] == "sealed"
    assert len(about["bytes_per_s"]) <= module.POINTS + 2
    assert {round(rate) for _, rate in about["bytes_per_s"]} == {2_000_000}
    assert {round(rate) for _, rate in about["documents_per_s"]} == {10}
    assert about["backlog"][-1] == [3099.0, 6e9 - 2e6 * 2999]
    train = Stage("train")
    for k in range(1000):
        train.take(
            {
                "time": 1.0 + k,
                "kind": "ledger",
                "step": k,
                "sources": [{"source": "a", "trained": k}],
            }
        )
    told = train.about(1001.0)["ledgers"]
    assert len(told) <= 2 * module.POINTS + 1
    assert told[-1]["sources"][0]["trained"] == 999
    assert [one["step"] for one in told] == sorted(one["step"] for one in told)
    silent = Stage("push")
    silent.take({"time": 100.0, "kind": "progress", "at": 1, "size": None})
    assert silent.about(101.0)["state"] == "running"
    assert silent.about(100.0 + module.SILENT_S + 1)["state"] == "silent"


def test_a_mirror_of_what_is_sealed_has_ended(tmp_path: Path) -> None:
    made_dataset(tmp_path / "done")
    GrowingDataset(tmp_path / "live")
    for name, size in (("done", 10), ("live", 10)):
        with contextlib.closing(Events("pull", path=tmp_path / name / "_events.jsonl")) as events:
            events.emit("progress", at=10, size=size)
    with contextlib.closing(Events("push", path=tmp_path / "done" / "_events.jsonl")) as events:
        events.emit("progress", at=9, size=10)
    shown = Pipeline(str(tmp_path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SILENT_S", -1.0)
        states = {(one["where"], one["name"]): one["state"] for one in shown.overview()["stages"]}
    assert states == {
        ("done", "pull"): "ended", ("done", "push"): "silent", ("live", "pull"): "silent",
    }  # fmt: skip


def test_a_run_has_its_stages() -> None:
    run = Stage("run")
    run.take({"time": 1.0, "kind": "start", "stages": {"chunk": "x", "push": "y", "train": "z"}})
    run.take({"time": 2.0, "kind": "stage", "name": "chunk"})
    run.take({"time": 2.0, "kind": "stage", "name": "train"})
    run.take({"time": 2.0, "kind": "stage_end", "name": "nobody", "how": "done"})
    run.take({"time": 40.0, "kind": "beat"})
    told = run.about(41.0)
    assert told["state"] == "running"
    assert [(one["name"], one["state"], one["took_s"]) for one in told["stages"]] == [
        ("chunk", "runs", 39.0), ("push", "waits", 0.0), ("train", "runs", 39.0),
    ]  # fmt: skip
    assert run.about(40.0 + module.SILENT_S + 1)["state"] == "silent"
    run.take({"time": 50.0, "kind": "stage_end", "name": "chunk", "code": 1, "how": "failed"})
    run.take({"time": 60.0, "kind": "end", "stopped_by": None, "first_batch_s": 3.5})
    told = run.about(90.0)
    assert (told["state"], told["first_batch_s"]) == ("failed", 3.5)
    assert [(one["state"], one["took_s"]) for one in told["stages"]] == [
        ("failed", 48.0), ("not begun", 0.0), ("stopped", 58.0),
    ]  # fmt: skip
    run.take({"time": 100.0, "kind": "start", "stages": {"chunk": "x"}})
    run.take({"time": 101.0, "kind": "stage", "name": "chunk"})
    run.take({"time": 103.0, "kind": "stage_end", "name": "chunk", "code": 0, "how": "done"})
    run.take({"time": 104.0, "kind": "end", "stopped_by": None})
    assert run.about(105.0)["state"] == "ended"
    rubbish: list[Any] = [["a"], 7, {"x" * 9999: 1}, {str(k): k for k in range(999)}]
    for stages in rubbish:
        run.take({"time": 1.0, "kind": "start", "stages": stages})
        run.take({"time": "x", "kind": "stage_end", "name": ["a"], "how": {}})
        assert len(run.about(1.0)["stages"]) <= module.MOST_STAGES
        json.dumps(run.about(1.0), allow_nan=False)


def test_a_new_generation_is_shown_when_it_begins(tmp_path: Path) -> None:
    path = tmp_path / "cpp"
    made_dataset(path)
    watch = Watch(str(tmp_path), WatchConfig(tokenizer=None))
    for name in ("chunk", "push"):
        with contextlib.closing(Events(name, path=path / EVENTS)) as events:
            events.emit("progress", at=1, size=1)
    (before,) = watch.overview()["datasets"]
    assert (before["generation"], before["sealed"]) == (1, True)
    stamp, first = watch.pipeline.stamp(), watch.explorer("cpp")
    later = GrowingDataset(path / "_gen" / "00002")
    assert watch.pipeline.stamp() != stamp
    with contextlib.closing(Events("pull", path=path / "_gen" / "00002" / EVENTS)) as events:
        events.emit("progress", at=1, size=2)
    watch.pipeline._looked_at = 0.0
    about = watch.overview()
    (after,) = about["datasets"]
    assert (after["generation"], after["sealed"], after["shards"]) == (2, False, 0)
    assert after["id"] != before["id"]
    # the push of the earlier generation is no stage of this one
    assert [(one["where"], one["name"]) for one in about["stages"]] == [
        ("cpp", "chunk"), ("cpp/_gen/00002", "pull"),
    ]  # fmt: skip
    assert watch.explorer("cpp") is not first
    later.add([[1, 2]])
    assert watch.overview()["datasets"][0]["shards"] == 1


def test_a_file_of_events_is_read_on_and_anew(tmp_path: Path) -> None:
    path = tmp_path / "_events.jsonl"
    path.write_text('{"a": 1}\nnot json\n[1]\n{"a": 2}\n{"a"')
    tail = Tail(path)

    def read() -> list[Any]:
        return [line["a"] for line in tail.read()]

    assert read() == [1, 2]
    with path.open("a") as file:
        file.write(": 3}\n")
    assert read() == [3]
    path.write_text('{"a": 4}\n')  # begun anew, and shorter
    assert read() == [4]
    path.write_text("".join(f'{{"a": {k}}}\n' for k in range(1000)))
    assert [line["a"] for line in Tail(path, 25).read()] == [998, 999]


def test_steps_that_are_trained_again_count_once(tmp_path: Path) -> None:
    for step, loss in ((1, 3.0), (2, 2.0), (3, 9.0), (2, 2.5), (3, float("nan"))):
        log_loss(step, loss, run_dir=tmp_path)
    (about,) = Pipeline(str(tmp_path)).overview()["losses"]
    assert (about["step"], about["loss"]) == ([1, 2, 3], [3.0, 2.5, None])


def test_spikes() -> None:
    smooth = [5 * 0.99**k for k in range(500)]
    assert find_spikes([*range(500)], smooth) == []
    for step in (100, 400):
        smooth[step] += 1.0
    smooth[250] = float("nan")
    assert find_spikes([*range(500)], smooth) == [100, 250, 400]


def test_many_shards_are_as_many_bars_as_a_hundred(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BINS", 8)
    growing = GrowingDataset(tmp_path / "data")
    for k in range(20):
        growing.add([[k]])
    (about,) = Pipeline(str(tmp_path)).overview()["datasets"]
    assert len(about["bins"]) <= module.BINS
    assert sum(one["count"] for one in about["bins"]) == 20
    assert sum(one["rows"] for one in about["bins"]) == 20


# Rejects


def test_rejects_by_reason(shop: Path) -> None:
    log = Log.open(shop / "cpp")
    told = rejects.reasons(log)
    assert told["reasons"][0] == ["near_duplicate", 6]
    assert told["read"] == told["kept"] + 6
    page = rejects.page(log)
    assert len(page["rejects"]) == 6
    assert page["next"] is None
    assert rejects.page(log, "exact_duplicate")["rejects"] == []
    assert rejects.page(log, "near_duplicate") == page
    behind = rejects.page(log, "", len(log.state.split("rejects")) - 1, 10**12)
    assert behind == {"rejects": [], "next": None}


def test_rejects_come_in_pages(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log.open(shop / "cpp")
    whole = rejects.page(log)["rejects"]
    monkeypatch.setattr(rejects, "PAGE", 2)
    found: list[Any] = []
    at: list[int] | None = [0, 0]
    while at is not None:
        page = rejects.page(log, "", *at)
        assert len(page["rejects"]) <= 2
        found += page["rejects"]
        at = page["next"]
    assert found == whole


def test_a_near_duplicate_stands_beside_what_it_repeats(shop: Path) -> None:
    log = Log.open(shop / "cpp")
    for one in rejects.page(log, "near_duplicate")["rejects"]:
        found = rejects.pair(log, one["file_number"], one["byte"])
        assert found["text"] == Path(one["source"]).read_text()
        kept = found["kept"]
        assert kept is not None
        assert kept["text"] == Path(kept["file"]).read_text()
        ours, theirs = found["text"].splitlines(), kept["text"].splitlines()
        assert sum(a != b for a, b in zip(ours, theirs, strict=True)) == 1


def test_a_line_that_is_no_record_is_shown(shop: Path) -> None:
    log = Log.open(shop / "prose")
    (one,) = rejects.page(log)["rejects"]
    found = rejects.pair(log, one["file_number"], one["byte"])
    assert one["reason"] == "no_text"
    assert (found["text"], found["kept"]) == (None, None)
    assert found["text_missing"]
    assert rejects.pair(log, 99, 0)["reject"] is None


def test_only_inputs_that_the_log_names_are_opened(shop: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("nobody's business")
    log = Log.open(shop / "cpp")
    name = next(iter(log.state.inputs))
    for line in (
        {"input": str(secret), "source": str(secret), "start": 0, "end": 5},
        {"input": name, "source": str(secret), "start": 0, "end": 5},
        {"input": name, "source": f"{name}/../../{secret.name}", "start": 0, "end": 5},
    ):
        text, why = rejects._input_text(log, line)
        assert text is None
        assert why


def test_inputs_are_read_with_care(shop: Path, tmp_path: Path) -> None:
    log = Log.open(shop / "prose")
    (name,) = log.state.inputs
    end = len(Path(name).read_bytes().splitlines()[0])

    def told(name: str = name, start: int = 0, end: int = end, inside: Path | None = None) -> str:
        line = {"input": name, "source": "", "start": start, "end": end}
        return rejects._input_text(log, line, None if inside is None else str(inside))[1]

    assert told() == ""
    assert told(inside=Path(name).parent) == ""
    assert "it lies outside the directory that is served" in told(inside=tmp_path)
    assert told(start=-5) == f"its place is from byte -5 to {end}"
    assert told(start=5, end=3) == "its place is from byte 5 to 3"
    pipe = tmp_path / "pipe.jsonl"
    os.mkfifo(pipe)
    log.state.inputs[str(pipe)] = log.state.inputs[name]
    assert "it is no regular file" in told(str(pipe))


@pytest.mark.parametrize(
    ("host", "is_bounded"),
    [(None, False), ("localhost", False), ("127.0.0.1", False), ("::1", False), ("0.0.0.0", True),
     ("10.0.0.7", True), ("name.example", True)],
)  # fmt: skip
def test_other_machines_see_no_input_outside(
    tmp_path: Path, host: str | None, is_bounded: bool
) -> None:
    found = Watch(str(tmp_path), WatchConfig(host=host)).reads_in
    assert found == (str(tmp_path) if is_bounded else None)


def test_a_log_does_not_move_while_it_is_read(tmp_path: Path) -> None:
    growing = GrowingDataset(tmp_path / "live")
    growing.add([[1, 2]])
    shown = Pipeline(str(tmp_path))
    shown.refresh()
    log = shown.log("live")
    assert log is not None
    growing.add([[3, 4]])
    shown.refresh()
    assert len(log.state.split("train")) == 1
    later = shown.log("live")
    assert later is not None
    assert len(later.state.split("train")) == 2
    assert shown.log("nothing") is None


def test_a_file_that_is_refused_is_read_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "loss.jsonl", []
    path.write_text("{}\n")
    (tmp_path / "other.txt").write_text("")
    judge = module.is_losses

    def judged(path: Path) -> bool:
        seen.append(path)
        return judge(path)

    monkeypatch.setattr(module, "is_losses", judged)
    shown = Pipeline(str(tmp_path))
    for _ in range(3):
        shown._looked_at = 0.0
        assert shown.overview()["losses"] == []
    assert seen == [path]
    path.write_text('{"step": 1, "loss": 2.0}\n')
    shown._looked_at = 0.0
    assert shown.overview()["losses"][0]["loss"] == [2.0]
    assert seen == [path, path]
    shown._wait_s = 1e9  # after a look that took long
    log_loss(1, 2.0, run_dir=tmp_path / "later")
    assert len(shown.overview()["losses"]) == 1
