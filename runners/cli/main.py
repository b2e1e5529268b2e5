"""The console command: `fewshot train`, `fewshot evaluate` and so on are the programs of runners/."""

import importlib
import sys
from collections.abc import Sequence
from importlib import metadata

PACKAGE = "bayesian-few-shot"
PROGRAMS = {
    "train": "meta_train",
    "evaluate": "evaluate",
    "predict": "predict",
    "encode": "encode",
    "diagnose": "diagnose",
    "compare": "compare",
    "reproduce": "reproduce",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a program on the rest of the words. Exit code: that of the program, 2 for a name that is none."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] in (["-h"], ["--help"]):
        print(f"usage: fewshot {{{','.join(PROGRAMS)}}} ...; fewshot PROGRAM --help lists the flags of one")
        print('flags at the TAB key: eval "$(fewshot completion bash)", or zsh; fewshot --version')
        return 0
    if words[:1] == ["--version"]:
        print(f"fewshot {metadata.version(PACKAGE)}")
        return 0
    if words[:1] == ["completion"]:
        return _completion(words[1:])
    name = words[0] if words else "nothing"
    if name not in PROGRAMS:
        print(f"error: expected one of {', '.join(PROGRAMS)}, got {name}; try fewshot --help", file=sys.stderr)
        return 2
    program = importlib.import_module(f"fewshot.runners.{PROGRAMS[name]}")
    code = int(program.command_line(words[1:]))
    if arguments is None:  # as a program
        from fewshot.runners.cli.launch import leave

        leave(code)
    return code


def _completion(words: list[str]) -> int:
    """Print the script of a shell."""
    from fewshot.runners.cli.completion import SHELLS, script

    if len(words) != 1 or words[0] not in SHELLS:
        got = " ".join(words) or "nothing"
        print(f"error: expected fewshot completion {' or '.join(SHELLS)}, got {got}", file=sys.stderr)
        return 2
    print(script(words[0], PROGRAMS), end="")
    return 0
