"""How command lines are run: errors in one line, a process tuned for the work. meta_train.py does so for several."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import jax

from fewshot.runners.cli import compilation_cache, processor
from fewshot.runners.cli.console import one_line_errors, silent_where_asked
from fewshot.tasks import DataError
from fewshot.training.checkpoint import CheckpointError
from fewshot.training.interruption import AT_ONCE, Stopped, stoppable
from fewshot.training.overrides import ConfigError
from fewshot.training.plugins import load_plugins
from fewshot.training.run_directory import RunError

Config = TypeVar("Config")
EXPECTED = (ConfigError, DataError, RunError, CheckpointError, OSError)  # the last: a disk that is full, say


def launch(
    parse: Callable[[Sequence[str] | None], Config],
    main: Callable[[Config], object],
    arguments: Sequence[str] | None,
    *others: type[Exception],
) -> int:
    """Parse and run. Exit code: 0, or 2 after an error, of those EXPECTED or others, in one line.

    128 + SIGPIPE where nobody reads the output any more, as after `head`, 128 + the signal after Ctrl-C or SIGTERM.
    """
    with one_line_errors(*EXPECTED, *others):
        load_plugins()
        config = parse(arguments)
        compilation_cache.keep_programs()
        processor.tune()
        try:
            with stoppable(), silent_where_asked(arguments):
                main(config)
            sys.stdout.flush()
        except BrokenPipeError:
            return nobody_reads()
        except KeyboardInterrupt as stopped:
            return stopped_by(stopped)
    return 0


def stopped_by(stopped: KeyboardInterrupt) -> int:
    """The exit code after Ctrl-C, or a signal that ends the program as that does, which it tells."""
    print(AT_ONCE, file=sys.stderr)
    return 128 + (stopped.number if isinstance(stopped, Stopped) else signal.SIGINT)


def leave(code: int) -> NoReturn:
    """End the program with an exit code; after a signal without what Python does at its exit.

    Compiled code may still be at work, the compiler say: Python would wait for it, a minute for MAML, and fall over it.
    """
    if code <= 128 or jax.distributed.is_initialized():  # of several processes none may leave the others alone
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def nobody_reads() -> int:
    """The exit code after the output was closed; what Python flushes at its exit goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE
