"""langchain-openai: `ChatOpenAI` and `OpenAI`, invoked, streamed and in a batch; structured output and tools."""

from __future__ import annotations

from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel
from report import BEGINNING, PERSON, QUESTION, Target, check_answer, passed, require, say_version, target


def chat(server: Target) -> None:
    model = ChatOpenAI(
        model=server.model, base_url=server.base_url, api_key="any", temperature=0, max_tokens=32, max_retries=0
    )
    answer = model.invoke(QUESTION)
    used = answer.usage_metadata
    counts = None if used is None else (used["input_tokens"], used["output_tokens"], used["total_tokens"])
    check_answer("ChatOpenAI.invoke", QUESTION, answer.text, answer.response_metadata["finish_reason"], counts)
    whole = AIMessageChunk(content="")
    for chunk in model.stream([HumanMessage(QUESTION)], stream_usage=True):
        whole += chunk
    used = whole.usage_metadata
    counts = None if used is None else (used["input_tokens"], used["output_tokens"], used["total_tokens"])
    check_answer("ChatOpenAI.stream", QUESTION, whole.text, whole.response_metadata["finish_reason"], counts)
    answers = model.batch([QUESTION, [SystemMessage("Answer in one word."), HumanMessage(QUESTION)]])
    require(answers[0].text == answer.text, f"a batch says {answers[0].text!r}")
    require(answers[1].text, "a system message gives no answer")
    passed("ChatOpenAI.batch", QUESTION, answers[0].text)


def completions(server: Target) -> None:
    model = OpenAI(
        model=server.model, base_url=server.base_url, api_key="any", temperature=0, max_tokens=8, max_retries=0
    )
    result = model.generate([BEGINNING])
    generation = result.generations[0][0]
    used = (result.llm_output or {})["token_usage"]
    counts = (used["prompt_tokens"], used["completion_tokens"], used["total_tokens"])
    finish = (generation.generation_info or {})["finish_reason"]
    check_answer("OpenAI.generate", BEGINNING, generation.text, finish, counts)
    text = "".join(model.stream(BEGINNING))
    require(text == generation.text, f"streamed: {text!r}, whole: {generation.text!r}")
    passed("OpenAI.stream", BEGINNING, text)


class Person(BaseModel):
    """A person with a name and an age."""

    name: str
    age: int


def structured(server: Target) -> None:
    model = ChatOpenAI(
        model=server.model, base_url=server.base_url, api_key="any", temperature=0, max_tokens=200, max_retries=0
    )
    for method in ("json_schema", "function_calling"):
        found = model.with_structured_output(Person, method=method).invoke(PERSON)
        require(found == Person(name="Anna", age=31), f"by {method} it is {found!r}")
        passed(f"structured output by {method}")
    for choice in ("any", "Person"):
        bound = model.bind_tools([Person], tool_choice=choice, parallel_tool_calls=False)
        (one,) = bound.invoke(PERSON).tool_calls
        require((one["name"], one["args"]) == ("Person", {"name": "Anna", "age": 31}), f"the call is {one}")
        whole = AIMessageChunk(content="")
        for chunk in bound.stream(PERSON):
            whole += chunk
        require([each["args"] for each in whole.tool_calls] == [one["args"]], f"streamed: {whole.tool_calls}")
    passed("bind_tools, invoked and streamed")


def main() -> None:
    server = target()
    say_version("langchain-openai")
    chat(server)
    completions(server)
    structured(server)


if __name__ == "__main__":
    main()
