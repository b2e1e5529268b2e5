"""Every command line in README.md and docs/ works as it is written: targets, scripts and flags exist."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fewshot
from fewshot import tasks
from fewshot.runners.cli.flags import parse
from fewshot.training.configuration import REGISTRIES, resolve

REPOSITORY = Path(__file__).resolve().parents[1]
README = (REPOSITORY / "README.md").read_text()
DOCS = [path.read_text() for path in sorted((REPOSITORY / "docs").glob("*.md"))]
MOST_CHARACTERS = 9_000  # of the README: a newcomer reads it in two minutes


def commands():
    """Lines of the fenced shell blocks, comments removed and continued lines joined."""
    blocks = re.findall(r"```(?:bash|sh|console)\n(.*?)```", "\n".join([README, *DOCS]), flags=re.DOTALL)
    for line in "\n".join(blocks).replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


MAKE_TARGETS = sorted({words[1] for words in commands() if words[0] == "make"})
RUNNERS = sorted({" ".join(words[1:]) for words in commands() if len(words) > 1 and words[1].startswith("runners/")})


def test_the_readme_is_short_and_has_the_two_set_up_commands():
    assert len(README) <= MOST_CHARACTERS
    assert {"make train", "make test"} <= {line.split("  ")[0] for line in README.splitlines()}


def test_links_of_the_readme_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)", README)
    assert links
    assert [link for link in links if not (REPOSITORY / link).exists()] == []


def test_the_reference_names_every_public_name():
    page = (REPOSITORY / "docs" / "reference" / "index.md").read_text()
    named = set(re.findall(r"^\| \[?`(\w+)`", page, flags=re.MULTILINE))
    assert named == set(fewshot.__all__)
    links = re.findall(r"^\| \[`(\w+)`\]\[([\w.]+)\]", page, flags=re.MULTILINE)
    assert len(links) > 40
    public = {name: getattr(fewshot, name) for name, _ in links}
    assert [link for link in links if link[1] != f"{public[link[0]].__module__}.{link[0]}"] == []


def test_the_site_leads_to_every_page():
    """`mkdocs build --strict` asks too, where it is installed."""
    named = re.findall(r"([\w/-]+\.md)$", (REPOSITORY / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    pages = {str(path.relative_to(REPOSITORY / "docs")) for path in (REPOSITORY / "docs").rglob("*.md")}
    assert len(named) == len(set(named)) and set(named) == pages


def test_the_page_of_choices_names_each_of_them():
    page = (REPOSITORY / "docs" / "choosing.md").read_text()
    rows = {row.split("`")[1]: row for row in page.splitlines() if row.startswith("| `--")}
    named = {"dataset": tasks.NAMES, **REGISTRIES}
    missing = [(name, one) for name, every in named.items() for one in every if f"`{one}`" not in rows[f"--{name}"]]
    assert not missing


@pytest.mark.parametrize("target", MAKE_TARGETS)
def test_make_targets_exist(target):
    done = subprocess.run(["make", "--dry-run", target], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_runners_know_their_flags():
    known = {}
    for command in RUNNERS:
        script, *arguments = shlex.split(command)
        if script not in known:
            done = subprocess.run([sys.executable, script, "--help"], cwd=REPOSITORY, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            known[script] = set(re.findall(r"--[a-z][a-z-]*", done.stdout))
        assert {word.split("=")[0] for word in arguments if word.startswith("--")} <= known[script], command


def test_training_commands_name_choices_and_settings_that_exist():
    lines = [shlex.split(command)[1:] for command in RUNNERS if command.startswith("runners/meta_train.py")]
    started = [arguments for arguments in lines if "--resume" not in arguments]
    assert started
    for arguments in started:
        resolve(parse(arguments))


@pytest.mark.long
def test_the_lines_for_notebooks_run(tiny_run, tiny_data, monkeypatch):
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    (block,) = [block for block in blocks if "load_run" in block]
    block = re.sub(r'load_run\(".*?"\)', f"load_run({str(tiny_run.path)!r})", block)
    block = re.sub(r'\bload\(".*?"\)', 'load("omniglot")', block)
    names = {}
    monkeypatch.setenv("FEWSHOT_DATA", tiny_data)
    exec(re.sub(r"way=\d+", "way=3", block), names)
    assert names["probabilities"].shape == (45, 3)
    np.testing.assert_allclose(names["probabilities"].sum(-1), 1.0, rtol=1e-5)
