"""The console command `fewshot`: which programs there are, and their exit codes."""

import shutil
import subprocess
import tomllib

import pytest
from conftest import REPOSITORY

from fewshot.runners.cli import main

BASH = shutil.which("bash") or "bash"


def test_a_program_is_run_on_the_rest_of_the_words(capsys):
    with pytest.raises(SystemExit) as exit_info:
        main.main(["evaluate", "--help"])
    assert exit_info.value.code == 0 and "usage: evaluate.py" in capsys.readouterr().out


@pytest.mark.parametrize("program", main.PROGRAMS)
def test_every_program_reports_a_bad_command_line_in_one_line(program, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main.main([program, "--no-such-flag"])
    assert exit_info.value.code == 2 and capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("words, shown", [([], "got nothing"), (["dance"], "got dance")])
def test_a_name_that_is_no_program_is_refused(words, shown, capsys):
    assert main.main(words) == 2
    error = capsys.readouterr().err
    assert shown in error and "train, evaluate" in error and error.count("\n") == 1


@pytest.mark.parametrize("program", main.PROGRAMS)
def test_every_program_has_a_quiet_flag(program, capsys):
    with pytest.raises(SystemExit):
        main.main([program, "--help"])
    assert "--quiet" in capsys.readouterr().out


def test_the_version_is_that_of_the_project(capsys):
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert main.main(["--version"]) == 0
    assert capsys.readouterr().out == f"fewshot {project['version']}\n" and project["name"] == main.PACKAGE


def test_help_lists_the_programs(capsys):
    assert main.main(["--help"]) == 0
    assert "train,evaluate,predict,encode,diagnose,compare,reproduce" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash, whose words these are; install it")
def test_the_tab_key_knows_programs_flags_and_weights(capsys):
    assert main.main(["completion", "bash"]) == 0
    script = capsys.readouterr().out

    def offered(*words):
        typed = " ".join(f"'{word}'" for word in words)
        asked = f"{script}\nCOMP_WORDS=(fewshot {typed}); COMP_CWORD={len(words)}; _fewshot; echo ${{COMPREPLY[@]}}"
        return subprocess.run([BASH, "-c", asked], capture_output=True, text=True, check=True).stdout.split()

    assert offered("e") == ["evaluate", "encode"]
    assert offered("predict", "--keep") == ["--keep-accuracy"] and offered("predict", "glyph") == ["glyphs"]
    assert offered("train", "--conf") == ["--config"] and offered("train", "x") == []  # files, then
    assert main.main(["completion", "fish"]) == 2
    assert "expected fewshot completion bash or zsh, got fish" in capsys.readouterr().err
    assert main.main(["completion", "zsh"]) == 0 and "bashcompinit" in capsys.readouterr().out
