"""What lies in a directory, opened to be looked at: its pipeline, and the batches of each run.

In:    a directory; how datasets that no run describes are to be read
Out:   the pipeline, and an explorer for each run and dataset, opened when it is first asked for
Keeps: a run as it is: its loader is opened beside it, leaves no trace and waits for nothing
Never: serves anything: that is the server's
"""

import contextlib
import functools
import ipaddress
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import BadConfig, PenstockError
from penstock.options import MOST_SEED, checked_path, whole
from penstock.store.log import Log, chunk_length
from penstock.watch.explorer import Explorer, RolloutExplorer
from penstock.watch.pipeline import Pipeline

if TYPE_CHECKING:
    from penstock.rollout.loader import RolloutDataLoader
    from penstock.supply.pretrain import RowLoader


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchConfig:
    """Where the page is served, and how batches of datasets without a run's file are made."""

    port: int = 0
    """The port; 0 takes a free one."""
    host: str | None = None
    """Serve to other machines too, at this address. By default to this machine only."""
    tokenizer: str | None = None
    """Spells the tokens of datasets that no run describes; by default ./tokenizer or one beside
    the dataset, if it is the dataset's own."""
    chunk_size: int | None = None
    """Tokens of a row, for such datasets; by default what their chunks were made for, or 2048."""
    batch_size: int = 8
    """Rows of a batch, for such datasets."""
    seed: int = 0
    """The seed of the shuffle, for such datasets."""
    pack: str = "bestfit"
    """How rows are packed, for such datasets: bestfit, concat or pad."""
    bans: int | None = None
    """How many bans there were when the runs began; by default all that there are."""

    def __post_init__(self) -> None:
        whole("port", self.port, 0, 65535)
        whole("batch_size", self.batch_size, 1)
        whole("seed", self.seed, 0, MOST_SEED)
        if self.chunk_size is not None:
            whole("chunk_size", self.chunk_size, 1)
        if self.bans is not None:
            whole("bans", self.bans, 0)
        if self.tokenizer is not None:
            checked_path("tokenizer", self.tokenizer)


Looks = Explorer | RolloutExplorer


class Watch:
    """What the routes answer from: the pipeline, and an explorer for each run."""

    def __init__(self, root: str, config: WatchConfig) -> None:
        self.pipeline = Pipeline(root)
        self._config = config
        self._lock = threading.Lock()
        self._explorers: dict[str, Looks] = {}
        self._generations: dict[str, Path] = {}
        """Of each dataset, the generation that its explorer looks at."""

    def explorers(self) -> dict[str, Looks]:
        """One for each run's description, and for each dataset, which the given options make."""
        with self._lock:
            for key, path in list(self.pipeline.run_files.items()):
                if key not in self._explorers:
                    self._explorers[key] = Explorer(
                        key, key, functools.partial(_open_run, path, self._config.bans),
                        config=str(path), about="run",
                    )  # fmt: skip
            for key, dataset in list(self.pipeline.datasets.items()):
                if dataset.log is None or self._generations.get(key) == dataset.shown:
                    continue
                if key in self._explorers:
                    self._explorers[key].close()
                self._explorers[key] = self._of_dataset(key, dataset.log)
                self._generations[key] = dataset.shown
            return dict(self._explorers)

    def _of_dataset(self, key: str, log: Log) -> Looks:
        config, opened = self._config, log.state.opened
        path = Path(log.store.url)  # of the generation that is shown
        if opened is not None and opened.config.get("kind") == "rollouts":
            made = functools.partial(_open_rollouts, path, config)
            return RolloutExplorer(key, key, made, about=f"rollouts, {config.batch_size} a batch")
        told = f"dataset, {config.batch_size} rows a batch, seed {config.seed}"
        return Explorer(key, key, functools.partial(_open_dataset, path, config), about=told)

    def explorer(self, key: str) -> Looks:
        known = self.explorers()
        if key not in known:
            raise BadConfig(
                f"there is no run {key!r}", do=f"choose from {', '.join(known) or 'none'}"
            )
        return known[key]

    def log(self, key: str) -> Log:
        """A dataset's log as it is now: it does not move while somebody reads it."""
        found = self.pipeline.log(key)
        if found is None:
            dataset = self.pipeline.datasets.get(key)
            if dataset is not None:
                raise BadConfig(
                    f"the log of {key} cannot be read",
                    why=(dataset.error or {}).get("what", ""),
                    do="see Pipeline for what is wrong with it",
                )
            known = list(self.pipeline.datasets)
            raise BadConfig(
                f"there is no dataset {key!r}", do=f"choose from {', '.join(known) or 'none'}"
            )
        return found

    @property
    def reads_in(self) -> str | None:
        """The directory that inputs are read in where other machines may ask; None for any."""
        host = self._config.host
        with contextlib.suppress(ValueError):
            if host in (None, "localhost") or ipaddress.ip_address(host or "").is_loopback:
                return None
        return str(self.pipeline.root)

    def overview(self) -> dict[str, Any]:
        about = self.pipeline.overview()
        runs = [
            {"key": key, "title": one.title, "about": one.about}
            for key, one in self.explorers().items()
        ]
        return {**about, "runs": runs}

    def close(self) -> None:
        for explorer in self._explorers.values():
            explorer.close()


def _open_run(path: Path, bans: int | None) -> "RowLoader":
    from penstock.supply.run_file import open_run

    return open_run(path, bans=bans)


def _open_dataset(path: Path, config: WatchConfig) -> "RowLoader":
    """A loader of a dataset that no run describes."""
    from penstock.stream.plan import PlanConfig
    from penstock.supply.conversation import ConversationDataLoader
    from penstock.supply.pretrain import PretrainDataLoader
    from penstock.supply.settings import DocumentConfig, LoaderRun

    log = Log.open(path)
    tokenizer = config.tokenizer or _own_tokenizer(path, log)
    opened = log.state.opened
    steps = ((opened.config.get("prepare") if opened else None) or {}).get("steps") or []
    chat = next((step for step in steps if step.get("step") == "conversations"), None)
    run = LoaderRun(rank=0, world_size=1, stall_s=0.0)
    plan = PlanConfig(seed=config.seed, ramp=log.state.sealed is None)
    if chat is not None and tokenizer is None:
        raise BadConfig(
            "the tokenizer of the conversations is not known",
            where=str(path),
            do="give --tokenizer, or let it lie beside the dataset as tokenizer/",
        )
    if chat is not None:
        length = int(chat.get("max_length") or 2048)
        return ConversationDataLoader(
            str(path), tokenizer, config.chunk_size or length,
            str(chat.get("chat_template") or "chatml"), batch_size=config.batch_size,
            plan=plan, run=run,
        )  # fmt: skip
    return PretrainDataLoader(
        str(path), tokenizer, config.chunk_size or chunk_length(log.state) or 2048,
        batch_size=config.batch_size, pack=config.pack, plan=plan, run=run,
        documents=DocumentConfig(other_length=True),
    )  # fmt: skip


def _open_rollouts(path: Path, config: WatchConfig) -> "RolloutDataLoader":
    from penstock.rollout.loader import RolloutDataLoader
    from penstock.supply.settings import LoaderRun

    run = LoaderRun(rank=0, world_size=1, stall_s=0.0)
    tokenizer = config.tokenizer or _own_tokenizer(path, Log.open(path))
    return RolloutDataLoader(str(path), tokenizer, batch_size=config.batch_size, run=run)


def _own_tokenizer(path: Path, log: Log) -> str | None:
    """The tokenizer that a dataset was made with, if it lies where tokenizers do."""
    from penstock.tokenize.tokenizer import Tokenizer

    opened = log.state.opened
    wanted = (opened.tokenizer or opened.config.get("tokenizer")) if opened else None
    for folder in (path, path.parent, path.parent.parent, Path.cwd()):
        found = folder / "tokenizer"
        if (found / "tokenizer.json").is_file():
            with contextlib.suppress(PenstockError):
                loaded = Tokenizer.load(str(found), ready=False)
                if wanted in (None, loaded.fingerprint):
                    return str(found)
    return None
