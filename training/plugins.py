"""Parts of a user's own: modules that the variable FEWSHOT_PLUGINS names are imported before a run is made or opened.

# mine.py
from fewshot.learners import LEARNERS
LEARNERS["mine"] = MyLearner

FEWSHOT_PLUGINS=mine fewshot train --learner mine
"""

import importlib
import os
import sys
from pathlib import Path

from fewshot.training.overrides import ConfigError

VARIABLE = "FEWSHOT_PLUGINS"


def load_plugins() -> None:
    """Import the modules that FEWSHOT_PLUGINS names, with commas between; the working folder is searched last.

    Raises ConfigError, in one line, for a module that cannot be imported, and for one of the working folder that
    another of its name hides.
    """
    names = [name.strip() for name in os.environ.get(VARIABLE, "").split(",")]
    for name in filter(None, names):
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        try:
            found = importlib.import_module(name)
        except (Exception, SystemExit) as error:  # a module of the user's, which may raise anything
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ConfigError(f"expected modules that can be imported in {VARIABLE}, got {name} ({reason})") from error
        own, other = Path(f"{name.replace('.', '/')}.py"), getattr(found, "__file__", None) or "a part of Python"
        if own.is_file() and own.resolve() != Path(other).resolve():
            raise ConfigError(f"expected {own} as {name} in {VARIABLE}, but {other} has that name; rename yours")
