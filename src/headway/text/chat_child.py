"""The process that renders chat templates: a template is a program that came with a model file.

Run as a script by `chat`; imports jinja2 and nothing of headway, so that it stays small. One JSON line in gives one
JSON line out, in order:

    {"template": …, "names": {"bos_token": …}, …limits}   ->  {"ready": true}     once, at the start
    {"messages": […], …}                                  ->  {"text": …}
                                                          or  {"error": …, "kind": "raised" | "failed" | "long"}

each with "cpu_s", the CPU time of the process so far.

The parent kills a render that takes too long; memory is limited here, and an alarm ends this process should the
parent have died meanwhile.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import time
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Raised(TemplateError):
    """The template itself refused the messages."""


class TooLong(Exception):
    """The text grew beyond the limit."""


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; here it renders its content."""

    tags = {"generation"}  # noqa: RUF012, jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(source: str) -> Template:
    """The template with the helpers that published ones expect."""

    def raise_exception(message: object) -> NoReturn:
        raise Raised(str(message))

    def tojson(value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        known = {key: options[key] for key in ("separators", "sort_keys") if key in options}
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **known)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment.from_string(source)


def render(template: Template, names: dict[str, object], most: int) -> dict[str, object]:
    """One answer line for one set of names."""
    try:
        pieces: list[str] = []
        size = 0
        for piece in template.generate(**names):
            size += len(piece)
            if size > most:
                raise TooLong
            pieces.append(piece)
        return {"text": "".join(pieces)}
    except Raised as error:
        return {"error": str(error)[:2000], "kind": "raised"}
    except (TooLong, MemoryError):
        return {"error": "", "kind": "long"}
    except RecursionError:
        return {"error": "the template nests too deeply", "kind": "failed"}
    except Exception as error:  # whatever a template does wrong is an answer, not the end of this process
        return {"error": f"{type(error).__name__}: {error}"[:2000], "kind": "failed"}


def say(line: dict[str, object]) -> None:
    """Answer; the CPU time so far tells the parent a busy process from a stopped one."""
    sys.stdout.write(json.dumps({**line, "cpu_s": time.process_time()}) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serve until the parent closes our input."""
    for sig in (signal.SIGINT, signal.SIGHUP):  # the terminal's signals are the parent's to handle; it closes our input
        signal.signal(sig, signal.SIG_IGN)
    setup = json.loads(sys.stdin.readline() or "null")
    if setup is None:
        return
    if sys.platform != "darwin":  # a process of macOS begins with more address space than any useful limit allows
        resource.setrlimit(resource.RLIMIT_AS, (setup["memory_bytes"], setup["memory_bytes"]))
    signal.setitimer(signal.ITIMER_REAL, setup["start_s"])
    try:
        template = compile_template(setup["template"])
    except (Exception, RecursionError) as error:
        say({"error": f"{type(error).__name__}: {error}"[:2000], "kind": "failed"})
        return
    signal.setitimer(signal.ITIMER_REAL, 0)
    say({"ready": True})
    for line in sys.stdin:
        # The default action of the alarm ends the process: no handler runs inside a regular expression or a join.
        signal.setitimer(signal.ITIMER_REAL, setup["alarm_s"])
        say(render(template, {**setup["names"], **json.loads(line)}, setup["most_chars"]))
        signal.setitimer(signal.ITIMER_REAL, 0)


if __name__ == "__main__":
    main()
