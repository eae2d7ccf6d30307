"""A disk that keeps nothing it was not told to keep: what POSIX promises, and not a byte more.

In:    the calls of a run, in order
Out:   what a power loss may leave at any moment, for each way in which a disk may be unkind
Keeps: a file's bytes only once it was fsynced, a name only once its directory was
Never: touches a real file

A journal makes ext4 kinder than this: there any fsync keeps every name made before it, so that a
missing one hides behind the next. btrfs, f2fs or a network file system need not be so kind.
"""

import hashlib
import os
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

POLICIES: Final = ("old", "names", "removals", "additions")
"""Of what was not synced: nothing is kept; names are and bytes are not; only removals of names are;
only new names are."""

IGNORED: Final = "_events.jsonl"
"""Never synced and never read: it decides nothing."""

State = dict[str, bytes | None]
"""Path to bytes; None for a directory."""


@dataclass(slots=True)
class _Node:
    is_folder: bool
    data: bytes = b""
    synced: bytes = b""
    names: dict[str, int] = field(default_factory=dict)
    synced_names: dict[str, int] = field(default_factory=dict)


class Disk:
    """The folder `root`, with all that is in it now safe."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.promised: dict[str, str] = {}
        """Path to sha256 of what penstock said is durable; "folder" for a directory."""
        self._nodes: list[_Node] = [_Node(is_folder=True)]
        self._open: dict[int, int] = {}
        for folder, folders, files in os.walk(root):
            for name in folders:
                self.mkdir(os.path.join(folder, name))
            for name in files:
                path = os.path.join(folder, name)
                self.create(path)
                node = self._at(path)
                node.data = node.synced = Path(path).read_bytes()
        for node in self._nodes:
            node.synced_names = dict(node.names)

    def save(self) -> bytes:
        """Itself, for the process that goes on after a kill: the cache outlives a process."""
        self._open = {}
        return pickle.dumps(self)

    @staticmethod
    def load(data: bytes) -> "Disk":
        disk = pickle.loads(data)
        assert isinstance(disk, Disk)
        return disk

    def create(self, path: str) -> None:
        self._enter(path, _Node(is_folder=False))

    def mkdir(self, path: str) -> None:
        self._enter(path, _Node(is_folder=True))

    def open(self, descriptor: int, path: str) -> None:
        if (number := self._find(path)) is not None:
            self._open[descriptor] = number
        else:
            self._open.pop(descriptor, None)

    def write(self, descriptor: int, data: bytes) -> None:
        if descriptor in self._open:
            self._nodes[self._open[descriptor]].data += data

    def fsync(self, descriptor: int) -> None:
        if descriptor in self._open:
            node = self._nodes[self._open[descriptor]]
            node.synced = node.data
            node.synced_names = dict(node.names)

    def link(self, source: str, target: str) -> None:
        number = self._find(source)
        assert number is not None, source
        self._folder(target).names[os.path.basename(target)] = number

    def unlink(self, path: str) -> None:
        self._folder(path).names.pop(os.path.basename(path), None)

    def rename(self, source: str, target: str) -> None:
        self.link(source, target)
        self.unlink(source)

    def promise(self, path: str, sha256: str) -> None:
        self.promised[path] = sha256

    def after_power_loss(self, policy: str) -> State:
        """What may be found when the machine is back."""
        state: State = {}
        self._collect(0, "", policy, state)
        return state

    def broken_promises(self, state: State) -> list[str]:
        """What penstock said is durable and `state` does not have."""
        return broken_promises(self.promised, state, self.root)

    def _collect(self, number: int, path: str, policy: str, state: State) -> None:
        node = self._nodes[number]
        for name, child in sorted(_names(node, policy).items()):
            if name == IGNORED:
                continue
            below = f"{path}{name}"
            if self._nodes[child].is_folder:
                state[below] = None
                self._collect(child, below + "/", policy, state)
            else:
                state[below] = self._nodes[child].synced

    def _enter(self, path: str, node: _Node) -> None:
        self._nodes.append(node)
        self._folder(path).names[os.path.basename(path)] = len(self._nodes) - 1

    def _folder(self, path: str) -> _Node:
        return self._at(os.path.dirname(path))

    def _at(self, path: str) -> _Node:
        number = self._find(path)
        assert number is not None, f"{path} is not on the disk"
        return self._nodes[number]

    def _find(self, path: str) -> int | None:
        if path != self.root and not path.startswith(self.root + "/"):
            return None
        number: int | None = 0
        for name in path[len(self.root) :].split("/"):
            if name and number is not None:
                number = self._nodes[number].names.get(name)
        return number


def broken_promises(promised: dict[str, str], state: State, root: str) -> list[str]:
    """The promises, by absolute path, that `state`, by path below `root`, does not keep."""
    broken = []
    for path, sha256 in promised.items():
        name = os.path.relpath(path, root)
        if name == "." or name.startswith(".."):
            continue
        if name not in state:
            broken.append(f"{name} is gone")
        elif (data := state[name]) is not None and hashlib.sha256(data).hexdigest() != sha256:
            broken.append(f"{name} has other bytes ({len(data)} of them)")
    return broken


def read_state(root: str | os.PathLike[str]) -> State:
    """A real folder as a state."""
    state: State = {}
    for folder, folders, files in os.walk(root):
        for name in folders:
            state[os.path.relpath(os.path.join(folder, name), root)] = None
        for name in files:
            path = os.path.join(folder, name)
            if name != IGNORED:
                state[os.path.relpath(path, root)] = Path(path).read_bytes()
    return state


def write_state(state: State, root: Path) -> None:
    """A state as a real folder."""
    root.mkdir(parents=True)
    for name, data in sorted(state.items()):
        if data is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(data)


def digest(state: State) -> str:
    """One word for a state. Temporary files count by name: a test shows that nothing reads them."""
    whole = hashlib.sha256()
    for name, data in sorted(state.items()):
        if data is not None and os.path.basename(name).startswith(".tmp-"):
            data = b""
        whole.update(f"{name}\0{-1 if data is None else len(data)}\0".encode() + (data or b""))
    return whole.hexdigest()


def _names(node: _Node, policy: str) -> dict[str, int]:
    old, new = node.synced_names, node.names
    match policy:
        case "old":
            return old
        case "names":
            return new
        case "removals":
            return {name: child for name, child in old.items() if name in new}
        case "additions":
            return {**old, **new}
    raise ValueError(policy)
