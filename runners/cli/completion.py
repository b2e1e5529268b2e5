"""Words for the TAB key: programs, flags, and the names of weights, as a script for bash and zsh."""

import contextlib
import importlib
import io
import re
from collections.abc import Mapping

from fewshot.pretrained import PRETRAINED

SCRIPT = """{zsh}_fewshot() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" words=""
  case "$COMP_CWORD,${{COMP_WORDS[1]}}" in
    1,*) words="{programs}" ;;
{cases}
  esac
  COMPREPLY=()
  if [[ "$COMP_CWORD" == 1 || "$word" == -* || "${{COMP_WORDS[1]}}" == predict ]]; then
    COMPREPLY=($(compgen -W "$words" -- "$word"))
  fi
}}
complete -o default -F _fewshot fewshot
"""
ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
SHELLS = {"bash": "", "zsh": ZSH}


def script(shell: str, programs: Mapping[str, str]) -> str:
    """What `eval "$(fewshot completion SHELL)"` runs; programs: modules of `runners` by their names."""
    cases = "\n".join(f'    *,{name}) words="{" ".join(_words(name, module))}" ;;' for name, module in programs.items())
    return SCRIPT.format(zsh=SHELLS[shell], programs=" ".join(programs), cases=cases)


def _words(name: str, module: str) -> list[str]:
    """The flags in a program's help, and what else it may be given."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        importlib.import_module(f"fewshot.runners.{module}").command_line(["--help"])
    flags = sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text.getvalue())))
    return [*flags, *(PRETRAINED if name == "predict" else ())]
