"""Every command line in README.md and docs/ works as it is written: targets, scripts and flags exist."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import data_file
from PIL import Image

import fewshot
from fewshot import tasks
from fewshot.runners import predict, reproduce
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


def inline_commands(folder):
    """Scripts of a folder with their arguments, of the code spans of every page and kept result."""
    for path in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]:
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        for span in re.findall(rf"`([^`]*\bpython {folder}/\w+\.py[^`]*)`", text):  # which may go on in the next line
            yield path, shlex.split(span.split("python ", 1)[1])


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
    named = {"dataset": tasks.names(), **REGISTRIES}
    missing = [(name, one) for name, every in named.items() for one in every if f"`{one}`" not in rows[f"--{name}"]]
    assert not missing


@pytest.mark.parametrize("target", MAKE_TARGETS)
def test_make_targets_exist(target):
    done = subprocess.run(["make", "--dry-run", target], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_runners_know_their_flags():
    known = {}
    fenced = [(REPOSITORY / "README.md", shlex.split(command)) for command in RUNNERS]
    for page, (script, *arguments) in [*fenced, *inline_commands("runners")]:
        if script not in known:
            done = subprocess.run([sys.executable, script, "--help"], cwd=REPOSITORY, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            known[script] = set(re.findall(FLAG, done.stdout))
        assert flags(arguments) <= known[script], (page, script, arguments)


def test_benchmarks_know_their_flags():
    named = list(inline_commands("benchmarks"))
    assert len(named) > 100  # the pattern finds them
    for page, (script, *arguments) in named:
        known = set(re.findall(f'"({FLAG})"', (REPOSITORY / script).read_text()))  # starting each takes minutes
        assert flags(arguments) <= known, (page, script, arguments)


def test_comparisons_and_methods_of_every_page_exist():
    for page, (script, *arguments) in inline_commands("runners"):
        if script == "runners/reproduce.py" and "..." not in arguments:
            assert reproduce.parse(arguments), page


FLAG = r"--[a-z][a-z0-9-]*"


def flags(arguments):
    return {word.split("=")[0] for word in arguments if word.startswith("--")}


@pytest.mark.long
def test_the_answers_that_are_shown_are_those_of_the_command(tmp_path, monkeypatch, capsys):
    data_file("emnist.npz")
    data_file("omniglot.npz")
    splits = tasks.load("omniglot-emnist")
    images, rows = np.asarray(splits.test.images), np.asarray(splits.test.index)
    named = {name: images[rows[splits.class_names["test"].index(name)]][..., 0] for name in "BHR"}
    for name, own in named.items():
        (tmp_path / "letters" / name).mkdir(parents=True)
        Image.fromarray(own[0]).save(tmp_path / "letters" / name / "one.png")
        Image.fromarray(own[1]).save(tmp_path / "letters" / name / "two.png")
    (tmp_path / "scans").mkdir()
    for number, (name, image) in enumerate([("R", 2), ("B", 2), ("H", 2), ("R", 3)], start=1):
        Image.fromarray(named[name][image]).save(tmp_path / "scans" / f"{number}.png")
    monkeypatch.chdir(tmp_path)
    (command,) = [line for line in RUNNERS if line.startswith("runners/predict.py docs/")]
    _, run, *flags = shlex.split(command)
    shutil.copytree(REPOSITORY / run, "run", ignore=shutil.ignore_patterns("temperatures.json"))  # as in a fresh clone
    assert predict.command_line(["run", *flags]) == 0
    progress, first, answers = capsys.readouterr().out.partition("3 classes with")
    assert all(line.startswith("fitting the temperature for 3-way ") for line in progress.splitlines())
    tutorial = (REPOSITORY / "docs" / "tutorial.md").read_text()
    for page, start, found in (
        (README, first, first + answers),
        (tutorial, first, first + answers),
        (tutorial, "image,prediction,", (tmp_path / "probabilities.csv").read_text()),
    ):
        shown = page[page.index(start) :].split("```")[0]
        assert words(shown) == words(found)
        # Processors differ in the last digits.
        np.testing.assert_allclose(numbers(shown), numbers(found), atol=0.004)


NUMBER = r"(?<![\w.])\d+\.\d+(?![\w.])"


def numbers(text):
    """Decimal ones, of percentages a hundredth."""
    return [float(number) / (100 if percent else 1) for number, percent in re.findall(f"({NUMBER})(%?)", text)]


def words(text):
    """All that is no decimal number, in any layout."""
    return re.sub(NUMBER, "#", text).split()


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
