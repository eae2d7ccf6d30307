"""Draw benchmarks/results/*.json as plain SVG, for docs/benchmarks.md.

In:    the results that the benchmarks kept
Out:   docs/plots/<name>.svg, bars with their numbers, readable in light and dark mode
Keeps: the same results give the same bytes, so a test compares them
Never: measures, needs a library

usage: python benchmarks/plots.py
"""

import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TARGET = HERE.parent / "docs" / "plots"

STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#24292f}"
    ".title{font-weight:600}.note{font-size:11px;fill:#57606a}"
    ".ours{fill:#0b6e4f}.other{fill:#8c959f}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.note{fill:#8d96a0}"
    ".ours{fill:#3fb68b}.other{fill:#6e7681}}"
)


def read(job: str) -> dict[str, Any]:
    """The results of one benchmark."""
    found: dict[str, Any] = json.loads((HERE / "results" / f"{job}.json").read_text())
    return found


def bars(title: str, note: str, values: Mapping[str, float], form: str = ",.0f") -> str:
    """Bars from zero on, in the order given; those of penstock in color.

    >>> print(bars("speed", "MB/s", {"penstock": 2.0, "other": 1.0}))  # doctest: +ELLIPSIS
    <svg ... viewBox="0 0 720 112"...
    """
    width, left, right, top, step = 720, 250, 80, 48, 24
    height = top + step * len(values) + 16
    most = max(values.values())
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title)}">',
        f"<style>{STYLE}</style>",
        f'<text class="title" x="8" y="18">{escape(title)}</text>',
        f'<text class="note" x="8" y="36">{escape(note)}</text>',
    ]
    for k, (name, value) in enumerate(values.items()):
        y, long = top + step * k, (width - left - right) * value / most
        kind = "ours" if name.startswith("penstock") else "other"
        parts += [
            f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{escape(name)}</text>',
            f'<rect class="{kind}" x="{left}" y="{y + 2}" width="{long:.1f}" height="16" rx="2"/>',
            f'<text x="{left + long + 6:.1f}" y="{y + 14}">{value:{form}}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def said(results: Mapping[str, Any]) -> str:
    """When and on what it was measured."""
    machine = results["machine"]
    return (
        f"{results['date']}, commit {results['commit']}, {machine['cpu']}, {machine['cores']} cores"
    )


LOADERS = {
    "penstock_concat": "penstock, concatenated",
    "penstock": "penstock, best fit",
    "litdata": "LitData",
    "datasets_map": "HF datasets, map",
    "megatron": "Megatron-core",
    "olmo": "OLMo-core",
    "datasets_stream": "HF datasets, streaming",
    "energon": "Energon",
    "mosaicml": "MosaicML Streaming",
    "grain_no_threads": "Grain",
    "nanochat": "nanochat-style",
}


def drawings() -> dict[str, str]:
    """Every plot by the name of its file."""
    loader, shard, prepare, sync = (
        read("loader"),
        read("shard"),
        read("prepare"),
        read("sync_light"),
    )
    speed = {
        name: loader["loaders"][key]["speed_0"]["tokens_per_s"] / 1e6
        for key, name in LOADERS.items()
    }
    grown = {
        name: float(loader["loaders"][key]["grow"]["lost"])
        for key, name in LOADERS.items()
        if "lost" in loader["loaders"][key]["grow"]
    }
    chunkers = {
        "penstock x2": "penstock, 2 workers",
        "penstock x1": "penstock, 1 worker",
        "tree_sitter x2": "tree-sitter walk",
        "braces x2": "top-level braces",
        "semantic x2": "semantic-text-splitter",
    }
    return {
        "loader_speed.svg": bars(
            "Loader, one process: million tokens per second",
            said(loader),
            speed,
            ",.1f",
        ),
        "loader_grown.svg": bars(
            "Resume after 1,000 samples grew to 2,000: samples not seen in that epoch",
            said(loader),
            grown,
        ),
        "shard_seconds.svg": bars(
            "1,074 MB of JSONL to zstd parquet: seconds, less is better",
            said(shard),
            {name: run["wall_s"] for name, run in shard["runs"].items()},
            ",.2f",
        ),
        "chunk_speed.svg": bars(
            "Chunks of 1,024 tokens: files per second",
            said(prepare),
            {name: prepare["chunk"]["1024"][key]["files_per_s"] for key, name in chunkers.items()},
        ),
        "sync_speed.svg": bars(
            "To an S3 server and back: MB per second",
            said(sync),
            {
                f"{name}, {way}": rate
                for way in ("push", "pull")
                for name, rate in ((n, both[way]) for n, both in sync["mb_per_s"].items())
            },
        ),
    }


def main() -> None:
    """Write them all."""
    TARGET.mkdir(parents=True, exist_ok=True)
    for name, drawing in drawings().items():
        (TARGET / name).write_text(drawing)
        print(f"docs/plots/{name}")


if __name__ == "__main__":
    main()
