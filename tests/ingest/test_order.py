"""The order of inputs: a seeded shuffle of what each holds, and turns among several of them."""

import bz2
import gzip
import io
import itertools
import lzma
import math
import random
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import zstandard

from penstock import plugins
from penstock.arrays import Int64s
from penstock.errors import BadConfig, InputDamaged, InputReplaced
from penstock.ingest import inputs as inputs_module
from penstock.ingest import open as open_module
from penstock.ingest import order as order_module
from penstock.ingest.formats import Piece, ReadConfig, read_parts, read_piece
from penstock.ingest.inputs import Input, open_input
from penstock.ingest.open import guess_text_bytes, open_ranges
from penstock.ingest.order import Interleaving, Merge

NAMES: Final = [f"folder{k % 7}/file{k:03d}.txt" for k in range(200)]
SMALL: Final = ReadConfig(piece_bytes=900)


def text_of(name: str) -> bytes:
    return f"{name}: ".encode() * (1 + len(name) * int(name[-7:-4]) % 13)


def make_tree(folder: Path) -> Path:
    for name in NAMES:
        path = folder / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text_of(name))
    return folder / "tree"


def make_tar(folder: Path, suffix: str = "") -> Path:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in sorted(NAMES):
            info = tarfile.TarInfo(name)
            info.size = len(text_of(name))
            tar.addfile(info, io.BytesIO(text_of(name)))
    path = folder / f"some.tar{suffix}"
    path.write_bytes(gzip.compress(buffer.getvalue(), 1) if suffix else buffer.getvalue())
    return path


def make_zip(folder: Path) -> Path:
    path = folder / "some.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(NAMES):
            archive.writestr(name, text_of(name))
    return path


KINDS: Final[dict[str, Callable[[Path], Path]]] = {
    "tree": make_tree,
    "tar": make_tar,
    "tar.gz": lambda folder: make_tar(folder, ".gz"),
    "zip": make_zip,
}


def read_names(
    path: Path, config: ReadConfig = SMALL, start: int = 0, *, seed: int = 0, number: int = 0
) -> list[str]:
    """The files or members from a unit on, in order; each has the unit of its place."""
    found: list[str] = []
    at = start
    for made in open_input(str(path), number, config, seed).pieces(start):
        for part, read in read_parts(Piece.attach(made.header(), made.data), config, str(path)):
            assert part.start == at
            at = part.end
            documents = read.documents
            assert documents.start.tolist() == [*range(part.start, part.end)]
            for k, source in enumerate(documents.sources or []):
                name = source.removeprefix(str(path))[1:]
                assert documents.text(k) == text_of(name)
                found.append(name)
    return found


# Within an input.


@pytest.mark.parametrize("kind", KINDS)
def test_an_order_is_a_function_of_the_names_the_seed_and_the_number(
    tmp_path: Path, kind: str
) -> None:
    path = KINDS[kind](tmp_path)
    orders = [
        read_names(path, seed=seed, number=number) for seed, number in ((0, 0), (1, 0), (0, 1))
    ]
    assert read_names(path) == orders[0]
    for order in orders:
        assert sorted(order) == sorted(NAMES)
    assert len({*map(tuple, orders), tuple(sorted(NAMES))}) == 4
    by_path = ReadConfig(piece_bytes=900, order="path")
    assert read_names(path, by_path, seed=1) == sorted(NAMES)


@pytest.mark.parametrize("kind", KINDS)
def test_an_order_depends_on_no_piece(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither on their size, nor on where a run was stopped."""
    monkeypatch.setattr(inputs_module, "_WINDOW_BYTES", 30_000)
    path = KINDS[kind](tmp_path)
    whole = read_names(path)
    for piece_bytes, start in itertools.product((1, 5000, 1 << 20), (0, 1, 57, 199, 200)):
        assert read_names(path, ReadConfig(piece_bytes=piece_bytes), start) == whole[start:]


def test_every_place_has_any_file_as_likely(tmp_path: Path) -> None:
    """Of 100 seeds, the sum of places of each file: chi-square at p = 0.001."""
    path, places = make_tree(tmp_path), np.zeros(len(NAMES))
    for seed in range(100):
        (piece,) = open_input(str(path), 0, ReadConfig(), seed).pieces()
        for place, (name, _, unit) in enumerate(piece.names):
            assert unit == place
            places[NAMES.index(name[1:])] += place
    deviation = 100 * (len(NAMES) ** 2 - 1) / 12
    chi = float(((places - 100 * (len(NAMES) - 1) / 2) ** 2).sum() / deviation)
    assert chi < critical(len(NAMES) - 1)


def critical(degrees: int, z: float = 3.09) -> float:
    """Chi-square that is exceeded with p = 0.001: Wilson and Hilferty."""
    return degrees * (1 - 2 / (9 * degrees) + z * math.sqrt(2 / (9 * degrees))) ** 3


def test_members_of_a_stream_stay_in_their_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = 30_000
    monkeypatch.setattr(inputs_module, "_WINDOW_BYTES", window)
    path, before = make_tar(tmp_path, ".gz"), sorted(NAMES)
    at, windows = 0, []
    for name in before:
        windows.append(at // window)
        at += 512 + -(-len(text_of(name)) // 512) * 512
    found = read_names(path)
    assert windows[-1] >= 6
    assert [windows[before.index(name)] for name in found] == windows
    for number in range(windows[-1]):
        mine = [name for name, of in zip(found, windows, strict=True) if of == number]
        assert mine != sorted(mine)


def test_a_file_that_comes_to_a_tree_moves_no_other(tmp_path: Path) -> None:
    path = make_tree(tmp_path)
    before = read_names(path)
    (path / "a000.txt").write_bytes(text_of("a000.txt"))
    after = read_names(path)
    assert [name for name in after if name != "a000.txt"] == before


def test_a_shuffled_tree_is_proven_by_all_of_its_files(tmp_path: Path) -> None:
    """One more, and others may stand before the place up to which it was read."""
    path = make_tree(tmp_path)
    proof = open_input(str(path), 0, SMALL).prove(3)
    assert proof.keys() == {"files", "bytes", "names", "version"}
    assert proof == open_input(str(path), 0, SMALL).prove(150)
    assert open_input(str(path), 0, SMALL).check(3, proof)
    for name in ("0.txt", "zzz.txt"):
        (path / name).write_text("new")
        with pytest.raises(InputReplaced, match="is not what was read before") as caught:
            open_input(str(path), 0, SMALL).check(3, proof)
        assert "files 201 now, 200 before" in caught.value.why
        assert open_input(str(path), 0, SMALL).more(200) == "it has 201 files, and 200 were read"
        (path / name).unlink()
    assert open_input(str(path), 0, SMALL).check(3, proof)


def test_names_that_no_text_can_hold_are_listed(tmp_path: Path) -> None:
    for name in (b"fine.c", b"new\nline.c", b"caf\xe9.c", "grün.c".encode()):
        (tmp_path / "t").mkdir(exist_ok=True)
        Path(str(tmp_path / "t"), name.decode("utf-8", "surrogateescape")).write_text("x")
    (tmp_path / "t" / "gone.c").symlink_to("nowhere")
    (piece,) = open_input(str(tmp_path / "t"), 0, SMALL).pieces()
    assert sorted(name for name, *_ in piece.names) == ["/fine.c", "/grün.c"]
    assert sorted((one.reason, one.sample) for one in piece.refusals) == [
        ("bad_name", ""),
        ("bad_name", ""),
        ("not_a_file", "ENOENT: No such file or directory"),
    ]


def test_an_order_that_nobody_knows() -> None:
    with pytest.raises(BadConfig, match="--order is 'shufled'") as caught:
        ReadConfig(order="shufled")
    assert caught.value.do == "did you mean shuffled? choose from shuffled, path"


def test_archives_that_lost_members_since_they_were_listed(tmp_path: Path) -> None:
    path = make_zip(tmp_path)
    (piece,) = open_input(str(path), 0, ReadConfig()).pieces()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("alone.txt", "x")
    with pytest.raises(InputReplaced, match=r"some\.zip has fewer members than it had") as caught:
        read_piece(piece, ReadConfig(), "some.zip")
    assert caught.value.why == "there are 1, and one after these was planned"
    path = make_tar(tmp_path)
    (piece,) = open_input(str(path), 0, ReadConfig()).pieces()
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(InputDamaged, match=r"some\.tar is damaged") as damaged:
        read_piece(piece, ReadConfig(), "some.tar")
    assert damaged.value.why == "a member that it had is missing"


# How long a compressed text is.

PACK: Final[dict[str, Callable[[bytes], bytes]]] = {
    ".gz": gzip.compress,
    ".zst": lambda data: zstandard.ZstdCompressor(write_content_size=True).compress(data),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def some_text(size: int) -> bytes:
    words = random.Random(size).choices([b"river", b"water", b"stone", b"light\n"], k=size // 6)
    return b" ".join(words)[:size].ljust(size, b".")


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("size", [1, 250, 40_000, 70_000, 1_000_000])
def test_the_length_of_a_compressed_text(
    tmp_path: Path, suffix: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_module, "_GUESS_BYTES", 50_000)
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(PACK[suffix](some_text(size)))
    guess = guess_text_bytes(open_ranges(str(path)), suffix)
    if size < 50_000 or suffix in (".gz", ".zst"):
        assert guess == size
    else:
        assert size / 4 < guess < 1.2 * size  # a decompressor reads ahead of what it gives


@pytest.mark.parametrize("size", [100, 300, 80_000, 1 << 20])
@pytest.mark.parametrize("says", [False, True])
def test_the_header_of_a_frame(size: int, says: bool) -> None:
    """As the library reads it; a stream may leave out its length."""
    packed = zstandard.ZstdCompressor(write_content_size=says).compress(some_text(size))
    told = zstandard.get_frame_parameters(packed[:18]).content_size
    assert open_module._zstd_bytes(packed[:18].ljust(18)) == (size if says else 0)
    assert told in (size, 0, zstandard.CONTENTSIZE_UNKNOWN)


def test_a_text_of_many_streams_is_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last stream alone says its length."""
    monkeypatch.setattr(open_module, "_GUESS_BYTES", 200_000)
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(b"".join(gzip.compress(some_text(70_000)) for _ in range(40)))
    guess = guess_text_bytes(open_ranges(str(path)), ".gz")
    assert 40 * 70_000 / 4 < guess < 40 * 70_000 * 1.2


# Among several inputs.


class Fake(Input):
    """An input of some units, without anything behind it."""

    def __init__(self, number: int, units: int, weight: int, streams: int = 0) -> None:
        super().__init__(f"input {number}", number, "files", ReadConfig())
        self._count, self._bytes, self.streams = units, weight, streams

    @property
    def weight(self) -> int:
        return self._bytes

    @property
    def units(self) -> int:
        return self._count

    def pieces(self, start: int = 0) -> Iterator[Piece]:
        dice = random.Random(self.number)
        while start < self._count:
            end = min(self._count, start + dice.choice((1, 3, 40)))
            yield Piece(self.number, "files", self.name, start, end, end - start)
            start = end


def all_units(order: Interleaving) -> list[tuple[int, int]]:
    """All units as (input, unit), by their times."""
    found = [
        (time, number, unit)
        for number, opened in enumerate(order.inputs)
        for unit, time in enumerate(order.times(number, np.arange(opened.units)).tolist())
    ]
    return [(number, unit) for _, number, unit in sorted(found)]


def merged(order: Interleaving, starts: dict[int, int]) -> list[tuple[int, int]]:
    """The same as a producer takes them, piece by piece; every run belongs to its piece."""
    merge: Merge[Piece | None] = Merge()
    taken: list[tuple[int, int]] = []

    def take(runs: Iterator[tuple[Piece | None, int, int, bool]]) -> None:
        for piece, first, last, is_all in runs:
            if piece is None:
                continue
            units = range(piece.start, piece.end)[first:last]
            taken.extend((piece.input, unit) for unit in units)
            assert is_all == (last == piece.end - piece.start)

    ended = set()
    for time, opened, piece in order.pieces(starts):
        units: Int64s = np.zeros(0, np.int64)
        if piece is None:
            ended.add(opened.number)
        else:
            units = np.arange(piece.start, piece.end)
        times = order.times(opened.number, units)
        assert not len(times) or time <= times[0]
        take(merge.add(time, opened.number, piece, times))
    take(merge.finish())
    assert ended == starts.keys()
    return taken


def some_inputs(dice: random.Random) -> list[Input]:
    return [
        Fake(number, units, dice.randrange(1, 100) * max(1, units), dice.choice((0, 0, 2)))
        for number, units in enumerate(dice.choices((0, 1, 7, 100, 900), k=dice.randint(2, 9)))
    ]


@pytest.mark.parametrize("seed", range(20))
def test_units_come_in_one_order_whatever_the_pieces_are(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And from any place in that order on, as a run that resumes takes them."""
    monkeypatch.setattr(order_module, "MOST_OPEN", 4)
    dice = random.Random(seed)
    order = Interleaving(some_inputs(dice), seed)
    whole = all_units(order)
    assert merged(order, dict.fromkeys(range(len(order.inputs)), 0)) == whole
    for stop in dice.choices(range(len(whole) + 1), k=5):
        starts = dict.fromkeys(range(len(order.inputs)), 0)
        for number, _ in whole[:stop]:
            starts[number] += 1
        assert merged(order, starts) == whole[stop:]


@pytest.mark.parametrize("seed", range(10))
def test_every_stretch_has_each_input_by_its_share(seed: int) -> None:
    """Of 4 to 9 inputs, in every stretch, the count of each is off by two turns at most."""
    dice = random.Random(seed)
    counts = dice.choices((3, 40, 500, 3000), k=dice.randint(4, 9))
    order = Interleaving([Fake(k, n, 1000 * n) for k, n in enumerate(counts)], seed)
    turn = sum(counts) / 1024
    of = np.array([number for number, _ in all_units(order)])
    for _ in range(50):
        first, last = sorted(dice.sample(range(len(of)), 2))
        for number, count in enumerate(counts):
            wanted = count * (last - first) / len(of)
            found = int((of[first:last] == number).sum())
            assert abs(found - wanted) <= 2 * (turn + 1) * len(counts)


def test_small_inputs_do_not_all_come_first() -> None:
    counts = [20_000, *[1] * 40]
    order = Interleaving([Fake(k, n, 1000 * n) for k, n in enumerate(counts)], 3)
    places = [place for place, (number, _) in enumerate(all_units(order)) if number]
    assert max(places) - min(places) > 15_000
    assert 7_000 < sum(places) / 40 < 13_000


def test_streams_beyond_a_number_follow_each_other() -> None:
    """So many are open at a time, and together they are spread over all the time there is."""
    inputs = [Fake(k, 500, 500_000, 4 if k else 0) for k in range(20)]
    order = Interleaving(inputs, 1)
    found = all_units(order)
    spans = [
        [place for place, (number, _) in enumerate(found) if number == k] for k in range(1, 20)
    ]
    for place in range(0, len(found), 50):
        assert sum(min(span) <= place <= max(span) for span in spans) <= 6
    for tenth in range(10):
        part = found[tenth * 1000 : tenth * 1000 + 1000]
        assert 40 < sum(number == 0 for number, _ in part) < 60


def test_sizes_are_told_by_the_digest() -> None:
    inputs: list[Input] = [Fake(k, 10, 1000) for k in range(3)]
    one = Interleaving(inputs, 0).digest
    assert Interleaving([Fake(k, 10, 1000) for k in range(3)], 5).digest == one
    for other in (Fake(2, 11, 1000), Fake(2, 10, 1001)):
        assert Interleaving([*inputs[:2], other], 0).digest != one


def make_lines(path: Path) -> Path:
    """800 short lines, then 200 long ones."""
    texts = ["x" * (50 if k < 800 else 2000) for k in range(1000)]
    path.write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    return path


def test_lines_are_spread_by_their_number_where_they_are_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_lines(tmp_path / "a.jsonl")
    short = 800 * 64

    def fractions() -> float:
        opened = open_input(str(path), 0, ReadConfig())
        Interleaving([opened, Fake(1, 9, 900)], 0)
        return float(opened.fractions(np.array([short]))[0])

    assert abs(fractions() - 0.8) < 0.02
    monkeypatch.setattr(order_module, "_SURVEY_BYTES", 1000)
    assert abs(fractions() - short / path.stat().st_size) < 1e-9


def test_lines_that_grow_in_company(tmp_path: Path) -> None:
    path = make_lines(tmp_path / "a.jsonl")
    opened = open_input(str(path), 0, ReadConfig())
    opened.is_alone = False
    with path.open("a") as file:
        file.write('{"text": "more"}\n')
    with pytest.raises(InputReplaced, match="has grown while it was read") as caught:
        opened.check_end()
    assert caught.value.do == (
        "write to a new directory when it is complete; penstock shard follows a file that grows"
    )
    assert sum(piece.end - piece.start for piece in opened.pieces()) < path.stat().st_size


@pytest.fixture
def pages() -> Iterator[str]:
    def read_pages(file: Any) -> Iterator[tuple[bytes, str]]:
        for number, page in enumerate(file.read().split(b"\f")):
            yield page, f"page {number}"

    plugins.register("format", "ordered_pages", suffixes=(".opages",))(read_pages)
    yield ".opages"
    plugins._known["format"].pop("ordered_pages")


@pytest.mark.parametrize("kind", ["tar.gz", "items", "jsonl.gz"])
def test_where_streams_are_does_not_depend_on_how_they_were_read(
    tmp_path: Path, kind: str, pages: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fractions grow from 0 to 1, and are the same for a run that resumes anywhere."""
    monkeypatch.setattr(inputs_module, "_WINDOW_BYTES", 20_000)
    monkeypatch.setattr(inputs_module, "_MARK_BYTES", 5_000)
    if kind == "items":
        path = tmp_path / f"some{pages}"
        path.write_bytes(b"\f".join(map(text_of, NAMES)))
    elif kind == "jsonl.gz":
        path = tmp_path / "a.jsonl.gz"
        path.write_bytes(gzip.compress(make_lines(tmp_path / "a.jsonl").read_bytes()))
    else:
        path = make_tar(tmp_path, ".gz")

    def fractions(config: ReadConfig, start: int) -> dict[int, float]:
        opened = open_input(str(path), 0, config)
        found: dict[int, float] = {}
        for piece in opened.pieces(start):
            units = np.linspace(piece.start, piece.end, 5).astype(np.int64)
            found |= dict(zip(units.tolist(), opened.fractions(units).tolist(), strict=True))
        return found

    whole = fractions(ReadConfig(piece_bytes=2000), 0)
    values = [whole[unit] for unit in sorted(whole)]
    assert values == sorted(values)
    assert values[0] == 0
    assert 0.9 < values[-1] < 1.1
    for unit in sorted(whole)[5 :: len(whole) // 12]:
        for piece_bytes in (1500, 1 << 20):
            again = fractions(ReadConfig(piece_bytes=piece_bytes), unit)
            assert all(whole[k] == again[k] for k in again.keys() & whole.keys())
            assert len(again.keys() & whole.keys()) >= 1 or unit == max(whole)
