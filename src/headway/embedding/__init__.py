"""Texts become vectors, beside the engine: a model of their own in a process of its own, which no token waits for."""
