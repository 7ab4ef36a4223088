"""What pip knows headway by: the distribution's name and version. The build reads the version here."""

# PyPI's `headway` is another project; the import name and the command are ours all the same.
DISTRIBUTION = "headway-llm"
__version__ = "0.1.0"
