"""Imports the app that a worker runs: `MODULE:NAME`."""

import importlib
import os
import sys

from hadelay.errors import ConfigError
from hadelay.tasks.app import App


def load(where: str) -> App:
    """The app at MODULE:NAME (default of NAME: `app`), in the present directory or an installed package. ConfigError if
    there is none; exceptions of the module are not caught."""
    module, _, name = where.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name or "app", None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(f"{where}: there is no module {error.name!r} in {os.getcwd()} or on Python's path") from None
    if not isinstance(found, App):
        raise ConfigError(f"{where}: module {module} has no App named {name or 'app'!r}: use MODULE:NAME")
    for task in found.tasks.values():
        task.arguments.check()
    if not found.topics:
        raise ConfigError(f"{where}: the app has no tasks; import the modules that define them where you make the app")
    return found
