"""Functions that libclang sees and that fit are never cut, in real C++.

make check: the headers that the installed wheels bring (pyarrow's C++, numpy's C).
make faults: thousands of headers of Boost, CGAL, clang, Eigen, LLVM and Qt, as `scripts/corpus cpp`
fetches them; and the fill that is promised.
"""

import itertools
import os
import random
from collections import defaultdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from penstock.prepare.outline.cpp import outline_cpp
from penstock.prepare.outline.outline import FUNCTION
from penstock.tokenize.tokenizer import Tokenizer
from penstock.tokenize.train import TrainConfig, train_tokenizer

from .truth import Truth, documents_of, find_functions, measure, read_text

CORPUS = Path(__file__).parents[2] / "benchmarks" / "data" / "cpp" / "usr"
PACKAGES = ("CGAL", "boost", "clang", "eigen3", "llvm", "qt5")
SUFFIXES = (".h", ".hpp", ".hh", ".hxx", ".ipp", ".inl", ".tpp", ".c", ".cc", ".cpp", ".cxx")

Found = list[tuple[str, bytes, Truth]]


def list_sources(folder: Path) -> list[Path]:
    """All C and C++ files; links, of which some go round in circles, are not followed."""
    return sorted(
        Path(root, name)
        for root, _, names in os.walk(folder)
        for name in names
        if name.endswith(SUFFIXES) and not Path(root, name).is_symlink()
    )


def read_all(paths: list[Path], folder: Path) -> Found:
    found = []
    for path in paths:
        if text := read_text(path):
            found.append((str(path.relative_to(folder)), text, find_functions(text)))
    return found


def recall(found: Found) -> float:
    """The share of the functions that end where a node of ours ends that begins no later."""
    seen = total = 0
    for _, text, truth in found:
        documents = documents_of([text])
        outline = outline_cpp(documents.data, documents.at[:-1].copy(), documents.at[1:].copy())
        rows = outline.node_kind == FUNCTION
        ours: dict[int, int] = {}
        for start, end in zip(
            outline.node_start[rows].tolist(), outline.node_end[rows].tolist(), strict=True
        ):
            ours[end] = min(start, ours.get(end, start))
        seen += sum(ours.get(end, len(text)) <= start for start, end in truth.functions)
        total += len(truth.functions)
    return seen / total


def tokenizer_of(found: Found, folder: Path) -> Tokenizer:
    """A tokenizer of 4,096 tokens, trained on some of the files."""
    sample = folder / "sample.txt"
    sample.write_bytes(b"\n".join(text for _, text, _ in found[::5])[: 4 << 20])
    config = TrainConfig(vocab_size=4096, pattern="cl100k")
    train_tokenizer([sample], folder / "tokenizer", config, num_processes=1)
    return Tokenizer.load(folder / "tokenizer")


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, Tokenizer]:
    folders = [Path(pa.get_include()), Path(np.get_include())]
    found = list(
        itertools.chain.from_iterable(
            read_all(list_sources(folder), folder.parent) for folder in folders
        )
    )
    return found, tokenizer_of(found, tmp_path_factory.mktemp("headers"))


@pytest.mark.parametrize("max_tokens", [64, 256, 1024, 4096])
def test_no_function_is_cut_without_need(headers: tuple[Found, Tokenizer], max_tokens: int) -> None:
    found, tokenizer = headers
    measured = measure(found, tokenizer, max_tokens)
    measured.check()
    assert measured.files > 400
    assert measured.functions > 2_500


def test_functions_are_seen_as_libclang_sees_them(headers: tuple[Found, Tokenizer]) -> None:
    found, _ = headers
    assert recall(found) > 0.999
    left_out = sum(truth.macro + truth.broken for _, _, truth in found)
    assert left_out < 0.03 * sum(len(truth.functions) for _, _, truth in found)


@pytest.mark.faults
def test_thousands_of_real_files(tmp_path: Path) -> None:
    """No function cut without need, no chunk over budget, nothing lost, and chunks well filled."""
    if not CORPUS.is_dir():
        pytest.fail(f"{CORPUS} is not there: run scripts/corpus cpp")
    by_package = defaultdict(list)
    for path in list_sources(CORPUS):
        parts = path.relative_to(CORPUS).parts
        package = next((name for name in PACKAGES if any(name in part for part in parts)), "other")
        by_package[package].append(path)
    rng = random.Random(1)
    paths = []
    for package in sorted(by_package):
        paths += rng.sample(by_package[package], min(600, len(by_package[package])))
    found = read_all(paths, CORPUS)
    assert len(found) >= 2_000
    assert recall(found) > 0.999
    tokenizer = tokenizer_of(found, tmp_path)
    for max_tokens, least_fill in ((256, 0.0), (1024, 0.8), (4096, 0.9)):
        measure(found, tokenizer, max_tokens).check(least_fill)
