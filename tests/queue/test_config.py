"""The shared config: every problem at once; providers and trainers by where they stand."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock import SharedConfig, check_config, read_config
from penstock.errors import BadConfig
from penstock.queue.config import QueueConfig, find_provider, find_trainer

GOOD: dict[str, Any] = {"dataset": "numbers", "batch_size": 4, "block_size": 8}
PROVIDER = """
from penstock import DataProviderBase


class First(DataProviderBase):
    def build_meta(self):
        return {"seen": globals().get("mask_probability"), "batch_schema": []}

    def sample_batch(self, split, rng):
        return {}
"""


def project(folder: Path, code: str, name: str = "numbers") -> SharedConfig:
    (folder / "data" / name).mkdir(parents=True)
    (folder / "data" / name / "prepare_streaming.py").write_text(code)
    return SharedConfig({**GOOD, "dataset": name, "mask_probability": 0.25}, root=folder)


def test_every_problem_is_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "config.py"
    path.write_text(
        "dataset = '../secrets'\nbatchsize = 4\nblock_size = 0\nseed = -1\ndelete = 'never'\n"
        "stall_s = 0\nbacklog_batches = 2.5\nmask_probability = 1.5\nignore_index = 'none'\n"
        "trainer = 7\nnoise_table = {1, 2}\n"
    )
    with pytest.raises(BadConfig, match="the config has 11 problems") as caught:
        read_config(path)
    assert caught.value.where == str(path)
    told = caught.value.why
    for line in (
        "batch_size is missing: did you mean that with 'batchsize'?",
        "dataset is '../secrets': name a folder below data: letters, digits, _ and -",
        "block_size is 0: choose 1 or more",
        "seed is -1: choose 0 or more",
        "backlog_batches is 2.5: choose a whole number",
        "delete is 'never': choose from checkpointed, consumed",
        "stall_s is 0: choose more than 0 seconds",
        "trainer is 7: give a path or an address, without NUL",
        "mask_probability is 1.5: choose a share, up to 1",
        "ignore_index is 'none': choose a whole number",
        "noise_table is {1, 2}: use numbers, texts, lists and dicts",
    ):
        assert line in told


def test_what_is_sufficient_has_no_problem() -> None:
    assert check_config(GOOD) == []
    assert check_config({**GOOD, "my_knob": [1, {"a": None}], "n_layer": 3}) == []
    assert check_config({}) == [
        "dataset is missing: set dataset = …",
        "batch_size is missing: set batch_size = …",
        "block_size is missing: set block_size = …",
    ]
    assert check_config({**GOOD, "lease": 3, "mask_probabilty": 0.1}) == [
        "'mask_probabilty' is not a setting of penstock's: did you mean 'mask_probability'?"
    ]
    assert check_config({**GOOD, "batch_sizes": 8, "stall_s": 9.0, "stal_s": 3.0}) == [
        "'batch_sizes' is not a setting of penstock's: did you mean 'batch_size'?",
        "'stal_s' is not a setting of penstock's: did you mean 'stall_s'?",
    ]
    with pytest.raises(BadConfig, match="lease_s is 'x'"):
        QueueConfig(**GOOD, lease_s="x")  # type: ignore[arg-type]
    with pytest.raises(BadConfig, match="data_dir is ''"):
        QueueConfig(**GOOD, data_dir="")


def test_python_and_toml_say_the_same(tmp_path: Path) -> None:
    python, toml = tmp_path / "c.py", tmp_path / "c.toml"
    python.write_text(
        "import math\n\n_half = 0.5\n\ndef half(x):\n    return x // 2\n\n"
        "dataset = 'numbers'\nbatch_size = half(8)\nblock_size = 8\n"
        "stages = ({'first_batch': 0, 'high': _half},)\n"
    )
    toml.write_text(
        'dataset = "numbers"\nbatch_size = 4\nblock_size = 8\n\n'
        "[[stages]]\nfirst_batch = 0\nhigh = 0.5\n"
    )
    first, second = read_config(python), read_config(toml)
    assert dict(first) == dict(second)
    assert len(first) == 4
    assert first["stages"] == [{"first_batch": 0, "high": 0.5}]
    assert first.queue == second.queue
    assert first.data_settings() == {"block_size": 8, "stages": [{"first_batch": 0, "high": 0.5}]}
    assert first.folder == Path("data/numbers")


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("c.py", b"batch_size = \n", "does not run\n.*line 1\n.*SyntaxError"),
        ("c.py", b"a = 1\nb = a / 0\n", "does not run\n.*line 2\n.*ZeroDivisionError"),
        ("c.py", b"import sys\n\nsys.exit('no')\n", "does not run\n.*line 3\n.*SystemExit: no"),
        ("c.py", b"a = 1\0\n", r"does not run\n.*c\.py\n.*null bytes"),
        ("c.py", b"\xff\xfe", "is no text"),
        ("c.toml", b"batch_size = \n", "is not TOML"),
    ],
)
def test_a_config_that_cannot_be_read_is_told(
    tmp_path: Path, name: str, content: bytes, told: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadConfig, match=told):
        read_config(tmp_path / name)
    with pytest.raises(BadConfig, match="there is no"):
        read_config(tmp_path / "none.py")
    (tmp_path / "c.json").write_text('{"dataset": "numbers"}')
    with pytest.raises(BadConfig, match=r"ends in \.py or \.toml"):
        read_config(tmp_path / "c.json")


def test_the_only_provider_is_found(tmp_path: Path) -> None:
    config = project(tmp_path / "a", PROVIDER)
    kind = find_provider(config)
    assert kind.__name__ == "First"
    assert kind(config).build_meta()["seen"] == 0.25  # settings are globals of its module
    derived = (
        "from data.numbers.prepare_streaming import First\n\n\nclass Second(First):\n    pass\n"
    )
    (tmp_path / "a" / "data" / "second").mkdir()
    (tmp_path / "a" / "data" / "second" / "prepare_streaming.py").write_text(derived)
    other = SharedConfig({**GOOD, "dataset": "second"}, root=tmp_path / "a")
    assert find_provider(other).__name__ == "Second"  # and not the one that it is derived from


def test_of_several_providers_the_one_called_provider_is_meant(tmp_path: Path) -> None:
    two = PROVIDER + PROVIDER.replace("First", "Second")
    with pytest.raises(BadConfig, match="has 2 providers: First, Second") as caught:
        find_provider(project(tmp_path / "a", two))
    assert caught.value.do == "call the one that is meant Provider: Provider = …"
    config = project(tmp_path / "b", two + "\nProvider = Second\n")
    assert find_provider(config).__name__ == "Second"
    with pytest.raises(BadConfig, match="Provider is 3"):
        find_provider(project(tmp_path / "c", PROVIDER + "\nProvider = 3\n"))
    with pytest.raises(BadConfig, match="has 0 providers"):
        find_provider(project(tmp_path / "d", "from penstock import DataProviderBase\n"))


def test_a_dataset_without_a_provider_is_told(tmp_path: Path) -> None:
    project(tmp_path, PROVIDER, "mine")
    config = SharedConfig({**GOOD, "dataset": "yours"}, root=tmp_path)
    with pytest.raises(BadConfig, match="dataset 'yours' has no provider") as caught:
        find_provider(config)
    assert "datasets that have one: mine" in caught.value.why


def test_errors_in_a_provider_are_its_own(tmp_path: Path) -> None:
    config = project(tmp_path, "import no_such_module\n")
    with pytest.raises(ModuleNotFoundError):
        find_provider(config)
    assert not [name for name in sys.modules if "its_own" in name]


def test_a_provider_that_leaves_or_is_not_finished_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"does not run\n.*streaming\.py, line 3\n.*SystemExit: 0"):
        find_provider(project(tmp_path / "a", "import sys\n\nsys.exit(0)\n"))
    base = "from penstock import DataProviderBase\n\nProvider = DataProviderBase\n"
    with pytest.raises(BadConfig, match="which has no build_meta or sample_batch"):
        find_provider(project(tmp_path / "b", base))


def test_trainers_are_found(tmp_path: Path) -> None:
    config = SharedConfig(GOOD, root=tmp_path)
    with pytest.raises(BadConfig, match="there is no trainer"):
        find_trainer(config)
    (tmp_path / "train.py").write_text("train = 3\n")
    with pytest.raises(BadConfig, match=r"train\.py has no function train"):
        find_trainer(config)
    (tmp_path / "mine.py").write_text("def train(config, consumer):\n    pass\n")
    other = SharedConfig({**GOOD, "trainer": "mine.py"}, root=tmp_path)
    assert find_trainer(other).__name__ == "train"


def test_the_commands_say_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text("batch_size = 4\n")
    for command in ("prepare", "train"):
        done = subprocess.run(
            [sys.executable, "-m", "penstock.cli", command, "config.py"],
            cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 1
        assert "BadConfig: the config has 2 problems" in done.stderr
        assert "Traceback" not in done.stderr
