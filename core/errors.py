"""Errors that a user of Octavo meets. Each says what is wrong, why, and what to change."""

from __future__ import annotations


class OctavoError(Exception):
    """Base of all errors that are meant for the person who started the work, not for a debugger."""


class ConfigError(OctavoError, ValueError):
    """An option, or a combination of options, cannot be honoured as asked."""


class ContextTooLongError(ConfigError):
    """The device's programs cannot take so long a context with so many sequences.

    Attributes:
        max_model_len: the longest context that they take, in tokens.
    """

    def __init__(self, message: str, max_model_len: int) -> None:
        super().__init__(message)
        self.max_model_len = max_model_len


class DeviceError(OctavoError):
    """No device can be used as asked; the message says what each probe found."""


class ModelError(OctavoError):
    """A model cannot be found, read, or run."""


class OutOfMemoryError(OctavoError, MemoryError):
    """The model, or one request, does not fit; the message says what would."""


class RequestError(OctavoError, ValueError):
    """A request is invalid.

    Attributes:
        param: the request's field that is wrong, in the OpenAI protocol's spelling, or None.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class EngineDeadError(OctavoError):
    """The engine has stopped; no request can be served until it is started again."""


class UnavailableError(OctavoError):
    """The engine takes no new request now (it drains, or its queue is full); later, or elsewhere, it would succeed."""
