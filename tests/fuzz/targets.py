"""What comes from outside, mutated: `python -m fuzz.targets NAME FIRST COUNT FOLDER`.

In:    the name of a target, the numbers of its mutants
Out:   a line of JSON: how many were taken, how many were refused by an error of ours
Never: catches anything but errors of ours: a raw traceback, a crash or a hang is what is looked for

Every mutant is a function of its number. FOLDER/at holds the number of the one that is tried, for
whoever finds the process dead.
"""

import hashlib
import io
import json
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from penstock import Tokenizer
from penstock.errors import PenstockError
from penstock.produce.verify import verify
from penstock.store.log import Log
from penstock.store.record import record_name
from penstock.store.store import open_store
from penstock.supply.run_file import read_run
from penstock.tokenize.token_file import read_token_file, write_token_file
from supply.datasets import GrowingDataset

Try = Callable[[random.Random], None]

NUMBERS = (0, -1, 1, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63))
TEXTS = ("", "\0", "../x", "/etc/passwd", "é" * 300, "\x1b[2J", "a" * 70_000, "\ud83d", "_log", ".")


def any_value(rng: random.Random) -> Any:
    """Something that nobody expects."""
    match rng.randrange(8):
        case 0 | 1:
            return rng.choice(NUMBERS)
        case 2:
            return rng.choice((0.5, -0.0, 1e308, float("nan"), float("inf")))
        case 3 | 4:
            return rng.choice(TEXTS)
        case 5:
            return rng.choice((None, True, False))
        case 6:
            return rng.choice(([], {}, [[]], [None], {"": None}, [1, "a", {}]))
    nested: Any = 0
    for _ in range(rng.choice((3, 200, 5000))):
        nested = [nested] if rng.random() < 0.5 else {"a": nested}
    return nested


def mutate_value(value: Any, rng: random.Random) -> Any:
    """A copy of a JSON value with one thing changed somewhere in it."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        kind = rng.randrange(10)
        if kind == 0:
            return {name: one for name, one in value.items() if name != key}
        if kind == 1:
            return {**value, rng.choice((*TEXTS[:5], "type", "extra")): any_value(rng)}
        return {**value, key: mutate_value(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        k = rng.randrange(len(value))
        kind = rng.randrange(8)
        if kind == 0:
            return value[:k] + value[k + 1 :]
        if kind == 1:
            return [*value[:k], value[k], *value[k:]]
        if kind == 2:
            j = rng.randrange(len(value))
            value = list(value)
            value[k], value[j] = value[j], value[k]
            return value
        return [*value[:k], mutate_value(value[k], rng), *value[k + 1 :]]
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.5:
        return value + rng.choice((-1, 1, 500, -500, 1 << 20))
    return any_value(rng)


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """A copy with some bytes changed, cut out, doubled or put in."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(changed) + 1)
        size = rng.choice((1, 1, 2, 4, 8, 100))
        match rng.randrange(6):
            case 0:
                changed[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                if at < len(changed):
                    changed[at] ^= 1 << rng.randrange(8)
            case 2:
                del changed[at : at + size]
            case 3:
                changed[at:at] = changed[at : at + size]
            case 4:
                changed[at : at + size] = rng.choice((b"\xff", b"\0", b"\x80")) * size
            case 5:
                del changed[at:]
    return bytes(changed)


def dump(value: Any) -> bytes:
    sys.setrecursionlimit(20_000)
    try:
        return json.dumps(value, separators=(",", ":")).encode("utf-8", "surrogatepass")
    finally:
        sys.setrecursionlimit(1000)


def refused(attempt: Callable[[], None]) -> bool:
    """Whether an attempt ends in an error of ours, all of whose words can be shown."""
    try:
        attempt()
    except PenstockError as error:
        str(error).encode()  # it can be shown
        return bool(error.what)
    return False


# Records.


def records(folder: Path) -> Callable[[random.Random], bool]:
    """A record of a log that was changed by somebody who can compute its hash, or by decay."""
    dataset = GrowingDataset(folder / "d")
    for k in range(3):
        dataset.add([[k] * 10] * 5)
    dataset.seal()
    store = open_store(folder / "d")
    names = [record_name(n) for n in range(5)]
    kept = {name: store.read(name) for name in names}

    def attempt(rng: random.Random) -> bool:
        name = rng.choice(names)
        path = folder / "d" / name
        if rng.random() < 0.3:
            new = mutate_bytes(kept[name], rng)
        else:
            value = mutate_value(json.loads(kept[name]), rng)
            body = dump(value).rpartition(b',"sha256":"')[0] or dump(value)[:-1]
            new = body + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'
        path.chmod(0o600)
        path.write_bytes(new)

        def read() -> None:
            log = Log.open(str(folder / "d"))
            # what follows does not fit a changed record, unless the last one was changed
            if new != kept[name] and log.state.n > names.index(name):
                raise AssertionError("a changed record was built upon")
            verify(open_store(folder / "d"), full=False)

        try:
            return refused(read)
        finally:
            path.write_bytes(kept[name])

    return attempt


# Token files.


def token_files(folder: Path) -> Callable[[random.Random], bool]:
    """A token file of a dataset or a cache, changed: offsets and ids that a kernel can use, within
    the bytes that there are, or an error of Arrow's."""
    rng = random.Random(1)
    rows = [[rng.randrange(2000) for _ in range(rng.choice((0, 1, 3, 90)))] for _ in range(30)]
    file = io.BytesIO()
    tokens, doc_id = pa.array(rows, pa.large_list(pa.uint16())), pa.array(range(30), pa.uint64())
    write_token_file(file, tokens, doc_id, "abc", "uint16")
    data = file.getvalue()
    offsets = data.index(np.cumsum([0, *map(len, rows)], dtype=np.int64).tobytes())
    parts = [(0, offsets), (offsets, offsets + 248), (0, len(data)), (len(data) - 600, len(data))]

    def attempt(rng: random.Random) -> bool:
        first, last = rng.choice(parts)
        changed = data[:first] + mutate_bytes(data[first:last], rng) + data[last:]
        buffer = pa.py_buffer(changed)
        try:
            found = read_token_file(buffer, rows=30, vocab_size=2000, tokenizer="abc")
        except (pa.ArrowException, OSError):
            return True
        assert found.doc_id is not None
        assert len(found.at) == 31
        assert len(found.doc_id) == 30
        assert found.at[0] == 0
        assert found.at[-1] == len(found.values)
        assert (np.diff(found.at) >= 0).all()
        assert int(found.values.max(initial=0)) < 2000
        for view in (found.at, found.values, found.doc_id):
            start = view.__array_interface__["data"][0] - buffer.address
            assert not len(view) or 0 <= start <= start + view.nbytes <= buffer.size
        return False

    return attempt


# Tokenizers.


def tokenizers(folder: Path) -> Callable[[random.Random], bool]:
    """A tokenizer.json that was changed: what loads gives back the text that it encodes."""
    from penstock import TrainConfig, train_tokenizer

    text = "int main() { return 0; } // été 你好\n" * 30
    (folder / "in.txt").write_text(text)
    config = TrainConfig(vocab_size=290, special_tokens=("<|bos|>", "<|end|>"))
    train_tokenizer([folder / "in.txt"], folder / "good", config)
    (file,) = (folder / "good").glob("tokenizer.json")
    raw = file.read_bytes()
    value = json.loads(raw)
    bad = folder / "bad"
    bad.mkdir(exist_ok=True)

    def attempt(rng: random.Random) -> bool:
        if rng.random() < 0.3:
            new = mutate_bytes(raw, rng)
        else:
            changed = value
            for _ in range(rng.choice((1, 1, 2))):
                changed = mutate_value(changed, rng)
            new = dump(changed)
        (bad / "tokenizer.json").write_bytes(new)

        def load() -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that it encodes slowly is said
                tokenizer = Tokenizer.load(str(bad))
            for sample in (text, "", "x", "<|bos|>", "\U0010ffff"):
                ids = tokenizer.encode(sample)
                assert len(ids) == 0 or int(ids.max()) < tokenizer.vocab_size
                if tokenizer.is_lossless:
                    assert tokenizer.decode(ids) == sample

        return refused(load)

    return attempt


# Descriptions of runs.


def run_files(folder: Path) -> Callable[[random.Random], bool]:
    """A run.toml that was changed."""
    path = folder / "run.toml"
    good = (
        '[loader]\npath = {cpp = "cpp", text = "text"}\ntokenizer = "tok"\nchunk_size = 128\n'
        'weights = {cpp = 3.0, text = 1.0}\nepochs = 2\nseed = 5\nban = [1, 2]\nlast = "drop"\n'
        'weight_schedule = {20 = {cpp = 1.0, text = 1.0}}\nshard_ranges = ["0-3", "all"]\n'
        "stall_s = 3.5\n[loader.plan]\npool_size = 1000\nrefill_threshold = 750\nramp = false\n"
    )

    def attempt(rng: random.Random) -> bool:
        if rng.random() < 0.5:
            text = mutate_bytes(good.encode(), rng)
        else:
            lines = good.splitlines()
            k = rng.randrange(len(lines))
            key = lines[k].partition("=")[0]
            told = any_value(rng)
            shown = dump(told)[:3000].decode("utf-8", "replace").replace("null", "nan")
            lines[k] = f"{key}= {shown}"
            text = "\n".join(lines).encode("utf-8", "surrogatepass")
        path.write_bytes(text)

        def load() -> None:
            read_run(path)

        return refused(load)

    return attempt


TARGETS = {
    "records": records,
    "token_files": token_files,
    "tokenizers": tokenizers,
    "run_files": run_files,
}


def main() -> None:
    name, first, count, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    attempt = TARGETS[name](folder)
    found: Counter[str] = Counter()
    with open(folder / "at", "wb", buffering=0) as at:
        for number in range(first, first + count):
            at.seek(0)
            at.write(b"%12d" % number)
            found["refused" if attempt(random.Random(number)) else "taken"] += 1
    print(json.dumps(found))


if __name__ == "__main__":
    main()
