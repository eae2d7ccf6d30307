"""`penstock conversations`, `penstock audit-template` and `penstock show`, as they are typed."""

import json
from pathlib import Path

import pytest

from penstock.cli import app, main
from penstock.errors import BadConfig
from penstock.store.log import Log
from penstock.tokenize.tokenizer import Tokenizer
from penstock.watch.show import describe

from .made import conversations


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = 0
    try:
        main(lambda: app([str(argument) for argument in arguments]))
    except SystemExit as ended:
        code = int(ended.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def test_conversations_are_made_and_shown(
    capsys: pytest.CaptureFixture[str], chat_folder: Path, tmp_path: Path
) -> None:
    file, out = tmp_path / "a.jsonl", tmp_path / "out"
    rows = [*conversations(1, 30), {"messages": []}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, said, err = run(
        capsys, "conversations", "--input", file, "--parquet_dir", out, "--tokenizer", chat_folder,
        "--complete", "--max-length", "8000", "--train_on", "assistant,user", "--chat_template",
        "qwen", "--max_rejects", "0.5", "--val_fraction", "0", "--turns", "all",
    )  # fmt: skip
    assert code == 0, err
    assert said.splitlines() == [
        f"{out}: sealed, 31 conversations read, 30 kept as 30 samples in 1 shards",
        "  1 not kept: no_messages",
    ]
    code, said, _ = run(capsys, "show", out, "--rows", 1, "--tokenizer", chat_folder)
    assert code == 0
    assert 'tokens trained: \'{"messages"' in said
    assert said.count("«") == said.count("»") > 1
    assert "<|im_end|>»" in said
    code, said, _ = run(capsys, "show", out, "--rows", 1, "--json")
    about = json.loads(said)
    assert "shown" not in about["sample"][0]
    assert about["config"]["prepare"]["steps"][0]["train_on"] == ["assistant", "user"]


def test_an_empty_result_is_no_success(
    capsys: pytest.CaptureFixture[str], chat_folder: Path, tmp_path: Path
) -> None:
    file, out = tmp_path / "a.jsonl", tmp_path / "out"
    file.write_text("".join(json.dumps(row) + "\n" for row in conversations(1, 3)))
    for _ in range(2):  # the same when it is sealed already
        code, said, err = run(
            capsys, "conversations", "--input", file, "--parquet_dir", out, "--tokenizer",
            chat_folder, "--complete", "--max_length", 4,
        )  # fmt: skip
        assert code == 1
        assert ": sealed, " in said
        assert err.splitlines()[0] == "BadInput: nothing was kept"
        assert "  why:   all 3 documents were refused: too_long 3\n" in err
        assert "(--max_length, --train_on, --format)" in err


def test_show_needs_the_tokenizer_of_the_dataset(
    capsys: pytest.CaptureFixture[str], chat_folder: Path, tokenizer_folder: Path, tmp_path: Path
) -> None:
    file, out = tmp_path / "a.jsonl", tmp_path / "out"
    file.write_text("".join(json.dumps(row) + "\n" for row in conversations(1, 5)))
    run(capsys, "conversations", "--input", file, "--parquet_dir", out, "--tokenizer", chat_folder,
        "--complete", "--max_length", 9000)  # fmt: skip
    log = Log.open(out)
    with pytest.raises(BadConfig, match="the tokens of the dataset cannot be shown"):
        describe(log, tokenizer=tokenizer_folder)
    shown = describe(log, sample_rows=1, tokenizer=chat_folder, colours=True)["sample"][0]["shown"]
    assert "\x1b[1;32m" in shown


def test_templates_are_audited(
    capsys: pytest.CaptureFixture[str], chat_folder: Path, tmp_path: Path
) -> None:
    code, said, _ = run(capsys, "audit-template", "chatml", "--tokenizer", chat_folder)
    assert code == 0
    assert "ok    stop token trained       <|im_end|> after each of 2 turns" in said
    assert "«Two.<|im_end|>»" in said
    assert "-- a call and its result" in said
    bad = tmp_path / "bad.jinja"
    bad.write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    code, said, _ = run(capsys, "audit-template", bad, "--tokenizer", chat_folder, "--json")
    assert code == 1
    about = json.loads(said)
    assert not about["fit"]
    assert {one["verdict"] for one in about["findings"]} >= {"ok", "bad"}
    code, said, _ = run(capsys, "audit-template", bad, "--tokenizer", chat_folder)
    assert code == 1
    assert "-- two exchanges: refused, no_stop_token" in said
    code, said, _ = run(capsys, "audit-template", "gemma", "--jinja")
    assert code == 0
    assert "<start_of_turn>model" in said
    code, _, err = run(capsys, "audit-template", "gema", "--tokenizer", chat_folder)
    assert code == 1
    assert "did you mean gemma" in err


def test_a_template_beside_the_tokenizer(
    capsys: pytest.CaptureFixture[str], chat_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    from penstock.chat.jinja import preset_jinja

    (tmp_path / "tokenizer.json").write_text(json.dumps(chat_tokenizer.content))
    (tmp_path / "chat_template.jinja").write_text(preset_jinja("qwen"))
    code, said, _ = run(capsys, "audit-template", "tokenizer", "--tokenizer", tmp_path)
    assert code == 0
    assert "{% generation %} blocks" in said
