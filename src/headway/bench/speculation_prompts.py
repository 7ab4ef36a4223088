"""What `bench decoding --case speculation` asks: texts to change a little, to quote from, and questions.

The edits and quotations are such that the bundled model, which is small, does what is asked.
"""

from __future__ import annotations

_LIBRARY = (
    "The harbour library opens at nine on weekdays and at ten on Saturdays. Visitors may borrow up to six "
    "books for three weeks. Books that another reader waits for must be returned after two weeks. The reading "
    "room on the second floor has forty chairs and a view of the old lighthouse. Food is not allowed in the "
    "reading room, but water in closed bottles is. Every first Thursday of the month the library shows a film "
    "in the small hall. Entry is free, and the doors open half an hour before the film begins. Groups of more "
    "than ten people should write to the desk a week earlier."
)
_CAKE = (
    "Heat the oven to 200 degrees. Mix the flour, the salt and the sugar in a large bowl. Melt the butter in a "
    "small pan and let it cool for five minutes. Beat the eggs with the milk, then stir in the butter. Pour "
    "the liquid into the bowl and stir until the dough is smooth. Butter a round tin and fill it with the "
    "dough. Put the sliced apples on top and sprinkle them with cinnamon. Bake the cake for forty minutes, "
    "until it is golden. Let it cool for a quarter of an hour before you cut it. Serve it with whipped cream "
    "or with vanilla ice."
)
_EDIT = "Rewrite texts with one small change.\n\nText:\n{}\n\nThe same text, {}:\n"
_QUOTE = '{}\n\nThe text above says, word for word: "{}'

EDITS = [
    _EDIT.format(_LIBRARY, "with Sundays instead of Saturdays"),
    _EDIT.format(_CAKE, "with 180 degrees instead of 200"),
    _EDIT.format(_LIBRARY, "with four books instead of six"),
    _EDIT.format(_CAKE, "with pears instead of apples"),
]
QUOTES = [
    _QUOTE.format(_LIBRARY, "The reading room"),
    _QUOTE.format(_CAKE, "Melt the"),
    _QUOTE.format(_LIBRARY, "Visitors may"),
    _QUOTE.format(_CAKE, "Pour the"),
]
CODE = [
    'def is_leap_year(year: int) -> bool:\n    """True if the year has 366 days in the Gregorian calendar."""\n',
    'def count_words(text: str) -> dict[str, int]:\n    """How often each word occurs, without regard to case."""\n',
    'class Stack:\n    """Last in, first out: push, pop, peek, and its length."""\n\n    def __init__(self) -> None:\n',
    'def merge_sorted(one: list[int], other: list[int]) -> list[int]:\n    """One sorted list of two sorted ones."""\n',
]
CHAT = [
    "What is the capital of France, and what is it known for?",
    "Give me five tips for learning to play the guitar.",
    "Explain in simple words how a rainbow forms.",
    "Write a short story about a lighthouse keeper and a lost whale.",
    "What should I pack for a week of hiking in the mountains?",
    "Compare cats and dogs as pets.",
    "How do I make a good cup of coffee?",
    "Write a polite email that asks for a day off next Monday.",
]
