"""What turns text into ids: the fast engine, the reference, or an object of the user's.

In:    a tokenizer.json; texts end to end in one buffer, with where each begins
Out:   ids of all texts end to end (uint32), with where each text's begin
Keeps: the ids of the reference: an engine that differs in one on the probe is refused at load
Never: touches a document from Python on the fast path
"""

import functools
import itertools
import json
import unicodedata
from collections.abc import Iterable
from typing import Any, Protocol

import msgspec
import numpy as np

from penstock.arrays import Bytes, Int64s, UInt32s, end_to_end, offsets_of
from penstock.errors import BadDocument, BadTokenizer, PenstockError
from penstock.kernels import Kernel
from penstock.tokenize.patterns import code_point_classes
from penstock.tokenize.scan_layout import OTHER, SPACE

Ids = UInt32s


class Engine(Protocol):
    """One way to encode."""

    name: str

    def encode_rows(self, data: Bytes, at: Int64s) -> tuple[Ids, Int64s]:
        """Encode data[at[k]:at[k + 1]] for each k; valid UTF-8 all of it."""
        ...


def is_fault(error: BaseException) -> bool:
    """Whether a library failed. A panic of Rust is no Exception, as if it were Ctrl-C."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def encode_named(engine: Engine, data: Bytes, at: Int64s) -> tuple[Ids, Int64s]:
    """As `engine.encode_rows`; if a row cannot be encoded, the error says which."""
    try:
        return engine.encode_rows(data, at)
    except BaseException as error:
        if not is_fault(error) or isinstance(error, PenstockError | MemoryError):
            raise
        if len(at) == 2:
            refused = BadDocument(
                f"the tokenizer cannot encode a document of {int(at[1] - at[0]):,} bytes",
                why=f"{engine.name}: {(str(error) or type(error).__name__).splitlines()[0]}"[:300],
                do="remove the document, or use a tokenizer whose pattern fits it",
            )
            refused.row = 0
            raise refused from None
    for row, (start, stop) in enumerate(itertools.pairwise(at.tolist())):
        try:
            encode_named(engine, data[start:stop], np.array([0, stop - start], np.int64))
        except BadDocument as refused:
            refused.row = row
            raise
    raise BadDocument(
        f"the tokenizer encodes each of {len(at) - 1} documents, but not all at once",
        do="report this with the documents: it is a fault of the engine " + engine.name,
    )


def _as_json(content: dict[str, Any]) -> str:
    """A tokenizer.json: 0.02 s for 65,536 tokens, where json.dumps takes 0.3."""
    try:
        return msgspec.json.encode(content).decode()
    except (TypeError, ValueError):  # half a surrogate pair, which only escapes can hold
        return json.dumps(content)


class Gigatoken:
    """The fast engine: about 200 MB of C++ in a second and on one core."""

    name = "gigatoken"

    def __init__(self, content: dict[str, Any], *, parallel: bool) -> None:
        import gigatoken

        self._tokenizer = gigatoken.Tokenizer.from_json(_as_json(content))
        self._parallel = parallel

    def encode_rows(self, data: Bytes, at: Int64s) -> tuple[Ids, Int64s]:
        import awkward as ak

        if len(at) == 1:
            return np.zeros(0, np.uint32), np.zeros(1, np.int64)
        rows = ak.Array(
            ak.contents.ListOffsetArray(
                ak.index.Index64(at),
                ak.contents.NumpyArray(data, parameters={"__array__": "byte"}),
                parameters={"__array__": "bytestring"},
            )
        )
        found = self._tokenizer.encode_batch(rows, parallel=self._parallel).layout
        return found.content.data, found.offsets.data


class Guarded:
    """The fast engine, and the reference for texts on whose characters the two may disagree.

    Libraries have Unicode tables of different versions. A character that is a letter, a mark or a
    number in a newer one is nothing in an older one, and text is cut differently around it. Texts
    with a character younger than Python's own tables are encoded by the reference.
    """

    def __init__(self, fast: "Engine", reference: "Reference") -> None:
        self.name = fast.name
        self._fast = fast
        self._reference = reference
        self._young = young_code_points()

    def encode_rows(self, data: Bytes, at: Int64s) -> tuple[Ids, Int64s]:
        try:
            ids, ends = self._fast.encode_rows(data, at)
        except BaseException as error:
            if not is_fault(error) or isinstance(error, MemoryError):
                raise
            return self._reference.encode_rows(data, at)  # right by definition
        young = np.zeros(len(at) - 1, np.uint8)
        if not _find_young(data, at, self._young, young):
            return ids, ends
        pieces = []
        for row in np.flatnonzero(young).tolist():
            start, stop = int(at[row]), int(at[row + 1])
            alone = np.array([0, stop - start], np.int64)
            pieces.append((row, self._reference.encode_rows(data[start:stop], alone)[0]))
        return _spliced(ids, ends, pieces)


def _spliced(ids: Ids, ends: Int64s, pieces: list[tuple[int, Ids]]) -> tuple[Ids, Int64s]:
    """The ids with those of some rows replaced."""
    sizes = np.diff(ends)
    parts, done = [], 0
    for row, found in pieces:
        parts += [ids[done : ends[row]], found]
        done = int(ends[row + 1])
        sizes[row] = len(found)
    return np.concatenate([*parts, ids[done:]]), offsets_of(sizes)


_find_young = Kernel(
    "penstock.tokenize.scan_kernel",
    "find_young",
    "int64(uint8[::1], int64[::1], uint8[::1], uint8[::1])",
)


@functools.cache
def young_code_points() -> Bytes:
    """1 for each letter, mark and number of `regex` that Python's unicodedata does not know."""
    classes = code_point_classes()
    young = np.zeros(len(classes), np.uint8)
    numbers = np.flatnonzero((classes > OTHER) & (classes < SPACE))
    categories = map(unicodedata.category, map(chr, numbers.tolist()))
    young[numbers] = [category == "Cn" for category in categories]
    return young


class Reference:
    """Hugging Face's tokenizers: slow, and right by definition."""

    name = "tokenizers"

    def __init__(self, content: dict[str, Any]) -> None:
        import tokenizers

        try:
            self.tokenizer = tokenizers.Tokenizer.from_str(_as_json(content))
        except BaseException as error:
            if not is_fault(error):
                raise
            raise BadTokenizer(
                "the tokenizer cannot be read",
                why=str(error)[:300],
                do="fetch it again, or train it again: penstock tokenizer train",
            ) from error

    def encode_rows(self, data: Bytes, at: Int64s) -> tuple[Ids, Int64s]:
        raw = data.tobytes()
        places = at.tolist()
        texts = [raw[a:b].decode() for a, b in itertools.pairwise(places)]
        encoded = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return _joined(row.ids for row in encoded)


class UserObject:
    """Anything with `encode(text)` that gives ids."""

    name = "object"

    def __init__(self, tokenizer: Any) -> None:
        # tiktoken refuses special text in `encode`; here it is content
        self._encode = getattr(tokenizer, "encode_ordinary", tokenizer.encode)

    def encode_rows(self, data: Bytes, at: Int64s) -> tuple[Ids, Int64s]:
        raw = data.tobytes()
        places = at.tolist()
        texts = (raw[a:b].decode() for a, b in itertools.pairwise(places))
        return _joined(self._ids(text) for text in texts)

    def _ids(self, text: str) -> Any:
        ids = self._encode(text)
        return getattr(ids, "ids", ids)


def _joined(rows: Iterable[Any]) -> tuple[Ids, Int64s]:
    arrays = [np.asarray(row, np.uint32) for row in rows]
    joined = np.concatenate(arrays) if arrays else np.zeros(0, np.uint32)
    return joined, offsets_of([len(array) for array in arrays])


def fast_engine(
    content: dict[str, Any], reference: Reference, *, parallel: bool
) -> tuple[Engine, str]:
    """The fastest engine that gives the reference's ids, and why it is not faster, if so."""
    try:
        fast = Gigatoken(content, parallel=parallel)
        difference = first_difference(fast, reference, probe_texts(content))
    except PenstockError:
        raise
    except BaseException as error:  # whatever it does not know of this tokenizer
        if not is_fault(error):
            raise
        said = (str(error) or type(error).__name__).splitlines()[0]
        return reference, f"gigatoken does not take this tokenizer: {said}"
    if difference:
        return reference, f"gigatoken gives other ids than tokenizers: {difference}"
    return Guarded(fast, reference), ""


def first_difference(engine: Engine, reference: Engine, texts: list[str]) -> str:
    """Where two engines give other ids, in words; empty if they agree on every text."""
    data, at = end_to_end([text.encode() for text in texts])
    ids, ends = engine.encode_rows(data, at)
    true_ids, true_ends = reference.encode_rows(data, at)
    for k, text in enumerate(texts):
        mine = ids[ends[k] : ends[k + 1]].tolist()
        true = true_ids[true_ends[k] : true_ends[k + 1]].tolist()
        if mine != true:
            same = next(
                (n for n, (a, b) in enumerate(zip(mine, true, strict=False)) if a != b),
                min(len(mine), len(true)),
            )
            return (
                f"{mine[same : same + 4]} instead of {true[same : same + 4]} "
                f"at token {same} of {text[:60]!r}"
            )
    return ""


_SCRIPTS = """\
The quick brown fox can't won't I'LL they've IT'S don’t; naïve façade Straße ÅNGSTRÖM ﬁ Ǆ ǅ ſ 'ſ
Быстрая лиса; Γρήγορη αλεπού; שועל מהיר עִבְרִית; الثعلب السريع بِسْمِ; तेज़ लोमड़ी हिन्दी; দ্রুত শিয়াল
ตัวอย่างภาษาไทย; 敏捷的棕色狐狸跳过了懒狗。素早い茶色の狐はカタカナ
빠른 갈색 여우; Con cáo nâu nhanh; ქართული; հայերեն
አማርኛ; ខ្មែរ; ລາວ; မြန်မာ; සිංහල; தமிழ்; తెలుగు; ಕನ್ನಡ; മലയാളം; ગુજરાતી; ਪੰਜਾਬੀ; བོད་; ᠮᠣᠩᠭᠣᠯ; ᏣᎳᎩ; 𐐀𐐨; 𝒜𝓫𝟘
"""
_SHAPES = (
    " \t  x \n\n  y\r\n\r\n\tz   \n",
    "   ", "\n", "\r", "\r\n \t", " \u00a0\u2003\u3000x\u2028y\u0085z", "a  b   c    d",
    "0 12 123 1234 12345 3.14159 1,000,000 ٠١٢٣ ४५६ Ⅷ ½ ²³ 第4章 v1.2.3-rc4",
    "int main(int argc, char** argv) { return a->b::c<d>(e) >>= 0x1F'FFu; } // end\n#include <x>\n",
    "https://a.b/c?d=e&f=%20#g ../../x//y \\path\\to ```code``` $x^{2}$ \"it's\" 'tis ''''s !!??..",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea\U0001f44d\U0001f3fd",
    "e\u0301 \u0301\u0302 a\u200db \ufeffbom \ufffd \x00\x01\x7f\x80",
    "snake_case camelCase PascalCase SCREAMING_CASE XMLHttpRequest iOS 日本ABC語def",
    "a" * 300, "ab" * 200, " " * 300, "\n" * 70, "=" * 150, "é" * 90, "漢" * 90, "x1" * 80,
    "supercalifragilisticexpialidocious" * 8, "",
)  # fmt: skip


def probe_texts(content: dict[str, Any]) -> list[str]:
    """Texts that tell engines apart: scripts, runs of spaces, digits, specials, long words."""
    texts = [*_SCRIPTS.splitlines(keepends=True), _SCRIPTS, *_SHAPES]
    for token in content.get("added_tokens") or []:
        special = str(token["content"])
        texts += [special, f"a{special}b", f" {special} {special}{special}\n", special[:-1]]
    return texts
