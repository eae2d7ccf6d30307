"""Files of batches: what is written is read, and what is anything else is refused."""

import copy
import io
import json
import os
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from penstock.errors import BadBatch, BadConfig, StoreFailed
from penstock.queue.batch_file import MOST_HEADER, Arrays, BatchFile, Layout, Schema
from penstock.store.local import LocalStore

KINDS = ("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
         "float16", "float32", "float64")  # fmt: skip
ROWS, EACH, FIRST = 3, 2, 12
FIELDS: list[dict[str, Any]] = [
    {"name": "x", "dtype": "int64", "shape": [4], "role": "input"},
    {"name": "flag", "dtype": "bool", "shape": []},
    {"name": "y", "dtype": "float32", "shape": [2, 5]},
]


def layout(fields: Any = FIELDS, **changed: Any) -> Layout:
    given = {"rows": ROWS, "split": "train", "queue": "q" * 32, "each": EACH, **changed}
    return Layout(Schema.parse(fields), **given)


def make(fields: Any = FIELDS, seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    return {
        one["name"]: rng.integers(0, 2, (ROWS, *one["shape"])).astype(one["dtype"])
        for one in fields
    }


def opened(folder: Path, data: bytes, given: Layout | None = None, first: int = FIRST) -> BatchFile:
    path = folder / "file.safetensors"
    path.write_bytes(data)
    return BatchFile(os.open(path, os.O_RDONLY), given or layout(), first, str(path))


def encoded(batches: int = EACH) -> bytes:
    return b"".join(layout().encode(FIRST, [make(seed=n) for n in range(batches)]))


def parts(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the tensors of a file."""
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def joined(header: Any, body: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


@pytest.mark.parametrize("count", [1, 2])
def test_batches_come_back(tmp_path: Path, count: int) -> None:
    file = opened(tmp_path, encoded(count))
    assert file.batches == count
    for n in range(count):
        found, wanted = file.read(FIRST + n), make(seed=n)
        assert [*found] == ["x", "flag", "y"]
        for name, array in wanted.items():
            assert found[name].dtype == array.dtype
            assert np.array_equal(found[name], array)
        assert file.checksum(FIRST + n) == layout().checksum(wanted)
    with pytest.raises(BadBatch, match="it ends before batch"):
        file.read(FIRST + count)
    file.close()


@pytest.mark.parametrize("call", ["pread", "preadv"])
def test_a_file_that_the_disk_cannot_read_is_refused(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a provider makes it again, as what a power cut has damaged."""

    def fail(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    data = encoded()
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(BadBatch, match="it cannot be read: Input/output error"):
        opened(tmp_path, data).read(FIRST)


def test_every_type_comes_back_and_safetensors_reads_it(tmp_path: Path) -> None:
    fields = [{"name": kind, "dtype": kind, "shape": [n % 4 + 1]} for n, kind in enumerate(KINDS)]
    batches = [make(fields, seed=n) for n in range(EACH)]
    data = b"".join(layout(fields).encode(FIRST, batches))
    found = safetensors.numpy.load(data)
    assert set(found) == set(KINDS)
    for name, array in found.items():
        assert np.array_equal(array, np.concatenate([batch[name] for batch in batches]))
    file = opened(tmp_path, data, layout(fields))
    assert all(np.array_equal(file.read(FIRST + 1)[name], batches[1][name]) for name in KINDS)
    file.close()


def test_safetensors_own_file_with_our_metadata_is_one_of_ours(tmp_path: Path) -> None:
    batch = make()
    about = layout().about(FIRST, 1, [layout().checksum(batch)])
    file = opened(tmp_path, safetensors.numpy.save(dict(batch), about))
    assert np.array_equal(file.read(FIRST)["y"], batch["y"])
    file.close()


def test_the_order_of_tensors_is_that_of_whoever_wrote_them(tmp_path: Path) -> None:
    """safetensors puts types of one size in an order of its own."""
    fields: list[dict[str, Any]] = [
        {"name": f"{first}_{n}", "dtype": kind, "shape": [2]}
        for n, kind in enumerate(KINDS)
        for first in "zma"
    ]
    mixed, batch = layout(fields), make(fields)
    data = safetensors.numpy.save(dict(batch), mixed.about(FIRST, 1, [mixed.checksum(batch)]))
    ours = b"".join(mixed.encode(FIRST, [batch]))
    assert [*parts(data)[0]] != [*parts(ours)[0]]
    file = opened(tmp_path, data, mixed)
    assert all(np.array_equal(file.read(FIRST)[name], batch[name]) for name in batch)
    file.close()


def test_a_schema_of_too_many_fields_is_refused_and_one_of_many_is_not(tmp_path: Path) -> None:
    fields: list[dict[str, Any]] = [
        {"name": f"x{n:063d}", "dtype": "int8", "shape": [1] * 8} for n in range(1025)
    ]
    with pytest.raises(BadConfig, match="batch_schema has 1,025 fields"):
        Schema.parse(fields)
    wide, batch = layout(fields[:1024], each=4096), make(fields[:1024])
    about = wide.about(FIRST, 4096, ["0" * 32] * 4096)
    text = json.dumps({"__metadata__": about, **wide.tensors(4096)})
    assert len(text) < MOST_HEADER / 2
    file = opened(tmp_path, b"".join(wide.encode(0, [batch])), wide, 0)
    assert np.array_equal(file.read(0)[fields[7]["name"]], batch[fields[7]["name"]])
    file.close()


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ([], r"batch_schema is \[\]"),
        ("x", "batch_schema is 'x'"),
        (None, "batch_schema is None"),
        ([3], "field 0 of batch_schema is 3"),
        ([{"name": "x", "dtype": "int64", "shape": [2], "rule": ""}], "did you mean role"),
        ([{"name": "../x", "dtype": "int64", "shape": [2]}], "the name of field 0 .* is '../x'"),
        ([{"name": "__metadata__", "dtype": "int64", "shape": [2]}], "begin with a letter"),
        ([{"dtype": "int64", "shape": [2]}], "the name of field 0 .* is None"),
        ([{"name": "x", "dtype": "int46", "shape": [2]}], "dtype of field 'x' is 'int46'"),
        ([{"name": "x", "dtype": "bfloat16", "shape": [2]}], "choose from bool, uint8"),
        ([{"name": "x", "dtype": [1], "shape": [2]}], "dtype of field 'x' is"),
        ([{"name": "x", "dtype": "int64", "shape": 2}], "the shape of field 'x' is 2"),
        ([{"name": "x", "dtype": "int64", "shape": [0]}], "a size of field 'x' is 0"),
        ([{"name": "x", "dtype": "int64", "shape": [2.5]}], "a size of field 'x' is 2.5"),
        ([{"name": "x", "dtype": "int64", "shape": []}] * 2, "two fields 'x'"),
    ],
)  # fmt: skip
def test_a_schema_that_cannot_be_is_refused(fields: Any, told: str) -> None:
    with pytest.raises(BadConfig, match=told):
        Schema.parse(fields)


def test_a_batch_is_checked_field_by_field() -> None:
    schema, good = Schema.parse(FIELDS), make()
    assert np.array_equal(schema.check(good, ROWS, "here")["x"], good["x"])
    wrong: list[tuple[Any, str]] = [
        (None, "sample_batch gave NoneType"),
        ({**good, "xx": 1}, "a field 'xx' that batch_schema does not have"),
        ({"x": good["x"], "flag": good["flag"]}, "the batch has no field 'y'"),
        ({**good, "x": good["x"].astype(np.int32)}, "field 'x' is int32\n.*\n.*says int64"),
        ({**good, "y": good["y"][:, :1]}, r"field 'y' has the shape \[3, 1, 5\]"),
        ({**good, "flag": good["flag"][:2]}, r"field 'flag' has the shape \[2\]"),
        ({**good, "y": [[1], [2, 3]]}, "field 'y' is no array"),
    ]
    for batch, told in wrong:
        with pytest.raises(BadBatch, match=told) as caught:
            schema.check(batch, ROWS, "batch 7 of split 'train'")
        assert caught.value.where == "batch 7 of split 'train'"
        assert caught.value.do


@pytest.mark.torch
def test_tensors_of_torch_are_arrays_too() -> None:
    import torch

    good = make()
    tensors = {name: torch.from_numpy(array) for name, array in good.items()}
    tensors["y"].requires_grad_()
    found = Schema.parse(FIELDS).check(tensors, ROWS, "here")
    assert all(np.array_equal(found[name], good[name]) for name in good)
    with pytest.raises(BadBatch, match="field 'x' is no array"):
        Schema.parse(FIELDS).check({**good, "x": tensors["y"].bfloat16()}, ROWS, "here")


# Hostile files


class Trap:
    """Leaves a mark if it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("unpickled",)


def hostile() -> dict[str, bytes]:
    """Files that are not what they should be, by what is wrong."""
    header, body = parts(encoded())
    about = header["__metadata__"]

    def with_about(**changed: Any) -> bytes:
        return joined({**header, "__metadata__": {**about, **changed}}, body)

    def with_x(**changed: Any) -> bytes:
        return joined({**header, "x": {**header["x"], **changed}}, body)

    archive = io.BytesIO()
    pickle.dump({"x": Trap()}, archive)
    return {
        "empty": b"",
        "seven bytes": b"1234567",
        "pickle": pickle.dumps({"x": Trap()}),
        "pickle behind a length": joined(archive.getvalue(), body),
        "npy": b"\x93NUMPY" + bytes(200),
        "a huge header": (1 << 62).to_bytes(8, "little") + b"{}" + body,
        "a header beyond the file": (len(body) + 10_000).to_bytes(8, "little") + b"{}" + body,
        "a header over the limit": joined(b" " * (1 << 20) + b"{}", body),
        "a header of nothing": joined(b"", body),
        "no JSON": joined(b"{x", body),
        "a list": joined([], body),
        "deep JSON": joined(b'{"x":' * 5000 + b"1" + b"}" * 5000, body),
        "not UTF-8": joined(b'{"\xff\xfe": {}}', body),
        "no metadata": joined({key: header[key] for key in ("x", "y", "flag")}, body),
        "a path in a name": joined({**header, "../../etc/passwd": header["x"]}, body),
        "a missing tensor": joined({key: header[key] for key in header if key != "x"}, body),
        "an offset before the data": with_x(data_offsets=[-8, 184]),
        "an offset beyond the data": with_x(data_offsets=[1 << 40, (1 << 40) + 192]),
        "tensors over each other": with_x(data_offsets=header["y"]["data_offsets"]),
        "another shape": with_x(shape=[3, 8]),
        "another type": with_x(dtype="F64"),
        "a key too many": with_x(path="/etc/passwd"),
        "other batches": with_about(batches="1"),
        "many batches": with_about(batches="99999999999"),
        "no number of batches": with_about(batches="x"),
        "no batches": with_about(batches="0"),
        "a list of batches": with_about(batches=[]),
        "nothing as batches": with_about(batches=None),
        "batches without end": joined(
            json.dumps({**header, "__metadata__": {**about, "batches": 7}})
            .replace('"batches": 7', '"batches": 1e400')
            .encode(),
            body,
        ),
        "checksums of a list": with_about(checksums=[["0" * 32] * 2]),
        "offsets of texts": with_x(data_offsets=["0", "192"]),
        "one offset": with_x(data_offsets=[0]),
        "a shape without end": with_x(shape=[1e300]),
        "metadata too much": with_about(path="../x"),
        "another split": with_about(split="val"),
        "another number": with_about(first="14"),
        "another format": with_about(format="penstock-batches-2"),
        "checksums of others": with_about(checksums=",".join(["0" * 32] * 2)),
        "too short": encoded()[:-1],
        "too long": encoded() + b"\0",
    }


@pytest.mark.parametrize("name", [*hostile()])
def test_a_hostile_file_is_refused(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadBatch) as caught:
        read_all(tmp_path, hostile()[name])
    assert caught.value.where.endswith("file.safetensors")
    assert caught.value.why
    assert "start the provider anew" in caught.value.do
    assert not (tmp_path / "unpickled").exists()


def test_a_file_of_another_queue_or_schema_is_stale(tmp_path: Path) -> None:
    for key, given in (
        ("queue", layout(queue="r" * 32)),
        ("schema", layout([{**FIELDS[0], "shape": [5]}, *FIELDS[1:]])),
    ):
        with pytest.raises(BadBatch, match=f"was made under another {key}") as caught:
            opened(tmp_path, encoded(), given)
        assert caught.value.do.startswith("purge the queue: penstock prepare CONFIG --purge")


def test_every_changed_byte_and_every_cut_is_noticed(tmp_path: Path) -> None:
    data = encoded()
    chance = random.Random(5)
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1 << chance.randrange(8)
        if json_is_same(data, bytes(changed)):
            continue
        with pytest.raises(BadBatch):
            read_all(tmp_path, bytes(changed))
    for size in range(0, len(data), 7):
        with pytest.raises(BadBatch):
            read_all(tmp_path, data[:size])


VALUES: list[Any] = [
    None, True, 0, -1, 1 << 80, 1e308, "", "\0", "../x", "9" * 5000, "1" * 32, [], {}, [[]], [None],
    {"a": {}}, [0, 0], [1 << 63, 1 << 64], ["0", "8"], [0.0, 96.0], "x" * 2000,
]  # fmt: skip


def mutant(chance: random.Random, data: bytes) -> bytes:
    """A file with its header or its bytes changed in a few places."""
    header, body = parts(data)
    if chance.random() < 0.7:
        for _ in range(chance.randint(1, 3)):
            inner: Any = header
            while True:
                key = chance.choice(
                    [*inner, "new"] if isinstance(inner, dict) else range(len(inner))
                )
                below = inner[key] if not isinstance(inner, dict) else inner.get(key)
                if not (isinstance(below, dict | list) and below) or chance.random() < 0.2:
                    break
                inner = below
            if isinstance(inner, dict) and chance.random() < 0.2:
                inner.pop(key, None)
            else:
                inner[key] = copy.deepcopy(chance.choice(VALUES))
            if not header:
                break
        return joined(header, body)
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(changed))
        what = chance.randrange(4)
        if what == 0:
            changed[at] = chance.randrange(256)
        elif what == 1:
            del changed[at : at + chance.randint(1, 40)]
        elif what == 2:
            changed[at:at] = chance.randbytes(chance.randint(1, 40))
        else:
            changed[at : at + 9] = changed[-9:]
        if not changed:
            break
    return bytes(changed)


def test_mutants_are_refused_or_say_what_the_original_says(tmp_path: Path) -> None:
    """Nothing but BadBatch, and no other content than what was written."""
    data, chance = encoded(), random.Random(18)
    wanted = [make(seed=n) for n in range(EACH)]
    refused = longest = 0
    for _ in range(4000):
        given = mutant(chance, data)
        try:
            file = opened(tmp_path, given)
        except BadBatch as error:
            refused += 1
            longest = max(longest, len(str(error)))
            continue
        try:
            for n in range(EACH):
                found = file.read(FIRST + n)
                assert all(np.array_equal(found[name], wanted[n][name]) for name in found)
        except BadBatch:
            refused += 1
        finally:
            file.close()
    assert refused > 3500
    assert longest < 1000  # what a hostile header holds is not repeated whole


def json_is_same(data: bytes, changed: bytes) -> bool:
    """Whether only blanks of the header changed into other blanks."""
    try:
        return parts(data) == parts(changed)
    except ValueError:
        return False


def read_all(folder: Path, data: bytes) -> None:
    file = opened(folder, data)
    try:
        for n in range(EACH):
            file.read(FIRST + n)
    finally:
        file.close()


def test_a_file_that_is_cut_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    file = opened(tmp_path, encoded())
    os.truncate(tmp_path / "file.safetensors", len(encoded()) - 100)
    with pytest.raises(BadBatch, match="cut while it was read"):
        file.read(FIRST + 1)
    file.close()


def test_a_long_header_is_read_whole(tmp_path: Path) -> None:
    wide = layout(each=400)
    data = b"".join(wide.encode(0, [make(seed=n) for n in range(400)]))
    file = opened(tmp_path, data, wide, 0)
    assert np.array_equal(file.read(399)["x"], make(seed=399)["x"])
    file.close()


def test_several_files_appear_at_once_and_taken_names_are_told(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store", make=True)
    store.create("b", b"before")
    drafts = [store.draft(name, [memoryview(name.encode()), memoryview(b"!")]) for name in "abc"]
    assert store.size("a") is None
    assert store.publish(drafts) == ["b"]
    assert [store.read(name) for name in "abc"] == [b"a!", b"before", b"c!"]
    store.draft("d", [memoryview(b"d")]).close()
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["a", "b", "c"]


def test_a_draft_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store", make=True)

    def parts() -> Iterator[memoryview]:
        yield memoryview(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(StoreFailed, match="could not write a"):
        store.draft("a", parts())
    assert list((tmp_path / "store").iterdir()) == []
