"""Take the pictures of docs/watch.md from the page of a small workplace.

In:    nothing but this tree: files are written, chunked and sharded here
Out:   docs/watch/*.png, each below 300 KB
"""

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any, Final

from penstock import TrainConfig, train_tokenizer
from watch.browser import open_browser, watch_errors
from watch.made import make_prose, make_shop, make_tree, served

TARGET: Final = Path(__file__).parents[1] / "docs" / "watch"
SHOTS: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "batches": ("batches?run=run.toml&n=143&row=1", ".tokens .t", {"token": 40, "height": 900}),
    "pipeline": ("pipeline", "article svg", {"height": 1040}),
    "mixture": ("mixture", "article svg", {"height": 900}),
    "order": ("shuffle", "svg circle", {"height": 620}),
    "rejects": (
        "rejects?dataset=cpp&reason=near_duplicate",
        ".hit",
        {"opens": True, "height": 860},
    ),
    "dark": ("batches?run=run.toml&n=4&row=2", ".tokens .t", {"token": 60, "scheme": "dark"}),
}


def take(url: str, folder: Path, names: list[str]) -> None:
    with open_browser() as browser:
        for name in names:
            path, ready, about = SHOTS[name]
            size: Any = {"width": about.get("width", 1280), "height": about.get("height", 860)}
            context = browser.new_context(
                viewport=size, color_scheme=about.get("scheme", "light"), reduced_motion="reduce"
            )
            page = context.new_page()
            wrong = watch_errors(page)
            page.goto(f"{url}/#/{path}")
            page.locator(ready).first.wait_for()
            page.wait_for_timeout(1800)  # the number of batches is counted beside
            if "token" in about:
                page.locator(f"#t{about['token']}").hover()
            if "opens" in about:
                page.get_by_role("button", name="Compare with what it repeats").first.click()
                page.locator(".pair pre").nth(1).wait_for()
            target = folder / f"{name}.png"
            page.screenshot(path=str(target))
            context.close()
            kilobytes = target.stat().st_size / 1000
            print(f"{target}  {kilobytes:.0f} kB  {wrong or ''}")
            if wrong or kilobytes > 300:
                raise SystemExit(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(SHOTS)}; all by default")
    parser.add_argument("--target", type=Path, default=TARGET)
    args = parser.parse_args()
    args.target.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.gettempdir()) / "waterworks"  # its name is in the pictures
    folder.mkdir()
    try:
        known = tokenizer(folder)
        make_shop(folder, known, files=7000, lines=120_000, rows_per_file=2000, steps=240)
        with served(folder) as url:
            take(url, args.target, args.names or list(SHOTS))
    finally:
        shutil.rmtree(folder)


def tokenizer(folder: Path) -> Path:
    """One that knows the words of the workplace."""
    found = folder / "tokenizer"
    with tempfile.TemporaryDirectory() as place:
        tree = make_tree(Path(place) / "sample")
        prose = make_prose(Path(place) / "sample.jsonl", evil=False)
        train_tokenizer([tree, prose], found, TrainConfig(vocab_size=800))
    return found


if __name__ == "__main__":
    main()
