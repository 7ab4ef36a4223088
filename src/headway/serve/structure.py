"""What form an answer must have: `response_format` as OpenAI has it, `structured_outputs` as vLLM has it.

Both become the text of a grammar. Shapes are checked here; whether the grammar can be used is found out by
`grammar.check`, and what a token may be is the engine's affair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from headway.errors import RequestError
from headway.grammar import source
from headway.grammar.check import Checked, GrammarChecker
from headway.serve.openai import ResponseFormat, SamplingRequest, StructuredOutputs

_MOST_CHOICES = 1024


@dataclass(frozen=True, slots=True)
class WantedForm:
    """A grammar, what to use where it cannot be honoured to the letter, and the field that it came in."""

    grammar: str
    lenient: str | None
    param: str
    blamed: Callable[[Callable[[WantedForm], bool]], str] | None = None
    """Whose part of it cannot be honoured, in words, found by asking of other forms whether they can be."""

    def checked(self, grammars: GrammarChecker | None) -> Checked:
        """The grammar to use; RequestError if there is none. Blocks until that is known."""
        if grammars is None:
            raise no_grammars(self.param)
        try:
            return grammars.check(self.grammar, lenient=self.lenient, param=self.param)
        except RequestError as error:
            if self.blamed is None or error.code != "invalid_value":
                raise
            who = self.blamed(lambda form: form._is_honoured(grammars))
            if not who:
                raise
            why = str(error).removeprefix(f"{self.param} cannot be honoured: ")
            message = f"{self.param}: {who} cannot be honoured: {why}"
            raise RequestError(message, param=self.param, code=error.code) from None

    def _is_honoured(self, grammars: GrammarChecker) -> bool:
        try:
            grammars.check(self.grammar, lenient=self.lenient, param=self.param)
        except RequestError:
            return False
        return True

    def known(self, grammars: GrammarChecker | None) -> Checked | None:
        """The grammar to use if that is known already: a client whose grammar is does not wait behind others."""
        return None if grammars is None else grammars.known(self.grammar, self.lenient)


def no_grammars(param: str) -> RequestError:
    """Of a server that can hold no answer to a grammar."""
    return RequestError(f"{param} is not supported by this server", param=param, code="unsupported_parameter")


def wanted_form(request: SamplingRequest) -> WantedForm | None:
    """The form that a request asks for; None: any text."""
    format, outputs = request.response_format, request.structured_outputs
    if outputs is not None and format is not None and format.type != "text":
        raise RequestError(
            "give response_format or structured_outputs, not both; the latter takes a JSON schema too",
            param="structured_outputs",
        )
    if outputs is not None:
        return _of_outputs(outputs)
    return None if format is None else _of_format(format)


def _of_format(format: ResponseFormat) -> WantedForm | None:
    if format.type == "text":
        return None
    if format.type == "json_object":
        return WantedForm(source.json_object(), None, "response_format")
    if format.type != "json_schema":
        raise RequestError(
            f"response_format.type is {format.type[:32]!r}; allowed: text, json_object, json_schema",
            param="response_format.type",
        )
    wanted = format.json_schema
    if wanted is None or wanted.schema is None:
        raise RequestError(
            "response_format of type json_schema needs json_schema.schema", param="response_format.json_schema"
        )
    return _of_schema(wanted.schema, "response_format", is_strict=bool(wanted.strict))


def _of_outputs(outputs: StructuredOutputs) -> WantedForm:
    param = "structured_outputs"
    given = [name for name in ("json", "regex", "choice", "grammar") if getattr(outputs, name) is not None]
    given += ["json_object"] if outputs.json_object else []
    if len(given) != 1:
        said = "has none of them" if not given else f"has {', '.join(given)}"
        raise RequestError(f"{param} takes one of json, json_object, regex, choice and grammar; it {said}", param=param)
    if outputs.json is not None:
        return _of_schema(_as_schema(outputs.json), f"{param}.json", is_strict=False)
    if outputs.choice is not None:
        if not 1 <= len(outputs.choice) <= _MOST_CHOICES:
            allowed = f"1 to {_MOST_CHOICES} texts"
            message = f"{param}.choice has {len(outputs.choice)} texts; allowed: {allowed}"
            raise RequestError(message, param=f"{param}.choice")
        return WantedForm(source.choice(outputs.choice), None, f"{param}.choice")
    if outputs.regex is not None:
        return WantedForm(source.regex(outputs.regex), None, f"{param}.regex")
    if outputs.grammar is not None:
        return WantedForm(source.lark(outputs.grammar), None, f"{param}.grammar")
    return WantedForm(source.json_object(), None, param)


def _of_schema(schema: dict[str, Any], param: str, *, is_strict: bool) -> WantedForm:
    try:
        lenient = None if is_strict else source.json_schema(schema, is_lenient=True)
        return WantedForm(source.json_schema(schema), lenient, param)
    except RequestError as error:
        raise RequestError(f"{param} cannot be honoured: {error}", param=param) from None


def _as_schema(given: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    try:
        return msgspec.json.decode(given, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(
            f"structured_outputs.json is no JSON object: {error}", param="structured_outputs.json"
        ) from None
