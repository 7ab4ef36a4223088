"""The exception tree. Everything headway raises on purpose is an `EngineError`.

EngineError
├── ConfigError            a flag, file or machine cannot serve what was asked   (exit code 2)
│   └── ModelFormatError   a model file is broken, hostile or of an unknown kind (exit code 2)
├── RequestError           the request itself is at fault                        (HTTP 400 or 404)
├── Overloaded             no room now; come back after `retry_after_s`          (HTTP 503)
├── Unreachable            its objective is out of reach now; likewise           (HTTP 429)
├── EngineDead             the engine is gone; nothing was silently dropped      (HTTP 503)
│   └── EngineRestarting   another one is on its way; ask again in a moment      (HTTP 503)
└── RowFailed              this one request broke inside the engine              (HTTP 500)

Every message says what was got, what is allowed, and what to do.
"""


class EngineError(Exception):
    """Root of everything headway raises on purpose."""


class ConfigError(EngineError):
    """The configuration cannot be honoured; the command line exits with 2."""


class ModelFormatError(ConfigError):
    """A model file is broken, hostile, or of a kind we do not run."""


class RequestError(EngineError):
    """The request is at fault. `param` names the field, `code` is OpenAI's error code."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class Overloaded(EngineError):
    """The engine is full; the caller should come back after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unreachable(EngineError):
    """The request could not be served by when it wants to be; it may come back after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDead(EngineError):
    """The engine process or thread has ended; every open stream is told so."""


class EngineRestarting(EngineDead):
    """The engine process has ended and is being replaced; what was asked of it has to be asked again."""


class RowFailed(EngineError):
    """One request failed inside the engine; its neighbours were not touched."""
