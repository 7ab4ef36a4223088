"""Chat templates: rendered as their models expect, and stopped when they misbehave."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headway.errors import RequestError
from headway.text.chat import ChatLimits, ChatTemplate

HELLO = [{"role": "user", "content": "Hi"}]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
FOREVER = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@contextmanager
def template(source: str | None, **limits: float) -> Iterator[ChatTemplate]:
    with ChatTemplate(source, "<s>", "</s>", ChatLimits(**limits)) as made:  # type: ignore[arg-type]
        yield made


def render(source: str, names: dict[str, object] | None = None) -> str:
    with template(source) as made:
        return made.render(HELLO, names=names)


def refusal(made: ChatTemplate) -> str:
    with pytest.raises(RequestError) as caught:
        made.render(HELLO)
    assert caught.value.param == "messages"
    return str(caught.value)


def test_messages_are_rendered_with_and_without_the_generation_prompt() -> None:
    with template(CHATML) as made:
        assert made.render(HELLO) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        assert made.render(HELLO, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("{{ bos_token }}x{{ eos_token }}", "<s>x</s>"),
        ("{% if tools %}t{% endif %}{{ tools is none }}", "True"),
        ("{{ {'a': '<é>', 'b': [1]} | tojson }}", json.dumps({"a": "<é>", "b": [1]}, ensure_ascii=False)),
        ("{{ {'a': 1} | tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("{% if true %}\n  a\n{% endif %}\nb", "  a\nb"),
        ("    {% set x = 1 %}\n{{ x }}", "1"),
        ("a{% generation %}b{% endgeneration %}c", "abc"),
        ("{{ flavour }}", "mint"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
    ],
)
def test_helpers_of_published_templates_work(source: str, wanted: str) -> None:
    assert render(source, {"flavour": "mint"}) == wanted


def test_any_text_passes_through_whole() -> None:
    odd = "\0\n\r\u2028\ud83d 🙂 \\ \" '{{ x }}' {% raw %}"
    with template("{{ messages[0].content }}") as made:
        assert made.render([{"role": "user", "content": odd}]) == odd


def test_what_the_template_raises_is_the_requests_fault() -> None:
    with template("{{ raise_exception('roles must alternate') }}") as made:
        assert "roles must alternate" in refusal(made)


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("{{ messages[7].content.x }}", "UndefinedError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ raise_exception.__globals__.sys }}", "SecurityError"),
        ("{% include '/etc/passwd' %}", "TypeError"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "deep"),
    ],
)
def test_templates_that_fail_or_reach_out_are_refused_with_the_reason(source: str, word: str) -> None:
    with template(source) as made:
        assert word in refusal(made)


def test_a_template_that_never_ends_is_killed_and_the_next_request_served() -> None:
    source = "{% if messages[0].content == 'loop' %}" + FOREVER + "{% endif %}fine"
    with template(source, timeout_s=1.5) as made:  # long enough to get a fifth of it on a busy machine
        with pytest.raises(RequestError, match=r"1\.5 s"):
            made.render([{"role": "user", "content": "loop"}])
        assert made.render(HELLO) == "fine"


@pytest.mark.parametrize(
    "source",
    ["{{ 'x' * 2000000000 }}", "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "{{ 'x' * 2000000 }}"],
)
def test_too_much_text_is_refused_and_the_process_lives_on(source: str) -> None:
    with template("{% if messages[0].content == 'big' %}" + source + "{% endif %}fine") as made:
        with pytest.raises(RequestError, match="1048576 characters"):
            made.render([{"role": "user", "content": "big"}])
        assert made.render(HELLO) == "fine"


def test_a_child_that_was_killed_is_replaced() -> None:
    with template(CHATML) as made:
        wanted = made.render(HELLO)
        (child,) = made._children.idle
        os.kill(child._process.pid, 9)
        child._process.wait()
        assert made.render(HELLO) == wanted


def test_threads_share_the_children() -> None:
    with template("{{ messages[0].content }}") as made:
        got: dict[int, str] = {}

        def work(index: int) -> None:
            for _ in range(20):
                got[index] = made.render([{"role": "user", "content": f"text {index}" * 3000}])

        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert got == {index: f"text {index}" * 3000 for index in range(4)}


def test_a_model_without_a_template_says_so() -> None:
    with template(None) as made:
        made.start()
        assert not made.is_present
        assert "no chat template" in refusal(made)


def test_nothing_is_started_before_it_is_needed_and_nothing_is_left() -> None:
    made = ChatTemplate(CHATML)
    assert not made._children.idle
    made.start()
    (child,) = made._children.idle
    process = child._process
    made.close()
    assert process.poll() is not None


@pytest.mark.parametrize("wrong", [{"role": "pirate", "content": "x"}, {"content": "x"}, {"role": 5, "content": "x"}])
def test_a_role_that_there_is_not_is_refused_with_those_there_are(wrong: dict[str, object]) -> None:
    with (
        ChatTemplate("{% for message in messages %}{{ message.role }}{% endfor %}") as template,
        pytest.raises(RequestError, match=r"messages\[1\].role: .*; allowed: system, .*user, assistant, tool$"),
    ):
        template.render([{"role": "user", "content": "x"}, wrong])
