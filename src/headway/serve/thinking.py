"""Reasoning in a chat: what comes of the form of an answer behind it, and the bound on its tokens."""

from __future__ import annotations

from headway.errors import RequestError
from headway.grammar.thoughts import behind_thoughts
from headway.serve.openai import ChatRequest
from headway.serve.service import ServedModel
from headway.serve.structure import WantedForm
from headway.serve.tools import WantedTools
from headway.text.answer_parts import AnswerParts
from headway.text.thoughts import CLOSING, Thinking

_BUDGET = "thinking_token_budget"


def form_of_parts(
    asked: ChatRequest,
    model: ServedModel,
    form: WantedForm | None,
    tools: WantedTools | None,
    parts: AnswerParts | None,
) -> WantedForm | None:
    """What all of the text of an answer may be: reasoning first, then content of `form`, or calls of `tools`."""
    budget = _budget(asked, model)
    if parts is None:
        return form
    if tools is not None and parts.calls is not None:
        form = tools.form(form, parts.calls, parts.tokens)
    if parts.thinking is Thinking.NEVER or (form is None and budget is None):
        return form
    is_open = parts.thinking is Thinking.OPEN
    strict, lenient = (form.grammar, form.lenient) if form is not None else ("", None)
    return WantedForm(
        behind_thoughts(strict, parts.tokens, is_open=is_open, most=budget),
        None if lenient is None else behind_thoughts(lenient, parts.tokens, is_open=is_open, most=budget),
        _BUDGET if form is None else form.param,
        None if form is None else form.blamed,
    )


def _budget(asked: ChatRequest, model: ServedModel) -> int | None:
    """The most tokens of reasoning; None: no bound."""
    budget = asked.thinking_token_budget
    if budget is not None and budget < 0:
        raise RequestError(f"{_BUDGET} is {budget}; allowed: 0 or more", param=_BUDGET, code="invalid_value")
    if budget is not None and not (model.template.has_thoughts and model.tokenizer.added_ids([CLOSING])):
        raise RequestError(
            f"{_BUDGET} is not supported with this model: its chat template knows no reasoning that a token "
            f"{CLOSING} ends; leave it out",
            param=_BUDGET,
            code="unsupported_parameter",
        )
    return budget
