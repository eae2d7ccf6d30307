"""What is found in a document depends on its own bytes alone, never on what stands behind it.

Every beginning of every text stands before a row of hostile neighbours: the bytes that would go on
with it, and those which open, close or lengthen what some kernel looks for.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.kernels import PAD
from penstock.prepare import filters, secrets
from penstock.prepare.languages import guess_languages
from penstock.prepare.outline.cpp import outline_cpp
from penstock.prepare.outline.outline import Outline
from penstock.prepare.outline.readers import outline_prose
from penstock.records import LANGUAGES, Documents

from . import nasty
from .test_languages import SNIPPETS

ROOM = 16  # bytes of each neighbour
TEXTS = [
    *(text for texts in SNIPPETS.values() for text in texts),
    *(nasty.make(kind, 120)[:120] for kind in nasty.KINDS),
    "One. Two! «Three»… 四。五！ Émile said “so.” Ωmega e.g. this. ÿes. Élan. п. Д.".encode(),
    b"---\na: b\n---\n# A\n\n1. one\n2) two\n* three\n\n```py\nx\n```\n| a | b |\n===\n",
    b"mail me@example.com or +1 (555) 123-4567, 10.0.0.12, 4111 1111 1111 1111, fe80::1\n",
    b"AKIAQ7RT5WXZ2PLMN4KD ghp_iK2ZWeqhFWCEPyYngFb51yBMq7rt5wxz2plm password = 'hX9q2Lw7zT'\n",
    b"api_key: 8f4c04390c94bf28ae7bd750b1f949ce amqp://a:h!X9q2@b TOKEN=h#X9q2&Lw7 git@a.org:b\n",
    b"bot140276938:AAiK2ZWeqhFWCEPyYngFb51yBMq7rt5wxz2 8f4c04390c94bf28ae7bd750b1f949ce-us12\n",
    b"https://hooks.slack.com/services/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 me@a.org:/b\n",
    b"-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKCAQEA\n-----END RSA PRIVATE KEY-----\n",
]
BYTES = b"\n\r\t \"'`~#*/\\<>(){}[];:=.,-_+@$%&|!?0aZ\x80\xbb\xbf\xff"
NEIGHBOURS = [
    *(bytes([byte]) * ROOM for byte in BYTES),
    b"*/ */ */ */ */ */",
    b'"""\n"""\n"""\n"""\n',
    b"string number boo",
    b"\xbb\xc2\xbb\xe3\x80\x80 \xe3\x80\x82 \xe2\x80\x9d ab",
    b"==> => >= :: := . ",
    b"self.x self.y sel",
    b"END RSA PRIVATE KEY-----"[:ROOM],
    b"example.com:80/a?",
]  # fmt: skip


def together(neighbour: bytes | None) -> Documents:
    """Every beginning of every text, each before a neighbour, or before its own next bytes."""
    parts = []
    for text in TEXTS:
        for size in range(1, len(text) + 1):
            after = text[size:] + bytes(ROOM) if neighbour is None else neighbour
            parts += [text[:size], after[:ROOM]]
    at = np.cumsum([0, *map(len, parts)])
    data = np.frombuffer(b"".join(parts) + bytes(PAD), np.uint8)
    return Documents(data, at, at[:-1], at[1:], None)


def of_outline(found: Outline) -> list[np.ndarray[Any, Any]]:
    """The columns of an outline, without those of the neighbours, which are every second one."""
    cuts = np.repeat(np.arange(len(found.cut_first) - 1), np.diff(found.cut_first)) % 2 == 0
    nodes = np.repeat(np.arange(len(found.node_first) - 1), np.diff(found.node_first)) % 2 == 0
    columns = [np.diff(found.cut_first)[::2], np.diff(found.node_first)[::2]]
    columns += [found.cut_at[cuts], found.cut_level[cuts]]
    for name in ("kind", "start", "body", "end", "parent"):
        columns.append(getattr(found, f"node_{name}")[nodes])
    return [*columns, found.name_start[nodes], found.name_end[nodes]]


def prose(language: str) -> Callable[[Documents], list[np.ndarray[Any, Any]]]:
    number = LANGUAGES.index(language)

    def find(documents: Documents) -> list[np.ndarray[Any, Any]]:
        languages = np.full(len(documents), number, np.uint8)
        return of_outline(outline_prose(documents.data, documents.at, languages))

    return find


def is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def measured(documents: Documents) -> list[np.ndarray[Any, Any]]:
    """Of whole characters: what is no UTF-8 has been rejected before it is measured."""
    found = filters.measure(documents, words=True, secrets=True, pii=True)
    whole = [is_utf8(text[:size]) for text in TEXTS for size in range(1, len(text) + 1)]
    return [np.asarray(found[name])[::2][whole] for name in found.columns]


def found_secrets(documents: Documents) -> list[np.ndarray[Any, Any]]:
    found = secrets.find(documents)
    mine = (np.searchsorted(documents.at, found.start, side="right") - 1) % 2 == 0
    return [found.start[mine], found.end[mine], found.kind[mine]]


FINDERS = {
    "language": lambda documents: [guess_languages(documents)[::2]],
    "cpp": lambda documents: of_outline(
        outline_cpp(documents.data, documents.at[:-1].copy(), documents.at[1:].copy())
    ),
    **{language: prose(language) for language in ("text", "markdown", "other")},
    "filters": measured,
    "secrets": found_secrets,
}


@pytest.mark.parametrize("name", FINDERS)
def test_nothing_depends_on_what_stands_behind(name: str) -> None:
    find = FINDERS[name]
    expected = find(together(bytes(ROOM)))
    for neighbour in [None, *NEIGHBOURS]:
        found = find(together(neighbour))
        for k, (mine, other) in enumerate(zip(found, expected, strict=True)):
            assert np.array_equal(mine, other), f"column {k} before {neighbour!r}"
