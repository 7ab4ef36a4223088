"""The entry point: the list of commands, and what an error looks like from outside.

    exit code 0 done · 1 the engine or a check failed · 2 a flag, value, file or machine is at fault · 130 interrupted

Every error is one sentence on stderr. This file knows no command's options.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, Literal

from cyclopts import App, CycloptsError, Parameter, UnknownOptionError, UnusedCliTokensError

from headway.cli import bench, chat, doctor, generate, models, rank, serve, verify
from headway.cli.args import sources
from headway.cli.help import ShortHelp
from headway.errors import ConfigError, EngineError, RequestError

HELP_ALL = "--help-all"
COMPLETION = """Examples:
  source <(headway completion bash)
  headway completion fish > ~/.config/fish/completions/headway.fish"""


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Run one command and return its exit code."""
    tokens = _stdin_as_file(sys.argv[1:] if argv is None else argv)
    try:
        result = create_app(os.environ if environ is None else environ, tokens)(tokens)
        sys.stdout.flush()  # here, where a reader that has left is expected, and not at exit
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has closed it; a second error while flushing at exit would be noise.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except CycloptsError as error:
        return _fail(_sentence(error), 2)
    except (ConfigError, RequestError) as error:
        return _fail(str(error), 2)
    except EngineError as error:
        return _fail(str(error), 1)
    return result if isinstance(result, int) else 0


def create_app(environ: Mapping[str, str], tokens: Sequence[str] = ()) -> App:
    """All commands; `tokens` are those it will be called with."""

    shows_all = HELP_ALL in tokens

    def reparse() -> Mapping[str, Any]:
        try:
            return create_app(environ).parse_args(tokens)[1].arguments
        except CycloptsError as error:
            raise ConfigError(_sentence(error)) from error

    app = App(
        name="headway",
        help="An LLM serving engine: continuous batching, paged KV cache, predictable latency.",
        help_epilogue=(
            "Start with: headway serve, then headway chat --url http://127.0.0.1:8000.\n"
            "Every option can also come from HEADWAY_<OPTION> or from a file given with --config.\n"
            f"A command's --help shows the options that matter to most, {HELP_ALL} every one."
        ),
        help_flags=["--help", "-h", HELP_ALL],
        help_formatter=None if shows_all else ShortHelp(),
        help_format="plaintext",
        version=lambda: version("headway"),
        config=sources(environ),
        # A switch that is off unless given needs no --no- twin.
        default_parameter=Parameter(negative_bool=()),
        print_error=False,
        exit_on_error=False,
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    more = "" if shows_all else f"\n\n{HELP_ALL} shows every option."
    app.command(serve.command(reparse), help_epilogue=serve.EXAMPLES + more, sort_key=1)
    app.command(chat.chat, help_epilogue=chat.EXAMPLES + more, sort_key=2)
    app.command(generate.generate, help_epilogue=generate.EXAMPLES + more, sort_key=3)
    app.command(models.create_app())
    app.command(doctor.doctor, help_epilogue=doctor.EXAMPLES, sort_key=5)
    app.command(verify.verify, help_epilogue=verify.EXAMPLES + more, sort_key=5)

    def completion(shell: Literal["bash", "zsh", "fish"], /) -> int:
        """Print what makes a shell complete commands and options.

        Parameters
        ----------
        shell
            bash, zsh or fish.
        """
        print(app.generate_completion(shell=shell))
        return 0

    app.command(completion, help_epilogue=COMPLETION, sort_key=6)
    app.command(rank.create_app())
    app.command(bench.create_app())
    return app


def _stdin_as_file(argv: Sequence[str]) -> list[str]:
    """A lone dash means stdin wherever a file is accepted; the parser would take it for an option."""
    tokens: list[str] = []
    for token in argv:
        if token == "-":
            if tokens and tokens[-1] == "--file":
                tokens.pop()
            token = "--file=-"
        tokens.append(token)
    return tokens


def _sentence(error: CycloptsError) -> str:
    if isinstance(error, UnusedCliTokensError) and error.unused_tokens:
        return f"unexpected argument {error.unused_tokens[0]!r}; --help shows what this command takes."
    sentence = " ".join(str(error).split())
    if isinstance(error, UnknownOptionError) and not sentence.endswith("?"):  # nothing there is looks like it
        return f"{sentence.rstrip('.')}; --help shows what this command takes."
    return sentence if sentence.endswith((".", "?")) else f"{sentence}."


def _fail(message: str, code: int) -> int:
    print(f"headway: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
