"""Functions that a request offers: `tools`, `tool_choice` and `parallel_tool_calls`, as OpenAI's API has them.

Everything about them that is wrong is refused here, by the path of the field. What answers may be follows from them and
from the form of calls that the model's template goes with.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from headway.errors import RequestError
from headway.grammar.calls import MOST_CALLS, CallableFunction, CallChoice, calls
from headway.grammar.check import GrammarChecker
from headway.request_limits import LIMITS
from headway.serve.openai import ChatRequest
from headway.serve.structure import WantedForm, no_grammars
from headway.text.call_format import CallFormat

_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{LIMITS.function_name_chars}}}")
_MODES = ("none", "auto", "required")
_SHOWN_NAMES = 16
# Keywords by which an object may have more properties than those that it names.
_OPEN = {"additionalProperties", "patternProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref", "if"}


@dataclass(frozen=True, slots=True)
class WantedTools:
    """The functions as templates expect them, and which of them may or must be called."""

    rendered: tuple[dict[str, Any], ...]
    choice: CallChoice

    def form(self, form: WantedForm | None, format: CallFormat, tokens: Mapping[str, int]) -> WantedForm:
        """What the answer may be; without calls it is of `form`, if there is one."""
        if self.choice.is_required:
            form = None
        if form is not None and not format.opening:
            raise RequestError(
                f"{form.param} beside tools is not supported with this model, whose calls are JSON without a mark; "
                "leave one of them out, or set tool_choice to required",
                param=form.param,
                code="unsupported_parameter",
            )
        strict, loose = (form.grammar, form.lenient or form.grammar) if form is not None else ("", "")
        grammar = calls(self.choice, format, tokens, strict)
        lenient = calls(self.choice, format, tokens, loose, is_lenient=True)
        blamed = partial(self._blamed, format, tokens)
        return WantedForm(grammar, lenient if lenient != grammar else None, "tools", blamed)

    def _blamed(self, format: CallFormat, tokens: Mapping[str, int], is_honoured: Callable[[WantedForm], bool]) -> str:
        """The function whose schema cannot be honoured by itself; empty if all can be. Asks about half of them."""
        functions = self.choice.functions

        def can_be(some: tuple[CallableFunction, ...]) -> bool:
            grammar, lenient = (
                calls(CallChoice(some, is_required=True, most=1), format, tokens, is_lenient=is_lenient)
                for is_lenient in (False, True)
            )
            return is_honoured(WantedForm(grammar, lenient if lenient != grammar else None, "tools"))

        while len(functions) > 1:
            half = functions[: len(functions) // 2]
            functions = functions[len(half) :] if can_be(half) else half
        return "" if can_be(functions) else f"the function {functions[0].name}"


def wanted_tools(asked: ChatRequest, grammars: GrammarChecker | None) -> WantedTools | None:
    """What a request offers; None: nothing, or nothing that may be called."""
    choice = asked.tool_choice
    if not asked.tools:
        if choice is not None and choice not in ("none", "auto"):
            got, allowed = f"{choice!r:.64} without tools", "none and auto, or give tools"
            raise _wrong("tool_choice", got, allowed, code="unsupported_parameter")
        return None
    if grammars is None:
        raise no_grammars("tools")
    if len(asked.tools) > LIMITS.functions:
        raise _wrong("tools", f"{len(asked.tools)} functions", f"up to {LIMITS.functions}", code="too_many_values")
    functions: dict[str, CallableFunction] = {}
    rendered = []
    for index, tool in enumerate(asked.tools):
        where = f"tools[{index}]"
        function = _function(tool, where)
        if function.name in functions:
            raise _wrong(f"{where}.function.name", f"{function.name!r} again", "each name once")
        functions[function.name] = function
        rendered.append({"type": "function", "function": _described(tool["function"])})
    most = MOST_CALLS if asked.parallel_tool_calls is not False else 1
    if isinstance(choice, dict):
        named = functions[_chosen(choice, functions)]
        return WantedTools(tuple(rendered), CallChoice((named,), is_required=True, most=1))
    if choice is not None and choice not in _MODES:
        raise _wrong("tool_choice", f"{choice!r:.64}", f"{', '.join(_MODES)}, or an object that names a function")
    if choice == "none":
        return None
    return WantedTools(tuple(rendered), CallChoice(tuple(functions.values()), choice == "required", most))


def _function(tool: Mapping[str, Any], where: str) -> CallableFunction:
    kind = tool.get("type")
    if kind != "function":
        raise _wrong(f"{where}.type", f"{kind!r:.64}", "function", code="unsupported_parameter")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise _wrong(f"{where}.function", _shown(function), "an object with name, description and parameters")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        allowed = f"1 to {LIMITS.function_name_chars} letters, digits, dashes, underscores and dots"
        raise _wrong(f"{where}.function.name", _shown(name), allowed)
    for field, kinds, allowed in (("description", str, "a text"), ("strict", bool, "true or false")):
        value = function.get(field)
        if value is not None and not isinstance(value, kinds):
            raise _wrong(f"{where}.function.{field}", _shown(value), allowed)
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        got = f"a schema of {parameters['type']!r:.64}" if isinstance(parameters, dict) else _shown(parameters)
        raise _wrong(f"{where}.function.parameters", got, "a JSON schema with type object")
    # A weak model would go on with arguments of its own for ever.
    bound = {"additionalProperties": False} if "properties" in parameters and not parameters.keys() & _OPEN else {}
    return CallableFunction(name, {**bound, **parameters, "type": "object"}, bool(function.get("strict")))


def _described(given: Mapping[str, Any]) -> dict[str, Any]:
    """As the model is told of it."""
    told = {name: given[name] for name in ("name", "description") if given.get(name) is not None}
    return {**told, "parameters": given.get("parameters") or {"type": "object", "properties": {}}}


def _chosen(choice: Mapping[str, Any], functions: Mapping[str, CallableFunction]) -> str:
    """The name that an object of `tool_choice` has."""
    function = choice.get("function")
    if choice.get("type") != "function" or not isinstance(function, dict):
        raise _wrong("tool_choice", _shown(choice), f'{", ".join(_MODES)}, or {{"type": "function", "function": …}}')
    name = function.get("name")
    if not isinstance(name, str) or name not in functions:
        more = "" if len(functions) <= _SHOWN_NAMES else f" and {len(functions) - _SHOWN_NAMES} more"
        names = ", ".join(list(functions)[:_SHOWN_NAMES])
        raise _wrong("tool_choice.function.name", _shown(name), f"the functions of tools: {names}{more}")
    return name


def _shown(value: object) -> str:
    return "missing" if value is None else f"{value!r:.64}"


def _wrong(param: str, got: str, allowed: str, *, code: str = "invalid_value") -> RequestError:
    verb = "has" if code == "too_many_values" else "is"
    return RequestError(f"{param} {verb} {got}; allowed: {allowed}", param=param, code=code)
