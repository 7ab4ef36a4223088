"""The entry point: the list of commands, and what an error looks like from outside.

    exit code 0 done · 1 the engine or a check failed · 2 a flag, value, file or machine is at fault · 130 interrupted

Every error is one sentence on stderr. This file knows no command's options.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Literal

from cyclopts import App, CycloptsError, Parameter, UnknownOptionError, UnusedCliTokensError

from headway.about import __version__
from headway.cli.args import sources
from headway.cli.help import HELP_ALL, HELP_FLAGS, Help
from headway.errors import ConfigError, EngineError, RequestError

# Each is a module of this package, except the completion; the number is its place in the list.
COMMANDS = {
    **{"serve": 1, "engine": 1, "route": 1, "fleet": 1},
    **{"chat": 2, "generate": 3, "models": 4, "top": 4, "doctor": 5, "verify": 5, "simulate": 5, "completion": 6},
    **{"rank": 0, "bench": 0},  # these two and models place themselves
}
# Variables that no process started from here needs to see: the engine, the template's, a download's.
SECRETS = ("HEADWAY_API_KEY", "HEADWAY_ENGINE_KEY", "HEADWAY_KEY")
ARGUMENTS = {
    "serve": "MODEL",
    "engine": "MODEL",
    "route": "MODEL",
    "chat": "MESSAGE",
    "generate": "PROMPTS...",
    "verify": "MODEL",
}
START = f"""Start with: headway chat, or headway serve and any OpenAI client.

Options may also be HEADWAY_<OPTION> variables, or lines of a --config file.
A command's --help shows the options that matter to most, {HELP_ALL} every one."""
COMPLETION = """Examples:
  source <(headway completion bash)
  headway completion fish > ~/.config/fish/completions/headway.fish"""


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Run one command and return its exit code."""
    tokens = _stdin_as_file(sys.argv[1:] if argv is None else argv)
    if environ is None:
        environ = dict(os.environ)
        for secret in SECRETS:
            os.environ.pop(secret, None)
    try:
        result = create_app(environ, tokens)(tokens)
        sys.stdout.flush()  # here, where a reader that has left is expected, and not at exit
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return _give_up_output()  # its reader has left, and wants to hear no more
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _give_up_output()
        return _fail(f"cannot write the output: {error.strerror}", 1)
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
            return create_app(environ, tokens).parse_args(tokens)[1].arguments
        except CycloptsError as error:
            raise ConfigError(_sentence(error)) from error

    app = App(
        name="headway",
        help="An LLM serving engine: continuous batching, paged KV cache, predictable latency.",
        help_epilogue=START,
        help_flags=HELP_FLAGS,
        help_formatter=Help(shows_all=shows_all),
        help_format="plaintext",
        version=__version__,
        config=sources(environ),
        # A switch that is off unless given needs no --no- twin, and a list no --empty- one.
        default_parameter=Parameter(negative_bool=(), negative_iterable=()),
        print_error=False,
        exit_on_error=False,
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    more = "" if shows_all else f"\n\n{HELP_ALL} shows every option."
    # Only the command that is called: importing the others would take longer than parsing its options.
    called = tokens[0] if tokens and tokens[0] in COMMANDS and tokens[0] != "completion" else None
    for name in COMMANDS if called is None else (called,):
        _add(app, name, more, reparse)
    return app


def _add(app: App, name: str, more: str, reparse: Callable[[], Mapping[str, Any]]) -> None:
    if name == "completion":
        app.command(_completion(app), help_epilogue=COMPLETION, sort_key=6)
        return
    module = import_module(f"headway.cli.{name}")
    if hasattr(module, "create_app"):  # commands of its own below it
        app.command(module.create_app())
        return
    command = module.command(reparse) if hasattr(module, "command") else getattr(module, name)
    usage = f"Usage: headway {name} [OPTIONS] [{ARGUMENTS[name]}]" if name in ARGUMENTS else None
    examples = module.EXAMPLES + ("" if name == "doctor" else more)
    app.command(command, usage=usage, help_epilogue=examples, sort_key=COMMANDS[name])


def _completion(app: App) -> Callable[[Literal["bash", "zsh", "fish"]], int]:
    def completion(shell: Literal["bash", "zsh", "fish"], /) -> int:
        """Print what makes a shell complete commands and options.

        Parameters
        ----------
        shell
            bash, zsh or fish.
        """
        print(app.generate_completion(shell=shell))
        return 0

    return completion


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
        names = [name for name in (error.app or ()) if not name.startswith("-")]
        takes = f"it takes {', '.join(names)}" if names else "--help shows what this command takes"
        return f"unexpected argument {error.unused_tokens[0]!r}; {takes}."
    sentence = " ".join(str(error).split())
    if isinstance(error, UnknownOptionError) and not sentence.endswith("?"):  # nothing there is looks like it
        return f"{sentence.rstrip('.')}; --help shows what this command takes."
    return sentence if sentence.endswith((".", "?")) else f"{sentence}."


def _give_up_output() -> int:
    """What is still buffered goes nowhere: a second error while flushing at exit would be noise."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _fail(message: str, code: int) -> int:
    print(f"headway: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
