"""Let all ranks answer alike whether a source had its shards when the plan asked.

In:    what this rank sees; a directory or bucket prefix that all ranks share
Out:   what the first rank that came to the question saw
Keeps: an answer, once given, for ever: it is created once, like a record of a log
Never: is asked where the plan waits for shards: then there is nothing to agree on
"""

from collections.abc import Sequence

from penstock.errors import BadConfig
from penstock.store.backends import AlreadyThere, Store, Unsure, open_store, read_back

Decided = dict[tuple[int, int], bool]


class Agreement:
    """Answers by source and number of the question."""

    def __init__(self, behind: str, run_dir: str | None, world_size: int) -> None:
        if behind != "wait" and world_size > 1 and not run_dir:
            raise BadConfig(
                f"behind is {behind!r} on {world_size} ranks",
                why="ranks see new shards at different times, and must decide alike",
                do="give run_dir, a directory or bucket prefix that all ranks share, or wait",
            )
        self._behind = behind
        self._store: Store | None = open_store(run_dir, make=True) if run_dir else None
        self._decided: Decided = {}

    def bind(self, about: str) -> None:
        """Let the answers be those of one run: another one must not find them."""
        if self._store is None or self._behind == "wait":
            return
        try:
            self._store.create("_behind/run.json", about.encode())
        except (AlreadyThere, Unsure):
            if read_back(self._store, "_behind/run.json") != about.encode():
                raise BadConfig(
                    "run_dir holds the answers of another run",
                    where=self._store.url,
                    why="its settings or its data differ from those of this loader",
                    do="give each run a run_dir of its own",
                ) from None

    def decide(self, source: int, number: int, ready: bool) -> bool:
        """Whether the shards count as there, for every rank."""
        key = source, number
        if key not in self._decided:
            self._decided[key] = self._agreed(source, number, ready)
        return self._decided[key]

    def _agreed(self, source: int, number: int, ready: bool) -> bool:
        if self._store is None:
            return ready
        name = f"_behind/{source:05d}-{number:012d}.json"
        try:
            self._store.create(name, b"true" if ready else b"false")
        except (AlreadyThere, Unsure):
            return read_back(self._store, name) == b"true"
        return ready

    def state(self, asked: Sequence[int]) -> list[list[int]]:
        """Answers that a plan will ask for again when it is restored: to the questions from
        `asked` on, a number for each source."""
        return [
            [source, number, int(ready)]
            for (source, number), ready in self._decided.items()
            if number >= asked[source]
        ]

    def restore(self, state: list[list[int]]) -> None:
        self._decided = {(source, number): bool(ready) for source, number, ready in state}
