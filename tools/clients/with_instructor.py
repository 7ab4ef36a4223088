"""instructor: objects of a class by tools and by JSON schemas, whole and in parts."""

from __future__ import annotations

import instructor
import openai
from pydantic import BaseModel
from report import PERSON, passed, require, say_version, target


class Person(BaseModel):
    """A person with a name and an age."""

    name: str
    age: int


def main() -> None:
    server = target()
    say_version("instructor")
    ask = {"model": server.model, "messages": [{"role": "user", "content": PERSON}], "response_model": Person}
    ask |= {"temperature": 0, "max_tokens": 200, "max_retries": 0}
    with openai.OpenAI(base_url=server.base_url, api_key="any", max_retries=0, timeout=60) as client:
        for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
            found = instructor.from_openai(client, mode=mode).chat.completions.create(**ask)
            require((found.name, found.age) == ("Anna", 31), f"by {mode.name} it is {found!r}")
            passed(f"create by {mode.name}")
        parts = list(instructor.from_openai(client, mode=instructor.Mode.TOOLS).chat.completions.create_partial(**ask))
        require(len(parts) > 1, f"there are {len(parts)} parts")
        require((parts[-1].name, parts[-1].age) == ("Anna", 31), f"the last part is {parts[-1]!r}")
        passed("create_partial")


if __name__ == "__main__":
    main()
