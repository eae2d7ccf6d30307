"""Templates that nobody vouches for: refused within their limits, and the process lives."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from penstock.chat.formats import Unfit
from penstock.chat.sandbox import MOST_KILLED, Limits, Sandbox, _send_all
from penstock.errors import BadConfig, WorkerFailed

REQUEST = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
LIMITS = Limits(time_s=0.6, memory_bytes=64 << 20, output_bytes=1 << 20)

HOSTILE = {
    "attribute walk": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "attribute walk by filter": "{{ ('' | attr('__class__')).__mro__ }}",
    "attribute walk by format": "{{ '{0.__class__}'.format(messages) }}{{ messages.__class__.x }}",
    "globals": "{{ raise_exception.__globals__['os'].system('id') }}",
    "cycler": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "changes what it is given": "{{ messages.append(1) }}",
    "a gigabyte": "{% set n = messages | length %}{{ 'a' * (n * 10**9) }}",
    "a gigabyte when compiled": "{{ 'a' * 10**9 }}",
    "wide format": "{{ '%999999999d' % (messages | length) }}",
    "prints too much": "{% for i in range(90000) %}{{ 'abcdefghijklmnopqrstuvwxyz' }}{% endfor %}",
    "long range": "{% for i in range(10**9) %}{% endfor %}",
    "nested loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}"
    "{% set x = a * b * c %}{% endfor %}{% endfor %}{% endfor %}",
    "large power": "{{ (9 ** (messages | length * 9)) ** (9 ** 9) }}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "deep nesting": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "many lists": "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}"
    "{% set ns.x = [ns.x, ns.x, 'a' * (9999 + i)] %}{% endfor %}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_refused_and_we_live(name: str) -> None:
    sandbox = Sandbox(HOSTILE[name], {}, limits=LIMITS)
    began = time.monotonic()
    told = ""
    try:
        (found,) = sandbox.render([REQUEST])
    except BadConfig as error:  # it did not get beyond its compilation
        told = error.why
    else:
        assert isinstance(found, Unfit)
        assert found.reason in (
            "template_refused", "template_too_slow", "template_too_large", "template_too_deep",
            "template_died",
        )  # fmt: skip
        told = found.why
    assert told
    assert name != "many lists" or "no memory" in told
    assert time.monotonic() - began < 20, "its time, and the start of a process"
    sandbox.close()


def test_one_that_is_slow_for_one_conversation_is_asked_for_the_next() -> None:
    slow = (
        "{% if messages[0].content == 'slow' %}{% for a in range(99999) %}{% for b in range(99999) "
        "%}{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}"
    )
    texts = ["a", "slow", "b", "c"]
    requests = [json.dumps({"messages": [{"content": text}]}).encode() for text in texts]
    sandbox = Sandbox(slow, {}, limits=LIMITS)
    found = list(sandbox.render(requests))
    assert [one.reason if isinstance(one, Unfit) else one[0] for one in found] == [
        "a", "template_too_slow", "b", "c",
    ]  # fmt: skip
    assert list(sandbox.render(requests[:1])) == [["a"]]
    sandbox.close()


def test_one_that_is_slow_for_every_conversation_is_given_up() -> None:
    slow = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    sandbox = Sandbox(slow, {}, limits=Limits(time_s=0.2))
    assert len(list(sandbox.render([REQUEST] * 5))) == 5
    again = sandbox.render([REQUEST] * 1000)
    assert all(isinstance(next(again), Unfit) for _ in range(MOST_KILLED - 6))
    with pytest.raises(BadConfig, match="the chat template cannot be used") as error:
        next(again)
    assert error.value.why == "8 conversations in a row: it took more than 0.2 s"
    sandbox.close()


def test_the_process_ends_with_its_sandbox() -> None:
    sandbox = Sandbox("{{ messages[0].content }}", {})
    assert list(sandbox.render([REQUEST])) == [["hi"]]
    process: Any = sandbox._process
    sandbox.close()
    assert process.returncode is not None
    assert list(sandbox.render([REQUEST])) == [["hi"]], "it begins again when it is needed"
    half: Any = sandbox.render([REQUEST] * 3)
    assert next(half) == ["hi"]
    half.close()
    process = sandbox._process
    assert process is None
    sandbox.close()


def test_the_process_stays_until_an_answer_is_left_unread() -> None:
    """One that is begun anew for every piece of conversations costs each of them 0.1 s of CPU."""
    sandbox = Sandbox("{{ messages[0].content }}", {})
    asked = sandbox.render([REQUEST, REQUEST])
    assert [next(asked), next(asked)] == [["hi"], ["hi"]]
    asked.close()  # type: ignore[attr-defined]
    process = sandbox._process
    assert list(sandbox.render([REQUEST])) == [["hi"]]
    assert sandbox._process is process is not None
    sandbox.close()


def test_a_template_does_not_outlive_whoever_waits_for_it() -> None:
    """A process that was killed ends nobody in time: what runs in the sandbox ends by itself."""
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    sandbox = Sandbox(endless, {}, limits=LIMITS)
    process = sandbox._started()
    _send_all(process, [REQUEST])  # and nobody reads
    assert process.wait(timeout=20) == -signal.SIGALRM
    sandbox.close()


def test_many_large_requests_do_not_block() -> None:
    """Pipes hold 64 KB: whoever writes all before he reads waits for ever."""
    request = json.dumps({"messages": [{"content": "x" * 50_000}]}).encode()
    sandbox = Sandbox("{{ messages[0].content * 3 }}", {})
    assert [len(one[0]) for one in sandbox.render([request] * 40)] == [150_000] * 40  # type: ignore[index]
    sandbox.close()


def test_names_and_cuts() -> None:
    sandbox = Sandbox(
        "{{ bos_token }}{{ messages | length }}{{ '>' if add_generation_prompt }}"
        "{{ tools | tojson }}", {"bos_token": "<s>"},
    )  # fmt: skip
    messages = [{"content": "a"}, {"content": "b"}]
    request = {"messages": messages, "tools": [{"a": "é<"}], "cuts": [[1, True], [2, False]]}
    (found,) = sandbox.render([json.dumps(request).encode()])
    assert found == ['<s>1>[{"a": "é<"}]', '<s>2[{"a": "é<"}]']
    sandbox.close()


def test_a_process_that_does_not_begin_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import sys

    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 3\n")
    os.chmod(broken, 0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(WorkerFailed, match="the process of the template did not begin") as error:
        list(Sandbox("x", {}).render([REQUEST]))
    assert "status 3" in error.value.why
