"""What transformers trained on 300 conversations for each preset, by its hash.

`make oracles` compares 2,000 with the real transformers and TRL, and writes recorded.json.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.chat.templates import PRESETS
from penstock.tokenize.tokenizer import Tokenizer

HERE = Path(__file__).parent
RECORDED = json.loads((HERE / "recorded.json").read_text())


def oracles() -> Any:
    path = HERE.parents[1] / "scripts" / "oracles.py"
    spec = importlib.util.spec_from_file_location("oracles", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("preset", PRESETS)
def test_trained_tokens_are_those_of_transformers(preset: str, chat_tokenizer: Tokenizer) -> None:
    script = oracles()
    rows = script.made_rows(preset, script.RECORDED)
    assert len(rows) == 300
    ids, masks = script.render_ours(chat_tokenizer, preset, rows)
    assert script.digest(ids, masks) == RECORDED["sha256"][preset]
