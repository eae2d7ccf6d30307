"""What tests of several stages share: a tiny tokenizer, and sources worth chunking."""

import faulthandler
import gc
import json
import random
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from penstock.tokenize.tokenizer import Tokenizer

pytest_plugins = ["services.fixtures"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--few-kernels",
        action="store_true",
        help="compile a kernel when it is called, and not all that the tests import",
    )


def pytest_configure() -> None:
    """A shell that runs tests behind itself has them ignore Ctrl-C, and all that they start too."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def freeze_heap() -> None:
    """Take what lives as long as the process out of the collector's walks.

    Only where no slice runs: hypothesis asks the collector who holds its random numbers, hears
    "nobody" of what is frozen, and warns.
    """
    if sys.version_info >= (3, 12):
        return
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Sweeps take long, above all beside other work, and are not stuck when they do.

    What faulthandler_timeout prints of a slow test comes from a thread without the GIL, which walks
    the list of threads while they come and go: a sweep that opens thousands of loaders was ended by
    it, with a segmentation fault, after its 300 seconds.
    """
    if item.get_closest_marker("faults"):
        faulthandler.cancel_dump_traceback_later()


def pytest_itemcollected(item: pytest.Item) -> None:
    """What tests of a file share is made by one worker, not by each: all of them go there.

    The largest groups are handed out first, and single tests fill what is left at the end. xdist
    looks at the marks before any other hook sees all items.
    """
    has_groups = item.config.pluginmanager.hasplugin("xdist")
    if not has_groups or not isinstance(item, pytest.Function):
        return
    if item.get_closest_marker("xdist_group"):
        return
    file = item.nodeid.partition("::")[0]
    for known in item._fixtureinfo.name2fixturedefs.values():
        if any(one.baseid == file and one.scope in ("module", "session") for one in known):
            item.add_marker(pytest.mark.xdist_group(file))
            return


def pytest_collection_finish(session: pytest.Session) -> None:
    """Modules and 9,000 tests live as long as the process."""
    freeze_heap()
    grouped = [item for item in session.items if item.get_closest_marker("xdist_group")]
    if getattr(session.config.option, "loadgroup", False) and grouped:
        assert "@" in grouped[0].nodeid, (
            "xdist does not know how this pytest names tests: no groups"
        )
    if session.config.getoption("few_kernels"):
        from penstock import kernels

        kernels.known.clear()


WORDS: Final = (
    *("count", "index", "table", "value", "total", "order"),
    *("first", "chunk", "token", "block", "record", "source"),
)
CPP: Final = """\
/// Adds {a} to {b}.
template <class T>
int {a}_{k}(T {b}, int n = {n}) {{
    for (int i = 0; i < n; ++i) {{
        if ({b} > i) {{ {b} += i * {n}; }}  // {c}
    }}
    return static_cast<int>({b});
}}

"""
BODIES: Final = {
    ".cpp": CPP,
    ".h": "struct {a}_{k} {{\n    int {b} = {n};\n    int {c}() {{ return {b} + {n}; }}\n}};\n\n",
    ".py": "def {a}_{k}({b}, n={n}):\n    for i in range(n):\n        {b} += i  # {c}\n"
    "    return {b}\n\n\n",
    ".java": "class {a}_{k} {{\n    int {b}(int n) {{\n        return n * {n};\n    }}\n}}\n\n",
    ".go": "func {a}_{k}({b} int) int {{\n\tfor i := 0; i < {n}; i++ {{\n\t\t{b} += i\n\t}}\n"
    "\treturn {b} // {c}\n}}\n\n",
    ".rs": "fn {a}_{k}({b}: i32) -> i32 {{\n    let {c} = {b} + {n};\n    {c} * 2\n}}\n\n",
    ".js": "function {a}_{k}({b}) {{\n  const {c} = {b} + {n};\n  return {c};\n}}\n\n",
    ".ts": "export function {a}_{k}({b}: number): number {{\n  return {b} + {n};\n}}\n\n",
    ".md": "## {a} {k}\n\nThe {b} of the {c} is {n}. It is known by its {a}; é is a letter.\n\n",
    ".txt": "The {a} of the {b} was {n}. Then it was {k}, and nobody knew of the {c}.\n\n",
}  # fmt: skip
LANGUAGE: Final = {
    ".cpp": "cpp", ".h": "cpp", ".py": "python", ".java": "java", ".go": "go", ".rs": "rust",
    ".js": "javascript", ".ts": "typescript", ".md": "markdown", ".txt": "text",
}  # fmt: skip

MakeSources = Callable[[int, int], dict[str, bytes]]


def make_sources(seed: int, count: int) -> dict[str, bytes]:
    """Files of ten languages, one function after the other, by their names; no two are alike."""
    dice = random.Random(seed)
    files = {}
    for number in range(count):
        suffix = list(BODIES)[number % len(BODIES)]
        parts = []
        for _ in range(dice.choice((1, 2, 3, 5, 12))):
            a, b, c = dice.sample(WORDS, 3)
            k, n = dice.randrange(10**9), dice.randrange(10**6)
            parts.append(BODIES[suffix].format(a=a, b=b, c=c, k=k, n=n))
        text = "".join(parts)
        if suffix == ".cpp" and number % 3 == 0:
            text = f"#include <{dice.choice(WORDS)}>\n\nnamespace deep::{WORDS[3]} {{\n\n{text}}}\n"
        files[f"{WORDS[number % 5]}/file{number:03d}{suffix}"] = text.encode()
    return files


@pytest.fixture(scope="session")
def sources() -> MakeSources:
    """Makes files: `sources(seed, count)`."""
    return make_sources


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 400 tokens, trained on such files."""
    from penstock.tokenize.train import TrainConfig, train_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    sample = folder / "sample.txt"
    sample.write_bytes(b"".join(make_sources(1, 40).values()))
    train_tokenizer([sample], folder / "tokenizer", TrainConfig(vocab_size=400))
    return folder / "tokenizer"


CHAT_TOKENS: Final = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|bos|>", "<|user_start|>", "<|user_end|>"),
    *("<|assistant_start|>", "<|assistant_end|>", "<|python_start|>", "<|python_end|>"),
    *("<|output_start|>", "<|output_end|>", "<|begin_of_text|>", "<|start_header_id|>"),
    *("<|end_header_id|>", "<|eot_id|>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<s>"),
    *("</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]"),
    *("[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
)


def add_special(content: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """A tokenizer.json with more special tokens."""
    known = {token["content"] for token in content["added_tokens"]}
    highest = max(
        [*content["model"]["vocab"].values(), *(t["id"] for t in content["added_tokens"])]
    )
    new = [name for name in names if name not in known]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": highest + 1 + k, "content": name, **flags, "special": True}
        for k, name in enumerate(new)
    ]
    return {**content, "added_tokens": [*content["added_tokens"], *added]}


@pytest.fixture(scope="session")
def chat_folder(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same tokenizer with the control tokens of every preset."""
    content = json.loads((tokenizer_folder / "tokenizer.json").read_bytes())
    folder = tmp_path_factory.mktemp("chat")
    (folder / "tokenizer.json").write_text(json.dumps(add_special(content, CHAT_TOKENS)))
    return folder


@pytest.fixture(scope="session")
def chat_tokenizer(chat_folder: Path) -> "Tokenizer":
    from penstock.tokenize.tokenizer import Tokenizer

    return Tokenizer.load(chat_folder)
