"""Plugins by name: one for each, others by entry points, and what is said of wrong names."""

import importlib.metadata

import pytest

from penstock import plugins
from penstock.errors import BadConfig
from penstock.plugins import find, names, register


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_known", {kind: {} for kind in plugins.KINDS})
    monkeypatch.setattr(plugins, "_loaded", set())


def entries(monkeypatch: pytest.MonkeyPatch, *found: importlib.metadata.EntryPoint) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: found)


def entry(value: str, name: str = "other") -> importlib.metadata.EntryPoint:
    return importlib.metadata.EntryPoint(name, value, plugins.GROUP)


def test_what_is_registered_is_found() -> None:
    @register("filter", "short", least=3)
    def is_long(text: str) -> bool:
        return len(text) >= 3

    found = find("filter", "short")
    assert found.make is is_long
    assert found.about == {"least": 3}
    assert names("filter") == ["short"]
    assert names("cache") == []


def test_two_of_one_name_fail() -> None:
    register("cache", "disk")(dict)
    register("filter", "disk")(dict)
    with pytest.raises(BadConfig) as caught:
        register("cache", "disk")(list)
    assert caught.value.what == "there are two caches called 'disk'"
    assert caught.value.where == "builtins.dict and builtins.list"
    assert caught.value.do == "rename one of them, or uninstall its package"
    assert find("cache", "disk").make is dict


def test_an_unknown_name_lists_the_known_and_the_nearest() -> None:
    with pytest.raises(BadConfig, match="there is no format called 'jsnl'") as caught:
        find("format", "jsnl")
    assert caught.value.do == "there is none to choose from"
    register("format", "tar")(dict)
    register("format", "jsonl")(dict)
    with pytest.raises(BadConfig, match="there is no format called 'jsnl'") as caught:
        find("format", "jsnl")
    assert caught.value.do == "did you mean jsonl? choose from jsonl, tar"


def test_an_unknown_kind_lists_the_kinds() -> None:
    for call in (
        lambda: find("formats", "x"),
        lambda: register("formats", "x"),
        lambda: names("x"),
    ):
        with pytest.raises(BadConfig, match="there is no kind of plugin called") as caught:
            call()
        assert (
            "choose from advantage, cache, filter, format, partition, processor" in caught.value.do
        )


@pytest.mark.parametrize("name", ["", " a", "a\n"])
def test_a_name_is_a_plain_word(name: str) -> None:
    with pytest.raises(BadConfig, match="is not a name for a format") as caught:
        register("format", name)
    assert caught.value.do == "choose a plain word"


def test_others_are_loaded_when_first_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = []

    class Entry:
        name, value = "theirs", "theirs"

        def load(self) -> None:
            loads.append(1)
            register("format", "theirs")(dict)

    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [Entry()])
    register("format", "ours")(dict)
    assert find("format", "ours").make is dict
    assert loads == []
    assert find("format", "theirs").make is dict
    assert names("format") == ["ours", "theirs"]
    assert loads == [1]


def test_one_that_cannot_be_loaded_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    entries(monkeypatch, entry("no.such.module"), entry("json:dumps", "fine"))
    with pytest.raises(BadConfig) as caught:
        names("format")
    assert caught.value.what == "the plugin 'other' cannot be loaded"
    assert caught.value.where == "other = no.such.module"
    assert caught.value.why == "ModuleNotFoundError: No module named 'no'"
    assert caught.value.do == "fix or uninstall the package that brings it"
    assert names("format") == []


def test_one_that_takes_a_name_of_ours_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        name, value = "theirs", "theirs"

        def load(self) -> None:
            register("format", "ours")(list)

    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [Entry()])
    register("format", "ours")(dict)
    with pytest.raises(BadConfig, match="there are two formats called 'ours'"):
        names("format")
