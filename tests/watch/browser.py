"""A real Chromium without a screen, for tests of the page and for its screenshots."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser

FLAGS = [
    "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--force-color-profile=srgb",
]  # fmt: skip


@contextlib.contextmanager
def open_browser() -> Iterator["Browser"]:
    """The machine's own Chromium; `scripts/tools` installs it where it is missing."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("google-chrome")
    assert path, "there is no chromium: run scripts/tools"
    flags = [*FLAGS, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=flags)
        try:
            yield browser
        finally:
            browser.close()


def watch_errors(page: Any) -> list[str]:
    """What goes wrong on a page: errors of scripts, what the policy refused, other hosts.

    An answer that there is no such batch is none of it: the page shows it.
    """
    wrong: list[str] = []
    expected = "status of 422"
    page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    page.on(
        "console",
        lambda told: (
            wrong.append(f"console: {told.text}")
            if told.type == "error" and expected not in told.text
            else None
        ),
    )
    page.on(
        "request",
        lambda asked: (
            None if "//127.0.0.1:" in asked.url else wrong.append(f"asked elsewhere: {asked.url}")
        ),
    )
    return wrong
