"""Look into any batch of a run: its rows as the model sees them, and where each token comes from.

In:    a loader of a run, opened by whoever knows how; the number of a batch
Out:   JSON for the page: documents of a batch, tokens of a row, the mixture of a stretch, places
       of documents that were searched
Keeps: a jump to any batch reads token counts alone, and no more than PLACE_S of planning after the
       first time: places on the way are remembered
Never: makes a batch, waits for data that is not there, changes anything of the run
"""

import contextlib
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrays import Int64s, offsets_of
from penstock.errors import BadConfig, PenstockError, ProducerStalled
from penstock.rollout.batch import RolloutBatch
from penstock.rollout.loader import RolloutDataLoader
from penstock.stream.plan import Rows
from penstock.supply.explain import Span, explain_rows
from penstock.supply.pretrain import RowLoader
from penstock.supply.sources.dataset import ShardSource
from penstock.tokenize.tokenizer import Tokenizer

Json = dict[str, Any]

PLACE_S: Final = 0.2
"""After so much planning a place is remembered."""
MOST_PLACES: Final = 128
STRIDE: Final = 512
"""Batches that are passed over at once."""
LOOK_S: Final = 2.0
"""A search says after so long what it has found so far."""
GO_S: Final = 3.0
"""A way to a batch is left after so long; places are kept, and the next ask goes on from there."""
ROLLOUT_STRIDE: Final = 16
"""Batches of rollouts between places that are remembered."""
COUNT_S: Final = 3.0
"""Batches of data that grows are counted no more often than that."""
MOST_HITS: Final = 40
MOST_POINTS: Final = 3000
"""Documents of a stretch that are drawn."""
BUCKETS: Final = 120
"""Points of a curve over a stretch."""
MOST_STRETCH: Final = 20_000
"""Batches of a stretch at most."""
MOST_ROWS: Final = 400_000
"""Rows that are planned at once at most, however many a batch has."""
MOST_READ_SHARDS: Final = 48
"""Shards whose provenance is read to know the places of documents in their files."""
EXCERPT: Final = 160


class Cursor:
    """A loader that goes to any batch, back and forth. Use it under its lock."""

    def __init__(self, loader: RowLoader) -> None:
        self.loader = loader
        self.lock = threading.Lock()
        self._places: dict[int, Json] = {0: loader.state_dict()}

    def go(self, batch: int) -> bool:
        """Stand before a batch; False if the data ends before it. ProducerStalled if that batch
        is not there yet; TimeoutError after GO_S: the same call goes on from there."""
        loader = self.loader
        best = max(step for step in self._places if step <= batch)
        if loader.is_over or loader.step > batch or loader.step < best:
            loader.load_state_dict(self._places[best])
        size = max(1, min(STRIDE, MOST_ROWS // 4 // loader.global_batch_size))
        began = since = time.monotonic()
        while loader.step < batch:
            before = loader.step
            try:
                loader.skip(min(size, batch - before))
            except ProducerStalled:
                if size == 1:
                    raise
                size = max(1, size // 8)
                continue
            if loader.step == before:
                return False
            if time.monotonic() - since > PLACE_S:
                _remember(self._places, self.loader)
                since = time.monotonic()
            if time.monotonic() - began > GO_S and loader.step < batch:
                _remember(self._places, self.loader)
                raise TimeoutError
        return True

    def peek(self, batches: int) -> Rows:
        """The rows of so many batches, or of as many as are there."""
        while True:
            try:
                return self.loader.peek(batches)
            except ProducerStalled:
                if batches == 1:
                    raise
                batches = max(1, batches // 4)


def _remember(places: dict[int, Json], loader: RowLoader | RolloutDataLoader) -> None:
    """Keep the place where a loader stands; of too many every other one goes."""
    places[loader.step] = loader.state_dict()
    if len(places) > MOST_PLACES:
        for step in sorted(places)[1:-1:2]:
            del places[step]


class Explorer:
    """The batches of one run."""

    def __init__(
        self, key: str, title: str, open_loader: Callable[[], RowLoader], *, config: str = "",
        about: str = "",
    ) -> None:  # fmt: skip
        """`config` is the run's description, if there is one; `about` is told beside the title."""
        self.key, self.title, self.about = key, title, about
        self._open, self._config = open_loader, config
        self._lock = threading.Lock()
        self._cursors: dict[str, Cursor] = {}
        self._failed: tuple[float, Exception] | None = None
        self._pieces: dict[int, tuple[str, int]] = {}
        self._counted: tuple[list[int], int, bool] | None = None
        self._counting: threading.Thread | None = None
        self._count_again = 0.0
        """When batches of data that grows may be counted again: it takes time from the trainer."""

    def _cursor(self, use: str = "look") -> Cursor:
        """The one to look with, or another one for long ways: nobody waits for a search."""
        with self._lock:
            if self._failed is not None and time.monotonic() < self._failed[0] + LOOK_S:
                raise self._failed[1]
            if use not in self._cursors:
                try:
                    self._cursors[use] = Cursor(self._open())
                except (PenstockError, OSError) as error:
                    self._failed = time.monotonic(), error
                    raise
            return self._cursors[use]

    def close(self) -> None:
        for cursor in self._cursors.values():
            cursor.loader.close()

    # A batch, and a row of it

    def head(self) -> Json:
        """What a run is: its sources and weights, how long rows and batches are, how many."""
        cursor = self._cursor()
        with cursor.lock:
            loader = cursor.loader
            shares = loader.weights_at(0)
            return {
                "key": self.key, "title": self.title, "about": self.about,
                "seq_len": loader.config.seq_len, "rows": loader.global_batch_size,
                "pack": loader.config.pack, "seed": loader.config.seed,
                "weigh": loader.config.weigh,
                "sources": [
                    {"name": source.name, "url": source.url, "weight": share,
                     "shards": source.num_known, "sealed": source.is_closed,
                     "is_chat": source.chat is not None}
                    for source, share in zip(loader.sources, shares, strict=True)
                ],
                **self._count(loader),
            }  # fmt: skip

    def _count(self, loader: RowLoader) -> Json:
        """How many batches there are: counted beside, estimated until that is done."""
        for source in loader.sources:
            if not source.is_closed:
                source.has_shard(source.num_known)  # looks for more
        known = [source.num_known for source in loader.sources]
        if self._counted is not None and self._counted[0] == known:
            return {"batches": self._counted[1], "exact": True, "final": self._counted[2]}
        if time.monotonic() >= self._count_again and not (
            self._counting is not None and self._counting.is_alive()
        ):
            self._counting = threading.Thread(target=self._count_beside, daemon=True)
            self._counting.start()
        tokens = sum(source.num_tokens() for source in loader.sources)
        each = loader.global_batch_size * loader.config.seq_len
        return {"batches": -(-tokens // each), "exact": False, "final": False}

    def _count_beside(self) -> None:
        began = time.monotonic()
        try:
            cursor = self._cursor("count")
            with cursor.lock:
                loader = cursor.loader
                for source in loader.sources:
                    if not source.is_closed:
                        source.has_shard(source.num_known)
                known = [source.num_known for source in loader.sources]
                found = loader.get_num_batches()
                self._counted = known, int(found), found.final
        except (PenstockError, OSError):
            pass  # whoever looks at a batch is told
        finally:
            now = time.monotonic()
            self._count_again = now + max(COUNT_S, 20 * (now - began))

    def batch(self, n: int) -> Json:
        """The documents in every row of a batch; nothing but the plan is looked at."""
        cursor = self._cursor()
        with cursor.lock:
            rows = self._stand(cursor, n)
            loader = cursor.loader
            segments = rows.segments
            lines: list[list[list[int]]] = [[] for _ in range(loader.global_batch_size)]
            for row, source, _, shard, document, begin, count in segments.tolist():
                lines[row].append([source, count, shard, document, begin])
            return {
                "batch": n, "first_row": n * loader.global_batch_size, "rows": lines,
                "fills": rows.fills.tolist(), "seq_len": loader.config.seq_len,
                "documents": len(segments), "tokens": int(rows.fills.sum()),
                "sources": [source.name for source in loader.sources],
            }  # fmt: skip

    def _stand(self, cursor: Cursor, n: int) -> Rows:
        """The rows of a batch; an error says what there is instead."""
        try:
            is_there = cursor.go(n)
            rows = cursor.peek(1) if is_there else None
        except ProducerStalled as error:
            raise _not_yet(n, cursor.loader.step, error.where) from None
        except TimeoutError:
            raise _still(n, cursor.loader.step) from None
        if rows is None or not len(rows.fills):
            raise _none(n, cursor.loader.step)
        return rows

    def row(self, n: int, row: int) -> Json:
        """The tokens of one row of a batch, and where each comes from."""
        cursor = self._cursor()
        with cursor.lock:
            loader = cursor.loader
            rows = self._stand(cursor, n)
            segments = rows.segments[rows.segments[:, 0] == row]
            fill = int(rows.fills[row]) if row < len(rows.fills) else 0
            bos, _ = loader.around
            spans = explain_rows(segments, loader.sources, loader.tokenizer, lead=int(bos >= 0))
            ids, trained, roles = [], [], []
            for segment, span in zip(segments.tolist(), spans, strict=True):
                ids += self._ids(loader, segment)
                marks, said = _marks(span)
                trained += marks
                roles += said
            pieces, sizes = self._spelled(loader.tokenizer, ids, loader.around)
            return {
                "batch": n, "row": row, "rows": loader.global_batch_size, "fill": fill,
                "seq_len": loader.config.seq_len, "ids": ids, "pieces": pieces, "sizes": sizes,
                "trained": trained, "roles": roles if any(roles) else None,
                "special": self._special(loader.tokenizer, ids, loader.around),
                "spans": [
                    self._told(loader, segment, span)
                    for segment, span in zip(segments.tolist(), spans, strict=True)
                ],
            }  # fmt: skip

    def _ids(self, loader: RowLoader, segment: list[int]) -> list[int]:
        """The tokens of a segment, those around its document included."""
        _, source, _, shard, document, begin, count = segment
        found = loader.sources[source].ids_of(shard, [document])[0].tolist()
        bos, eos = loader.around
        found = [bos] * (bos >= 0) + found + [eos] * (eos >= 0)
        return [int(one) for one in found[begin : begin + count]]

    def _spelled(
        self, tokenizer: Tokenizer | None, ids: list[int], around: tuple[int, int]
    ) -> tuple[list[str], list[int]]:
        """What each token stands for, and how many bytes of the text it is."""
        if tokenizer is None:
            return [str(one) for one in ids], [0] * len(ids)
        for one in {*ids} - self._pieces.keys():
            raw = tokenizer.decode_bytes([one])
            try:
                text = raw.decode()
            except UnicodeDecodeError:
                text = "".join(f"‹{byte:02x}›" for byte in raw)
            self._pieces[one] = text, len(raw)
        # what is put around a document is no byte of it
        sizes = [0 if one in around else self._pieces[one][1] for one in ids]
        return [self._pieces[one][0] for one in ids], sizes

    def _special(
        self, tokenizer: Tokenizer | None, ids: list[int], around: tuple[int, int]
    ) -> list[int]:
        """Which places hold special tokens."""
        known = {*around} | {*tokenizer.special_tokens.values()} if tokenizer else {*around}
        return [place for place, one in enumerate(ids) if one in known]

    def _told(self, loader: RowLoader, segment: list[int], span: Span) -> Json:
        """A document of a row for the page."""
        document = span.document
        doc_id = document.get("doc_id")
        return {
            "first": span.first, "last": span.last, "source": segment[1], "name": span.source,
            "file": document.get("source", ""), "doc_id": None if doc_id is None else str(doc_id),
            "start": document.get("start"), "end": document.get("end"),
            "part": document.get("part"), "parts": document.get("parts"),
            "line": document.get("line"), "language": document.get("language"),
            "shard": span.shard, "shard_number": segment[3], "shard_row": span.shard_row,
            "tokens": list(span.tokens), "text_bytes": span.text_bytes,
            "file_bytes": span.file_bytes, "kept": span.kept, "epoch": span.epoch,
            "is_chat": span.loss_spans is not None, "ban": self.ban_command(doc_id),
        }  # fmt: skip

    def ban_command(self, doc_id: int | None) -> str:
        """What to type so that the next run does not see a document."""
        if doc_id is None:
            return ""
        if not self._config:
            return f"DocumentConfig(ban=[{doc_id}])"
        return f"penstock explain --config {shlex.quote(self._config)} --ban {doc_id}"

    # A stretch of batches: mixture, fill, lengths, order

    def stretch(self, first: int, count: int, *, by: str = "shards") -> Json:
        """What a stretch of batches is made of, and where in the data its documents lie: `by` the
        order of the shards, or of the `files` that they were made of."""
        cursor = self._cursor("far")
        with cursor.lock:
            loader = cursor.loader
            self._stand(cursor, first)
            unit = loader.global_batch_size
            rows = cursor.peek(max(1, min(count, MOST_STRETCH, MOST_ROWS // unit)))
            batches = -(-len(rows.fills) // unit)
            segments = rows.segments
            found = self._points(loader, rows, first, by)
            with contextlib.suppress(ProducerStalled, TimeoutError):
                cursor.go(first + batches)  # the ledger is that after the stretch
            return {
                "first": first, "count": batches, "sources": [one.name for one in loader.sources],
                "seq_len": loader.config.seq_len, "rows": unit, "weigh": loader.config.weigh,
                "curve": _curve(loader, rows, first, batches),
                "weights": [
                    [first + k, loader.weights_at((first + k) * unit)]
                    for k in range(0, batches, max(1, -(-batches // BUCKETS)))
                ],
                "lengths": [
                    _histogram(segments[segments[:, 1] == k, 6]) for k in
                    range(len(loader.sources))
                ],
                "fills": _histogram(rows.fills, loader.config.seq_len),
                "ledger": [
                    {name: getattr(line, name) for name in line.__slots__}
                    for line in loader.ledger()
                ],
                "ledger_at": loader.step, **found,
            }  # fmt: skip

    def _points(self, loader: RowLoader, rows: Rows, first: int, by: str) -> Json:
        """Documents of some rows as points: batch, source, where in its data from 0 to 1."""
        segments, unit = rows.segments, loader.global_batch_size
        step = max(1, -(-len(segments) // MOST_POINTS))
        chosen = segments[::step]
        xs = first + chosen[:, 0] // unit
        ys = np.zeros(len(chosen))
        is_by_files, files = by == "files", 0
        for number, source in enumerate(loader.sources):
            mine = np.flatnonzero(chosen[:, 1] == number)
            shards, rows_of = chosen[mine, 3], chosen[mine, 4]
            if is_by_files and len(found := np.unique(shards)) <= MOST_READ_SHARDS:
                ys[mine], count = _places_in_files(source, found.tolist(), shards, rows_of)
                files += count
            else:
                is_by_files = False
                counts = offsets_of([source.rows(k) for k in range(source.num_known)])
                total = max(1, int(counts[-1]))
                ys[mine] = (counts[np.minimum(shards, len(counts) - 1)] + rows_of) / total
        return {
            "points": [xs.tolist(), chosen[:, 1].tolist(), [round(y, 5) for y in ys.tolist()]],
            "drawn": len(chosen), "documents": len(segments),
            "by": "files" if is_by_files else "shards", "files": files,
        }  # fmt: skip

    # Search

    def search(self, query: str, at: int = 0) -> Json:
        """Documents by doc_id, or by what their file's name or their text holds, from the `at`-th
        shard of all sources on; after a while it says how far it came."""
        cursor = self._cursor()
        with cursor.lock:
            shards = [
                (number, shard)
                for number, source in enumerate(cursor.loader.sources)
                for shard in range(source.num_known)
            ]
            sources = list(cursor.loader.sources)
        hits: list[Json] = []
        deadline = time.monotonic() + LOOK_S
        done = at
        for number, shard in shards[at:]:
            if done > at and (time.monotonic() > deadline or len(hits) >= MOST_HITS):
                break
            for hit in self._in_shard(sources[number], shard, query):
                hits.append({"source": number, "name": sources[number].name, **hit})
                if len(hits) >= MOST_HITS:
                    break
            done += 1
        return {
            "query": query, "hits": hits, "looked": done, "shards": len(shards),
            "next": done if done < len(shards) else None,
        }  # fmt: skip

    def _in_shard(self, source: ShardSource, shard: int, query: str) -> Iterator[Json]:
        name = source.config.text_field
        table = source.provenance(shard)
        names = table.column_names
        matched = np.zeros(source.rows(shard), np.bool_)
        why = np.zeros(len(matched), np.int8)
        if query.isdecimal() and int(query) < 1 << 64 and "doc_id" in names:
            matched |= table.column("doc_id").to_numpy() == np.uint64(int(query))
            why[matched] = 1
        if "source" in names:
            found = _holding(table.column("source"), query) & ~matched
            why[found], matched = 2, matched | found
        texts: pa.ChunkedArray | None = None
        try:
            texts = source.provenance(shard, [name]).column(0)
            found = _holding(texts, query) & ~matched
            why[found], matched = 3, matched | found
        except PenstockError:
            pass  # a shard without such a column has documents all the same
        for row in np.flatnonzero(matched).tolist()[:MOST_HITS]:
            about = table.slice(row, 1).to_pylist()[0]
            doc_id = about.get("doc_id")
            yield {
                "shard_number": shard, "shard_row": row, "shard": source.file(shard).name,
                "doc_id": None if doc_id is None else str(doc_id), "file": about.get("source", ""),
                "start": about.get("start"), "end": about.get("end"),
                "n_tokens": about.get("n_tokens"), "why": ("", "doc_id", "file", "text")[why[row]],
                "excerpt": "" if texts is None else _excerpt(str(texts[row].as_py() or ""), query),
                "ban": self.ban_command(doc_id),
            }  # fmt: skip

    def where(self, source: int, shard: int, row: int, at: int = 0) -> Json:
        """The first batch from the `at`-th on that has a document; after a while it says how far
        it has looked."""
        cursor = self._cursor("far")
        with cursor.lock:
            deadline, n = time.monotonic() + LOOK_S, at
            unit = cursor.loader.global_batch_size
            while time.monotonic() < deadline:
                try:
                    many = max(1, min(STRIDE, MOST_ROWS // 4 // unit))
                    rows = cursor.peek(many) if cursor.go(n) else None
                except ProducerStalled:
                    return {"batch": None, "looked": n, "next": None, "live": True}
                except TimeoutError:
                    break
                if rows is None or not len(rows.fills):
                    return {"batch": None, "looked": n, "next": None, "live": False}
                segments = rows.segments
                found = np.flatnonzero(
                    (segments[:, 1] == source) & (segments[:, 3] == shard) & (segments[:, 4] == row)
                )
                if len(found):
                    line = int(segments[found[0], 0])
                    return {"batch": n + line // unit, "row": line % unit, "next": None}
                n += -(-len(rows.fills) // unit)
            return {"batch": None, "looked": n, "next": n, "live": False}


class RolloutExplorer:
    """The batches of a dataset of rollouts, made as its trainer's loader makes them."""

    def __init__(
        self, key: str, title: str, open_loader: Callable[[], RolloutDataLoader], *, about: str = ""
    ) -> None:
        self.key, self.title, self.about = key, title, about
        self._open = open_loader
        self._lock = threading.Lock()
        self._loader: RolloutDataLoader | None = None
        self._places: dict[int, Json] = {}
        self._made: tuple[int, RolloutBatch] | None = None
        self._pieces: dict[int, str] = {}

    def _opened(self) -> RolloutDataLoader:
        if self._loader is None:
            self._loader = self._open()
            self._places[0] = self._loader.state_dict()
        return self._loader

    def close(self) -> None:
        if self._loader is not None:
            self._loader.close()

    def _batch(self, n: int) -> RolloutBatch:
        """A batch, made; those before it are made once, and places on the way are remembered."""
        if self._made is not None and self._made[0] == n:
            return self._made[1]
        loader = self._opened()
        best = max(step for step in self._places if step <= n)
        if not best <= loader.step <= n or loader.is_over:
            loader.load_state_dict(self._places[best])
        began = time.monotonic()
        while True:
            step = loader.step
            try:
                batch = loader.get_batch(loader.batch_size)
            except ProducerStalled as error:
                raise _not_yet(n, step, error.where) from None
            except StopIteration:
                raise _none(n, step) from None
            late = step < n and time.monotonic() - began > GO_S
            if late or loader.step % ROLLOUT_STRIDE == 0:
                _remember(self._places, loader)
            if late:
                raise _still(n, loader.step)
            if step == n:
                self._made = n, batch
                return batch

    def head(self) -> Json:
        with self._lock:
            loader = self._opened()
            batches = loader.get_num_batches()
            source = {
                "name": self.title, "url": loader.source.url, "weight": 1.0,
                "shards": loader.source.num_known, "sealed": loader.source.is_closed,
                "is_chat": False,
            }  # fmt: skip
            return {
                "key": self.key, "title": self.title, "about": self.about, "seq_len": 0,
                "rows": loader.batch_size, "pack": "whole groups", "seed": 0, "weigh": "samples",
                "sources": [source], "batches": int(batches), "exact": True,
                "final": batches.final, "is_rollouts": True,
            }  # fmt: skip

    def batch(self, n: int) -> Json:
        """The sequences of a batch with their groups and rewards."""
        with self._lock:
            batch = self._batch(n)
            groups = list(dict.fromkeys(batch.group_ids))
            fills = batch.fills.tolist()
            return {
                "batch": n, "first_row": 0, "seq_len": batch.input_ids.shape[1], "fills": fills,
                "rows": [
                    [[groups.index(group), fill, 0, k, 0]]
                    for k, (group, fill) in enumerate(zip(batch.group_ids, fills, strict=True))
                ],
                "documents": len(fills), "tokens": int(sum(fills)), "sources": groups,
                "rewards": [_finite(one) for one in batch.rewards.tolist()],
            }  # fmt: skip

    def row(self, n: int, row: int) -> Json:
        """The tokens of a sequence with their advantages."""
        with self._lock:
            batch = self._batch(n)
            if row >= len(batch.fills):
                row = 0
            fill = int(batch.fills[row])
            ids = [int(one) for one in batch.input_ids[row, :fill]]
            gained = None
            if batch.advantages is not None:
                gained = [_finite(one) for one in batch.advantages[row, :fill].tolist()]
            groups = list(dict.fromkeys(batch.group_ids))
            tokenizer = self._opened().tokenizer
            known = {*tokenizer.special_tokens.values()} if tokenizer else set()
            for one in {*ids} - self._pieces.keys():
                self._pieces[one] = str(one) if tokenizer is None else tokenizer.decode([one])
            span = dict.fromkeys(
                ("start", "end", "part", "parts", "line", "language", "text_bytes", "file_bytes")
            )
            return {
                "batch": n, "row": row, "rows": len(batch.fills), "fill": fill,
                "seq_len": batch.input_ids.shape[1], "ids": ids,
                "pieces": [self._pieces[one] for one in ids], "sizes": [0] * fill,
                "trained": batch.loss_mask[row, :fill].astype(int).tolist(), "roles": None,
                "special": [place for place, one in enumerate(ids) if one in known],
                "advantages": gained,
                "spans": [
                    {
                        **span, "first": 0, "last": fill, "tokens": [0, fill], "epoch": 0,
                        "source": groups.index(batch.group_ids[row]), "doc_id": None, "ban": "",
                        "name": batch.group_ids[row], "file": batch.rollout_ids[row], "shard": "",
                        "shard_number": 0, "shard_row": 0, "kept": "", "is_chat": False,
                        "reward": _finite(float(batch.rewards[row])),
                        "version": int(batch.versions[row]) if len(batch.versions) else None,
                    }
                ],
            }  # fmt: skip

    def stretch(self, first: int, count: int, *, by: str = "shards") -> Json:
        raise BadConfig(
            "rollouts have no mixture or order to show", do="look at their batches, or at a run"
        )

    def search(self, query: str, at: int = 0) -> Json:
        raise BadConfig("rollouts cannot be searched", do="step through their batches")

    def where(self, source: int, shard: int, row: int, at: int = 0) -> Json:
        return self.search("")


def _finite(value: float) -> float | None:
    """JSON has no NaN."""
    return round(value, 6) if np.isfinite(value) else None


def _not_yet(n: int, there: int, where: str) -> BadConfig:
    return BadConfig(
        f"batch {n:,} is not there yet",
        where=where,
        why=f"the data that is made so far ends with batch {there - 1:,}"
        if there
        else "no batch is full so far",
        do="wait: this page shows it as soon as its shards are there",
    )


def _still(n: int, there: int) -> BadConfig:
    return BadConfig(
        f"still planning batch {n:,}: at {there:,}",
        why=f"it takes longer than {GO_S:g} s to get there for the first time",
        do="ask again: it goes on from there",
    )


def _none(n: int, there: int) -> BadConfig:
    return BadConfig(
        f"there is no batch {n:,}",
        why=f"the run ends with batch {there - 1:,}",
        do="choose a number up to that one",
    )


def _marks(span: Span) -> tuple[list[int], list[str]]:
    """Which tokens of a range are trained, and who says them."""
    count = span.last - span.first
    if span.loss_spans is None:
        return [0] + [1] * (count - 1) if count else [], [""] * count
    first, last = span.tokens
    trained = np.zeros(max(last, len(span.roles)), np.int64)
    for begin, end in zip(span.loss_spans[::2], span.loss_spans[1::2], strict=True):
        trained[begin:end] = 1
    return trained[first:last].tolist(), span.roles[first:last]


def _curve(loader: RowLoader, rows: Rows, first: int, batches: int) -> Json:
    """Shares of the sources, and how full rows are, in buckets over a stretch of batches."""
    unit, sources = loader.global_batch_size, len(loader.sources)
    each = max(1, -(-batches // BUCKETS))
    segments = rows.segments
    bucket = segments[:, 0] // (unit * each)
    count = -(-batches // each)
    key = bucket.astype(np.int64) * sources + segments[:, 1]
    size = count * sources
    tokens = np.bincount(key, segments[:, 6], size).reshape(count, sources)
    begun = segments[:, 5] == 0
    samples = np.bincount(key[begun], minlength=size).reshape(count, sources)
    places = np.bincount(np.arange(len(rows.fills)) // (unit * each), minlength=count)
    filled = np.bincount(np.arange(len(rows.fills)) // (unit * each), rows.fills, count)
    fill = filled / np.maximum(1, places * loader.config.seq_len)
    shared = tokens if loader.config.weigh == "tokens" else samples
    sums = np.maximum(1, shared.sum(axis=1, keepdims=True))
    return {
        "batch": [first + k * each for k in range(count)], "each": each,
        "shares": [[round(x, 5) for x in line] for line in (shared / sums).T.tolist()],
        "tokens": tokens.sum(axis=0).astype(np.int64).tolist(),
        "samples": samples.sum(axis=0).tolist(),
        "fill": [round(x, 5) for x in fill.tolist()],
    }  # fmt: skip


def _histogram(values: npt.NDArray[Any], most: int = 0) -> Json:
    """Counts of values in at most 40 bins from 0 on."""
    if not len(values):
        return {"width": 1, "counts": [], "most": 0, "mean": 0, "count": 0}
    highest = max(int(values.max()), most)
    width = max(1, -(-(highest + 1) // 40))
    counts = np.bincount(values // width, minlength=highest // width + 1)
    return {
        "width": width, "counts": counts.tolist(), "most": int(values.max()),
        "mean": round(float(values.mean()), 1), "count": len(values),
    }  # fmt: skip


def _places_in_files(
    source: ShardSource, read: list[int], shards: npt.NDArray[Any], rows: npt.NDArray[Any]
) -> tuple[npt.NDArray[np.float64], int]:
    """Where documents lie in the files that the shards `read` were made of, from 0 to 1: files by
    their names, documents by where they begin. Also says how many files there are."""
    names, starts, at = [], [], {}
    total = 0
    for shard in read:
        table = source.provenance(shard)
        columns = table.column_names
        at[shard] = total
        total += len(table)
        nobody = pa.array([""] * len(table))
        names.append(table.column("source") if "source" in columns else nobody)
        starts.append(
            table.column("start").to_numpy() if "start" in columns else np.arange(len(table))
        )
    pieces = [chunk for one in names for chunk in getattr(one, "chunks", [one])]
    coded = pa.chunked_array(pieces).combine_chunks().cast(pa.large_string()).dictionary_encode()
    order = np.argsort(np.array(coded.dictionary.to_pylist(), dtype=object))
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    code = rank[coded.indices.to_numpy()]
    sorted_rows: Int64s = np.lexsort((np.concatenate(starts), code))
    place = np.empty(total, np.float64)
    place[sorted_rows] = np.arange(total) / max(1, total)
    base = np.array([at[shard] for shard in shards.tolist()], np.int64)
    return place[base + rows], len(order)


def _holding(column: pa.ChunkedArray, query: str) -> npt.NDArray[np.bool_]:
    """Which texts hold a word, in capitals or not."""
    if not query:
        return np.zeros(len(column), np.bool_)
    try:
        found = pc.match_substring(column, query, ignore_case=True)
    except pa.ArrowException:
        return np.zeros(len(column), np.bool_)
    answer: npt.NDArray[np.bool_] = pc.fill_null(found, False).to_numpy()
    return answer


def _excerpt(text: str, query: str) -> str:
    """Some characters around what was looked for.

    >>> _excerpt("a needle in a haystack", "NEEDLE")
    'a needle in a haystack'
    """
    at = max(0, text.lower().find(query.lower()))
    first = max(0, at - EXCERPT // 3)
    part = text[first : first + EXCERPT]
    return ("…" if first else "") + part + ("…" if first + EXCERPT < len(text) else "")
