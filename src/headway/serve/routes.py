"""The endpoints: what each path does, in terms of `validate`, `generate` and `formats`.

Handlers raise; `app` turns whatever they raise into error objects. None of them looks at engine internals.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headway.about import __version__
from headway.engine.client import Submit
from headway.errors import RequestError
from headway.serve import insight, pages, validate
from headway.serve.access import ANSWERED
from headway.serve.adapters import adapted, chosen
from headway.serve.body import IGNORED, read_body
from headway.serve.embeddings import TextVectors
from headway.serve.formats import ChatFormat, CompletionFormat, Echo, Format
from headway.serve.generate import Generation, Prompt
from headway.serve.history import ServedRequest
from headway.serve.intent import Intent, intent_of
from headway.serve.metrics import CONTENT_TYPE
from headway.serve.openai import (
    CacheLookupRequest,
    ChatRequest,
    CompletionRequest,
    DefaultSampling,
    DetokenizeRequest,
    DetokenizeResponse,
    ModelCard,
    ModelList,
    SamplingRequest,
    TokenizeRequest,
    TokenizeResponse,
    Usage,
)
from headway.serve.openapi import document
from headway.serve.problem import new_name, not_ready
from headway.serve.prompting import INLINE_CHARS, NOTES, RequestPrompts, client_of, key_of
from headway.serve.pump import Pump
from headway.serve.scoring import best, cost_of, echo_of, extras_of, infilled, scores_of
from headway.serve.service import Phase, ServedModel, Service
from headway.serve.sse import Events, EventStream, while_connected
from headway.serve.structure import wanted_form
from headway.serve.tenants import TENANT
from headway.serve.thinking import form_of_parts
from headway.serve.tools import wanted_tools
from headway.serve.turns import LONG_BYTES
from headway.serve.vectors import EmbeddingRequest, RerankRequest, ScoreRequest
from headway.text.defaults import DEFAULT_MAX_TOKENS
from headway.values.params import SamplingParams

T = TypeVar("T", bound=msgspec.Struct)
F = TypeVar("F", ChatFormat, CompletionFormat)

REQUEST_ID = "headway.request_id"  # of a scope: the request id of its answer


class Routes:
    """The endpoints over one `Service`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._prompts = RequestPrompts(service)
        self._vectors = TextVectors(service)
        self._version = __version__
        self._docs = pages.DocsPage()

    def table(self) -> list[Route]:
        return [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            Route("/v1/score", self.score, methods=["POST"]),
            Route("/v1/rerank", self.rerank, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{id:path}", self.model, methods=["GET"]),
            Route("/v1/requests/{id}/explain", self.explain, methods=["GET"]),
            Route("/v1/cache/lookup", self.cache_lookup, methods=["POST"]),
            Route("/v1/usage", self.usage, methods=["GET"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/ready", self.ready, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/openapi.json", self.openapi, methods=["GET"]),
            Route("/", self.home, methods=["GET"]),
            Route("/docs", self.docs, methods=["GET"]),
        ]

    async def chat(self, request: Request) -> Response:
        model = await self._service.model_soon()
        asked = await self._decode(request, ChatRequest)
        model = chosen(asked.model, model)
        info = model.client.info
        wish = validate.chat_wish(asked, model, self._service.config)
        form, tools = wanted_form(asked), wanted_tools(asked, model.grammars)
        options = validate.render_options(asked)
        intent = self._intent(request, asked, model, "chat")
        self._service.guard.check(model.client.published, intent, wish.n)
        with ExitStack() as stack:
            visit = stack.enter_context(self._service.tenants.visit(request.scope))
            run = stack.enter_context(Generation(self._service, model, _owner(request), visit))
            limit = validate.context_limit(info)
            rendering = self._prompts.render(request, model, asked.messages, limit, tools, options)
            prompt = await while_connected(request.receive, rendering)
            default = model.defaults.max_tokens or DEFAULT_MAX_TOKENS
            params = validate.settle(wish, len(prompt.tokens), info, param="messages", default=default)
            form = form_of_parts(asked, model, form, tools, prompt.parts)
            params = await self._prompts.formed(request, model, form, params)
            params = await self._prompts.broken(request, model, params, asked)
            end = await self._prompts.end(request, model, asked.stop_regex)
            run.submit([Prompt(prompt.tokens, params, prompt.parts, end)], n=wish.n, salt=wish.salt, intent=intent)
            format = self._format(ChatFormat, "chatcmpl", request, asked, intent.tier, run)
            return await _answer(request, asked, run, format, self._service.pump, stack)

    async def completions(self, request: Request) -> Response:
        model = await self._service.model_soon()
        asked = await self._decode(request, CompletionRequest)
        model = chosen(asked.model, model)
        info = model.client.info
        wish = validate.completion_wish(asked, model, self._service.config)
        form = wanted_form(asked)
        given: Sequence[str | list[int]] = validate.prompts_of(asked, self._service.config, info)
        extras = extras_of(asked, wish.n, self._service.config.max_n)
        intent = self._intent(request, asked, model, "completions")
        self._service.guard.check(model.client.published, intent, len(given) * extras.best_of)
        with ExitStack() as stack:
            visit = stack.enter_context(self._service.tenants.visit(request.scope))
            run = stack.enter_context(Generation(self._service, model, _owner(request), visit))
            end = await self._prompts.end(request, model, asked.stop_regex)
            prompts: list[Prompt] = []
            echoes: list[Echo] = []
            for each in given:
                entry = infilled(each, extras.suffix, model.tokenizer) if extras.suffix else each
                tokens = entry if isinstance(entry, list) else await self._prompts.of_text(request, model, entry)
                default = model.defaults.max_tokens or validate.COMPLETION_DEFAULT_TOKENS
                params = validate.settle(wish, len(tokens), info, param="prompt", default=default)
                validate.check_tokens(tokens, info, param="prompt")
                params = await self._prompts.formed(request, model, form, params)
                params = await self._prompts.broken(request, model, params, asked)
                prompts.append(Prompt(tokens, extras.sampled(params), end=end))
            all_tokens = [prompt.tokens for prompt in prompts]
            scoring = run
            if extras.has_echo:
                visit.charge(cost_of(prompts, extras, asked.logprobs))
                scoring = Generation(self._service, model, _owner(request), visit)
                with scoring:
                    scores = scores_of(scoring, all_tokens, asked.logprobs, salt=wish.salt, intent=intent)
                    entries = await while_connected(request.receive, scores)
                echoes = [
                    echo_of(entry, tokens, scored, model.tokenizer)
                    for entry, tokens, scored in zip(given, all_tokens, entries, strict=True)
                ]
            if not extras.is_over:
                run.submit(prompts, n=extras.best_of, salt=wish.salt, intent=intent)
            told = scoring if extras.is_over else run
            format = self._format(CompletionFormat, "cmpl", request, asked, intent.tier, told)
            format.echoes, format.num_each = echoes, wish.n
            if extras.is_over:
                num_tokens = sum(map(len, all_tokens))
                alone = {"prompt_tokens": num_tokens, "completion_tokens": 0, "finish": "length"}
                request.scope[ANSWERED] = lambda: scoring.log_fields() | alone
                return _json_bytes(format.alone(len(prompts) * wish.n, num_tokens, scoring.report()))
            if extras.has_choice:
                answers = await while_connected(request.receive, run.whole())
                answers = best(answers, extras.best_of, wish.n, has_logprobs=asked.logprobs is not None)
                return _json_bytes(format.whole(answers, run.usage(), run.report()))
            return await _answer(request, asked, run, format, self._service.pump, stack)

    def _begun(self, request: Request, run: Generation, name: str) -> str:
        """Remember a request by the name of its response."""
        request.scope[ANSWERED] = run.log_fields
        self._service.history.begin(ServedRequest(name, request.scope[REQUEST_ID], _owner(request), run.ids))
        return name

    async def explain(self, request: Request) -> Response:
        return await insight.explanation(self._service, request.path_params["id"], _owner(request))

    async def usage(self, request: Request) -> Response:
        return insight.usage(self._service, _owner(request))

    async def cache_lookup(self, request: Request) -> Response:
        model = self._service.model()
        asked = await self._decode(request, CacheLookupRequest)
        model = chosen(asked.model, model)
        if asked.tokens is not None and (asked.text, asked.prompt, asked.messages) != (None, None, None):
            raise RequestError("give one of tokens, text, prompt and messages", param="tokens")
        validate.check_salt(asked.cache_salt)
        tokens = await self._tokens(request, asked, model) if asked.tokens is None else asked.tokens
        validate.check_tokens(tokens, model.client.info, param="tokens")
        validate.require_few(tokens, model.client.info, param="tokens")
        tenant = request.scope.get(TENANT)
        namespace = self._service.tenants.namespaces.of("" if tenant is None else tenant.name, asked.user)
        submit = Submit(0, tokens, SamplingParams(max_tokens=1), salt=asked.cache_salt or "", namespace=namespace)
        submit = replace(submit, adapter=model.adapter)
        return await insight.cache_lookup(self._service, model, submit)

    async def embeddings(self, request: Request) -> Response:
        return await self._vectors.embeddings(request, await self._decode(request, EmbeddingRequest))

    async def score(self, request: Request) -> Response:
        return await self._vectors.score(request, await self._decode(request, ScoreRequest))

    async def rerank(self, request: Request) -> Response:
        return await self._vectors.rerank(request, await self._decode(request, RerankRequest))

    async def models(self, request: Request) -> Response:
        return _json(ModelList(self._cards()))

    async def model(self, request: Request) -> Response:
        cards = {card.id: card for card in self._cards()}
        asked = request.path_params["id"]
        return _json(cards.get(asked) or _card(chosen(asked, self._service.model())))

    def _cards(self) -> list[ModelCard]:
        """The model that answers, its adapters, and the one that makes vectors."""
        embedder, model = self._service.embedder, self._service.model()
        cards = [_card(each) for each in (model, *adapted(model))]
        return cards if embedder is None else [*cards, ModelCard(embedder.name, embedder.created, embedder.max_tokens)]

    async def tokenize(self, request: Request) -> Response:
        model = self._service.model()
        asked = await self._decode(request, TokenizeRequest)
        model = chosen(asked.model, model)
        tokens = await self._tokens(request, asked, model)
        return _json(TokenizeResponse(len(tokens), model.client.info.max_model_len, tokens))

    async def _tokens(self, request: Request, asked: TokenizeRequest, model: ServedModel) -> list[int]:
        texts = [text for text in (asked.text, asked.prompt) if text is not None]
        if len(texts) + (asked.messages is not None) != 1:
            raise RequestError("give one of text, prompt and messages", param="text")
        if asked.messages is not None:
            if not asked.messages:
                raise RequestError("messages is empty; give at least one message", param="messages")
            options = validate.render_options(asked)
            rendering = self._prompts.render(request, model, asked.messages, limit=None, options=options)
            return (await rendering).tokens
        add_special = asked.add_special_tokens is not False
        return await self._prompts.encode(request, model, texts[0], param="text", limit=None, add_special=add_special)

    async def detokenize(self, request: Request) -> Response:
        model = self._service.model()
        asked = await self._decode(request, DetokenizeRequest)
        model = chosen(asked.model, model)
        if asked.tokens:
            validate.check_tokens(asked.tokens, model.client.info, param="tokens")
            validate.require_few(asked.tokens, model.client.info, param="tokens")
        decode = partial(model.tokenizer.decode, asked.tokens, skip_special=False)
        text = (
            decode() if len(asked.tokens) <= INLINE_CHARS else await self._prompts.in_turn(request, LONG_BYTES, decode)
        )
        return _json(DetokenizeResponse(text, text))

    async def health(self, request: Request) -> Response:
        return _json({"status": (phase := self._service.phase).value}, 503 if phase is Phase.DEAD else 200)

    async def ready(self, request: Request) -> Response:
        phase = self._service.phase
        if phase is Phase.RECOVERING:
            raise self._service.recovering()
        if phase is not Phase.READY:
            raise not_ready(f"the server is {phase.value}")
        return _json({"status": phase.value})

    async def version(self, request: Request) -> Response:
        info = self._service.info
        engine = (
            {} if info is None else {**info.computes_with(), "debug_kv": info.debug_kv, "speculation": info.speculation}
        )
        return _json({"version": self._version, **engine})

    async def metrics(self, request: Request) -> Response:
        await self._service.stats()
        return Response(self._service.metrics.page(), media_type=CONTENT_TYPE)

    async def openapi(self, request: Request) -> Response:
        model = self._service.model_or_none
        told = document(self._version) if model is None else document(self._version, model.name)
        return Response(told, media_type="application/json")

    async def home(self, request: Request) -> Response:
        return pages.home(request, self._service, self._version)

    async def docs(self, request: Request) -> Response:
        return self._docs.response()

    @property
    def _fingerprint(self) -> str:
        return f"headway-{self._version}"

    def _intent(self, request: Request, asked: SamplingRequest, model: ServedModel, route: str) -> Intent:
        return intent_of(
            asked,
            lanes=model.client.info.lanes,
            key=key_of(request),
            route=route,
            tenant=request.scope.get(TENANT),
            namespaces=self._service.tenants.namespaces,
        )

    async def _decode(self, request: Request, kind: type[T]) -> T:
        """The body as `kind`; a large one is decoded on a thread, in turns with other clients'."""
        service = self._service
        body = await read_body(request, service.config.max_body_bytes, room=service.intake.reading(client_of(request)))
        info = service.info
        decode = partial(service.bodies.decode, body, kind, 0 if info is None else validate.context_limit(info))
        decoded = decode() if len(body) <= LONG_BYTES else await self._prompts.in_turn(request, len(body), decode)
        request.scope[IGNORED] = decoded.ignored
        return decoded.request

    def _format(
        self,
        kind: Callable[..., F],
        name: str,
        request: Request,
        asked: ChatRequest | CompletionRequest,
        tier: str | None,
        run: Generation,
    ) -> F:
        """How the response to a request is written; both kinds take the same."""
        return kind(
            self._begun(request, run, f"{name}-{new_name()}"),
            int(time.time()),
            run.model_name,
            self._fingerprint,
            _wants_usage(asked),
            asked.logprobs,
            tier,
            _warnings(request),
            _counts(asked, run),
        )


async def _answer(
    request: Request, asked: SamplingRequest, run: Generation, format: Format, pump: Pump, stack: ExitStack
) -> Response:
    if not asked.stream:
        answers = await while_connected(request.receive, run.whole())
        return _json_bytes(format.whole(answers, run.usage(), run.report()))
    stream = Events(run, format, has_usage=_wants_usage(asked))
    # The first event decides between a stream and an error status.
    first = await while_connected(request.receive, stream.next(pump))
    assert first is not None, "a stream says at least that it is done"
    return EventStream(first, stream, pump, stack.pop_all().close)


def _warnings(request: Request) -> list[str]:
    notes: list[str] = request.scope.get(NOTES, [])
    return [f"the field {name!r} is not understood and was ignored" for name in request.scope[IGNORED]] + notes


def _owner(request: Request) -> str:
    """Whose requests and sums a request may see: by the file of keys, else by its key."""
    tenant = request.scope.get(TENANT)
    if tenant is not None:
        return f"tenant {tenant.name}"
    # A digest: it is kept with thousands of requests, and where no key is asked for anyone may send a long one.
    return f"key {hashlib.sha256(key_of(request).encode()).hexdigest()}"


def _wants_usage(asked: SamplingRequest) -> bool:
    return asked.stream_options is not None and bool(asked.stream_options.include_usage)


def _counts(asked: SamplingRequest, run: Generation) -> Callable[[], Usage] | None:
    options = asked.stream_options
    return run.usage_so_far if options and options.include_usage and options.continuous_usage_stats else None


def _card(model: ServedModel) -> ModelCard:
    sampling = DefaultSampling(**model.defaults.fill({}))
    card = ModelCard(model.name, model.created, model.client.info.max_model_len, sampling)
    return msgspec.structs.replace(card, parent=model.client.info.model) if model.adapter else card


def _json_bytes(data: bytes) -> Response:
    return Response(data, media_type="application/json")


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
