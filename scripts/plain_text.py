"""Turn unpacked packages into one plain text file: C++, English, or many languages.

In:    folders, each with one folder for each package; which text is wanted
Out:   a UTF-8 file of 110 MB, documents parted by <|endoftext|>; exit code 1 if there is less
       than 100 MB
Keeps: one half of the many languages in Latin letters and one in others; an equal share for each
       language (of the English, for each package), as far as it goes; an order that depends on
       nothing but the names of the files
Never: writes a paragraph twice, an untranslated one as another language, code blocks as prose,
       or text that was not valid UTF-8

usage: plain_text.py {cpp,english,many} OUTPUT FOLDER…
"""

import gzip
import re
import struct
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from html.parser import HTMLParser
from itertools import chain
from pathlib import Path

LEAST, ENOUGH = 100_000_000, 110_000_000
SHORTEST = 100  # characters; less is what is left of the frame of a page
END = "<|endoftext|>"
CODE = {".h", ".hpp", ".hh", ".ipp", ".tcc", ".cpp"}
TEXT = {".html", ".page", ".mo", ".dz", ".bzz", ".czz"}
SKIPPED = re.compile("head|header|footer|nav|script|style|svg|math|pre|screen|textarea")
INLINE = re.compile(
    "a|abbr|acronym|app|b|bdi|bdo|big|cite|cmd|code|dfn|divinename|em|file|font|gui|guiseq|hi|i|img"
    "|input|kbd|key|keyseq|link|mark|output|q|reference|s|samp|scripref|small|span|strong|sub|sup"
    "|sys|transchange|tt|u|var|w|wbr"
)
OTHER = re.compile(  # the languages that are not written in Latin letters
    "am|ar|as|ba|be|bg|bn|bo|brx|chr|ckb|cv|dgo|dz|el|fa|grc|gu|he|hi|hy|iu|ja|ka|kk|km|kn|ko|kok"
    "|ks|ky|lo|mai|mk|ml|mn|mni|mr|my|ne|or|pa|ps|ru|sa|sat|sd|shn|si|sr|ta|te|tg|th|ti|tig|tt"
    "|ug|uk|ur|yi|zh"
)
UNFIT = re.compile(rf"{re.escape(END)}|[\0\ufffd]")
LANGUAGE = re.compile(
    r"/(?:help|locale|manual|resource|translations|installation-guide-\w+)"
    r"/([a-z]{2,3})(?:[-_@][^/]+)?/"
    r"|/html/([a-z]{2,3})-[A-Z]{2}/"
    r"|\.([a-z]{2,3})(?:[_@]\w+)*\.html$"
)


class Paragraphs(HTMLParser):
    """The paragraphs of a page of HTML or Mallard, without its tags, its frame and its code."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self.words: list[str] = []
        self.skipping = 0
        self.feed(page)
        self.close()
        self.end_paragraph()

    def end_paragraph(self) -> None:
        if piece := " ".join("".join(self.words).replace("¶", "").split()):
            self.pieces.append(piece)
        self.words.clear()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.skipping += SKIPPED.fullmatch(tag) is not None
        if not INLINE.fullmatch(tag):
            self.end_paragraph()

    def handle_endtag(self, tag: str) -> None:
        if self.skipping and SKIPPED.fullmatch(tag):
            self.skipping -= 1
        if not INLINE.fullmatch(tag):
            self.end_paragraph()

    def handle_data(self, data: str) -> None:
        if not self.skipping:
            self.words.append(data)


def paragraphs(page: bytes) -> list[str]:
    return Paragraphs(page.decode(errors="replace")).pieces


def language(path: Path) -> str:
    found = LANGUAGE.search(path.as_posix())
    return next(filter(None, found.groups())) if found else "en"


def translations(catalog: bytes) -> list[str]:
    """The texts of a compiled gettext catalog, without its header and what is not translated."""
    count, keys, texts = struct.unpack_from("<3I", catalog, 8)

    def strings(table: int) -> Iterator[str]:
        for size, at in struct.iter_unpack("<II", catalog[table : table + 8 * count]):
            yield catalog[at : at + size].decode(errors="replace")

    return [
        one
        for key, text in zip(strings(keys), strings(texts), strict=True)
        for one in text.split("\0")
        if key and one and one not in re.split("[\0\4]", key)
    ]


def read(path: Path) -> Iterator[list[str]]:
    """The documents of a file, each as its paragraphs."""
    data = path.read_bytes()
    match path.suffix:
        case ".mo":
            yield translations(data)
        case ".dz":  # a dictionary: what starts a line starts an entry
            entries = re.split(r"\n(?=\S)", gzip.decompress(data).decode(errors="replace"))
            yield from (entries[at : at + 100] for at in range(0, len(entries), 100))
        case ".bzz" | ".czz":  # a book of SWORD; its index holds offset, size and plain size
            index = path.with_suffix(path.suffix[:2] + "zs").read_bytes()
            for at, size, _ in struct.iter_unpack("<III", index):
                yield paragraphs(zlib.decompress(data[at : at + size]))
        case ".html" | ".page":
            yield paragraphs(data)
        case _:
            yield [data.decode(errors="replace")]


def documents(paths: Iterable[Path], seen: set[bytes]) -> Iterator[str]:
    """The documents of the files, without the paragraphs that are in `seen` already."""
    for pieces in chain.from_iterable(map(read, paths)):
        fresh = []
        for piece in pieces:
            digest = blake2b(piece.encode(), digest_size=12).digest()
            if digest not in seen and not UNFIT.search(piece):
                seen.add(digest)
                fresh.append(piece)
        if sum(map(len, fresh)) >= SHORTEST:
            yield "\n".join(fresh)


def balanced(groups: dict[str, Iterator[str]]) -> Iterator[str]:
    """The documents of all groups, always from the one that has given the least so far."""
    given = dict.fromkeys(sorted(groups), 0)
    while given:
        name = min(given, key=given.__getitem__)
        text = next(groups[name], None)
        if text is None:
            del given[name]
        else:
            given[name] += len(text.encode())
            yield text


def main(kind: str, output: Path, *folders: Path) -> None:
    wanted = CODE if kind == "cpp" else TEXT
    found = [
        (path.relative_to(folder), path)
        for folder in folders
        for path in folder.rglob("*")
        if path.suffix in wanted and path.is_file() and not path.is_symlink()
    ]
    files = defaultdict(list)
    for name, path in sorted(found, key=lambda one: blake2b(one[0].as_posix().encode()).digest()):
        tongue = language(name)
        if kind == "many":
            files[tongue].append(path)
        elif kind == "cpp" or (tongue == "en" and path.suffix != ".mo"):
            files[name.parts[0]].append(path)
    seen: set[bytes] = set()
    if kind == "many":
        for _ in documents(files.pop("en", []), seen):
            pass  # what is English here is what the translators left
    halves: dict[bool, dict[str, Iterator[str]]] = {False: {}, True: {}}
    for group, paths in files.items():
        halves[bool(OTHER.fullmatch(group))][group] = documents(paths, seen)
    size = 0
    temporary = output.with_suffix(".tmp")
    with temporary.open("wb") as out:
        for text in balanced({str(half): balanced(groups) for half, groups in halves.items()}):
            size += out.write((END * bool(size) + text).encode())
            if size >= ENOUGH:
                break
    if size < LEAST:
        temporary.unlink()
        sys.exit(f"{output.name}: {size / 1e6:.0f} MB of {LEAST / 1e6:.0f}: packages are missing")
    temporary.rename(output)


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))
