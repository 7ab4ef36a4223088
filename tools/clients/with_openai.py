"""The official Python client: plain and streamed, chat and text, forms, tools, log probabilities, errors."""

from __future__ import annotations

import asyncio

import openai
from openai.types import CompletionUsage
from pydantic import BaseModel, ConfigDict
from report import BEGINNING, PERSON, QUESTION, check_answer, passed, require, say_version, target

MESSAGES = [{"role": "user", "content": QUESTION}]


def counts(usage: CompletionUsage | None) -> tuple[int, int, int] | None:
    return None if usage is None else (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)


def chat(client: openai.OpenAI, model: str) -> None:
    ask = {"model": model, "messages": MESSAGES, "temperature": 0, "max_tokens": 32}
    answer = client.chat.completions.create(**ask)
    choice = answer.choices[0]
    check_answer("chat", QUESTION, choice.message.content, choice.finish_reason, counts(answer.usage))
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    finish = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1]
    check_answer("chat, streamed", QUESTION, text, finish, counts(chunks[-1].usage))
    with client.chat.completions.stream(**ask) as stream:
        final = stream.get_final_completion().choices[0]
    require(final.message.content == text, f"the stream helper says {final.message.content!r}")
    passed("chat, stream helper", QUESTION, text)


def completions(client: openai.OpenAI, model: str) -> None:
    ask = {"model": model, "prompt": BEGINNING, "temperature": 0, "max_tokens": 8}
    answer = client.completions.create(**ask)
    choice = answer.choices[0]
    check_answer("completions", BEGINNING, choice.text, choice.finish_reason, counts(answer.usage))
    chunks = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    finish = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1]
    check_answer("completions, streamed", BEGINNING, text, finish, counts(chunks[-1].usage))


def extras(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=8, n=2, seed=1, logprobs=True, top_logprobs=2
    )
    require(len(answer.choices) == 2, "n=2 gives two answers")
    for choice in answer.choices:
        entries = choice.logprobs.content if choice.logprobs else None
        require(entries and len(entries[0].top_logprobs) == 2, "log probabilities are there")
    passed("n and logprobs")
    require([found.id for found in client.models.list()] == [model], "the list of models")
    require(client.models.retrieve(model).id == model, "one model")
    passed("models")
    try:
        client.chat.completions.create(model="another", messages=MESSAGES)
    except openai.NotFoundError as error:
        require(error.code == "model_not_found", f"the code of the error is {error.code}")
    else:
        require(False, "an unknown model is an error")
    passed("error classes")


class Person(BaseModel):
    """A person with a name and an age."""

    model_config = ConfigDict(extra="forbid")
    name: str
    age: int


def forms(client: openai.OpenAI, model: str) -> None:
    ask = {"model": model, "messages": [{"role": "user", "content": PERSON}], "temperature": 0, "max_tokens": 100}
    answer = client.chat.completions.parse(response_format=Person, **ask).choices[0].message.parsed
    require(answer == Person(name="Anna", age=31), f"parse says {answer}")
    with client.chat.completions.stream(response_format=Person, **ask) as stream:
        streamed = stream.get_final_completion().choices[0].message.parsed
    require(streamed == answer, f"the stream helper says {streamed}")
    passed("parse; parse, stream helper")


def functions(client: openai.OpenAI, model: str) -> None:
    ask = {"model": model, "messages": [{"role": "user", "content": PERSON}], "temperature": 0, "max_tokens": 400}
    ask |= {"tools": [openai.pydantic_function_tool(Person)], "parallel_tool_calls": False, "seed": 1}
    for choice in ("required", {"type": "function", "function": {"name": "Person"}}):
        answer = client.chat.completions.parse(tool_choice=choice, **ask).choices[0]
        (one,) = answer.message.tool_calls or []
        require(answer.finish_reason == "tool_calls", f"the finish reason is {answer.finish_reason!r}")
        require(one.function.parsed_arguments == Person(name="Anna", age=31), f"the call is {one}")
        with client.chat.completions.stream(tool_choice=choice, **ask) as stream:
            deltas = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
            (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or []
        require(len(deltas) > 1, f"there are {len(deltas)} pieces of arguments")
        require((streamed.id, streamed.function) == (one.id, one.function), f"streamed: {streamed}, whole: {one}")
    said = {"role": "assistant", "tool_calls": [one.model_dump(include={"id", "type", "function"})]}
    said["tool_calls"][0]["function"].pop("parsed_arguments")
    result = {"role": "tool", "tool_call_id": one.id, "content": "noted"}
    free = client.chat.completions.create(**ask | {"messages": [*ask["messages"], said, result], "tool_choice": "auto"})
    require(free.choices[0].message.content or free.choices[0].message.tool_calls, "nothing comes after a result")
    passed("tools; tools, stream helper; results of tools")


async def many(base_url: str, model: str) -> None:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="any", max_retries=0) as client:

        async def ask() -> str | None:
            answer = await client.chat.completions.create(model=model, messages=MESSAGES, temperature=0, max_tokens=32)
            return answer.choices[0].message.content

        texts = await asyncio.gather(*(ask() for _ in range(8)))
    require(len(set(texts)) == 1, f"8 at once give {len(set(texts))} answers")
    passed("async, 8 at once", QUESTION, texts[0])


def main() -> None:
    server = target()
    say_version("openai")
    with openai.OpenAI(base_url=server.base_url, api_key="any", max_retries=0, timeout=60) as client:
        chat(client, server.model)
        completions(client, server.model)
        extras(client, server.model)
        forms(client, server.model)
        functions(client, server.model)
    asyncio.run(many(server.base_url, server.model))


if __name__ == "__main__":
    main()
