"""The errors Deepwell raises on purpose. One root to catch, standard parents so that ordinary handlers work.

A message names the argument or module, what was got, and what to do about it.
"""


class DeepwellError(Exception):
    """Root of every error that Deepwell raises on purpose."""


class ConfigError(DeepwellError, ValueError):
    """An argument, file or setting is wrong: its name, what was got and what is accepted stand in the message."""


class UnsupportedError(DeepwellError, NotImplementedError):
    """The request is meaningful but this device, format or shape cannot serve it."""


class CaptureError(DeepwellError, RuntimeError):
    """Neither tracing nor the static walk could read a module; the message names it."""


class PlanError(DeepwellError, RuntimeError):
    """No feasible plan; the message holds the nearest miss and what would make it fit."""


class NumericsError(DeepwellError, ArithmeticError):
    """NaN, overflow or a failed numeric check."""


class CheckpointError(DeepwellError, RuntimeError):
    """A checkpoint or an exported file is incomplete, damaged or of another kind; the message names the file."""
