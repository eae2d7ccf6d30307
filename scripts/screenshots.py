"""Take pictures of the page of `penstock watch`: those of docs/watch.md, or of a directory.

In:    nothing but this tree: files are written, chunked and sharded here; or, with --of, a
       directory as it is, such as the one that `make demo` leaves
Out:   docs/watch/*.png, each below 300 KB; with --of, watch_pipeline.png and watch_batch.png in it
"""

import argparse
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from penstock import TrainConfig, train_tokenizer
from watch.browser import open_browser, watch_errors
from watch.made import make_prose, make_shop, make_tree, served

TARGET: Final = Path(__file__).parents[1] / "docs" / "watch"
Shot = tuple[str, str, dict[str, Any]]
"""What is shown, what it waits for, and how."""
SHOTS: Final[dict[str, Shot]] = {
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


def take(url: str, folder: Path, shots: Mapping[str, Shot]) -> None:
    with open_browser() as browser:
        for name, (path, ready, about) in shots.items():
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
    parser.add_argument("--of", type=Path, help="a directory, of which two pictures are taken")
    parser.add_argument("--run", default="pipeline.toml", help="the run in it that is shown")
    parser.add_argument("--batch", type=int, default=0, help="the batch that is shown")
    args = parser.parse_args()
    if args.of:
        shown = f"batches?run={args.run}&n={args.batch}&row=0"
        shots: dict[str, Shot] = {
            "watch_pipeline": SHOTS["pipeline"],
            "watch_batch": (shown, ".tokens .t", {"token": 40, "height": 900}),
        }
        with served(args.of) as url:
            take(url, args.of, shots)
        return
    args.target.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.gettempdir()) / "waterworks"  # its name is in the pictures
    folder.mkdir()
    try:
        known = tokenizer(folder)
        make_shop(folder, known, files=7000, lines=120_000, rows_per_file=2000, steps=240)
        with served(folder) as url:
            take(url, args.target, {name: SHOTS[name] for name in args.names or SHOTS})
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
