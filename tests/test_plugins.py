"""Parts of a user's own, registered by a module that FEWSHOT_PLUGINS names: the examples of the documentation."""

import re
import sys
from dataclasses import replace

import numpy as np
import pytest
from conftest import REPOSITORY

from fewshot import Softmax, check_inference, models
from fewshot.inference import INFERENCE
from fewshot.inference.inner.base import NEEDS
from fewshot.learners import LEARNERS
from fewshot.models.conformance import ConformanceError
from fewshot.runners import evaluate, meta_train, reproduce
from fewshot.runners.studies.comparisons import COMPARISONS
from fewshot.tasks import DATASETS, DataError, load
from fewshot.training import configuration
from fewshot.training.overrides import ConfigError
from fewshot.training.plugins import load_plugins
from fewshot.training.run import load_run
from fewshot.training.run_directory import RunError


def use_example(page, module, folder, monkeypatch):
    """The example of a page as a module of the working folder, and that module as the plugin."""
    text = (REPOSITORY / "docs" / page).read_text()
    example = re.search(rf"```python\n(# {module}.py\n.*?)```", text, re.DOTALL).group(1)
    (folder / f"{module}.py").write_text(example)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("FEWSHOT_PLUGINS", module)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """That of a learner; nothing of it is left behind."""
    use_example("learners.md", "mine", tmp_path, monkeypatch)

    def forget():
        sys.modules.pop("mine", None)
        LEARNERS.pop("centres", None)

    yield forget
    forget()


@pytest.fixture
def newton(tmp_path, monkeypatch):
    """That of an inference."""
    use_example("developing.md", "newton", tmp_path, monkeypatch)
    yield
    sys.modules.pop("newton", None)
    INFERENCE.pop("newton", None)
    NEEDS.pop("newton", None)


@pytest.fixture
def digits(tmp_path, monkeypatch):
    """That of a data set."""
    use_example("datasets.md", "digits", tmp_path, monkeypatch)
    yield
    sys.modules.pop("digits", None)
    DATASETS.pop("digits", None)


@pytest.fixture
def beside(mine, tmp_path, monkeypatch):
    """That of a comparison, of the learner with others."""
    use_example("learners.md", "beside", tmp_path, monkeypatch)
    monkeypatch.setenv("FEWSHOT_PLUGINS", "mine,beside")
    yield
    sys.modules.pop("beside", None)
    COMPARISONS.pop("beside", None)


def test_a_comparison_of_ones_own_is_named_and_has_its_rows(beside, capsys):
    with pytest.raises(SystemExit, match="2"):
        reproduce.command_line(["besides"])
    assert "known: omniglot-kernels" in (message := capsys.readouterr().err) and "beside," in message
    with pytest.raises(SystemExit, match="2"):
        reproduce.command_line(["beside", "--methods", "maml"])
    assert "softmax-cvi-loo, prototypical, centres" in capsys.readouterr().err


@pytest.mark.long
def test_a_comparison_of_ones_own_is_run(beside, tmp_path, capsys):
    load_plugins()
    few = {f"trainer.{kind}_episodes": 8 for kind in ("validation", "temperature", "test")}
    COMPARISONS["beside"] = replace(COMPARISONS["beside"], settings=few, test_episodes=8, batches=2)
    words = ["beside", "--methods", "prototypical,centres", "--shots", "1", "--episodes", "4"]
    assert reproduce.command_line([*words, "--out", str(tmp_path / "out")]) == 0
    table = (tmp_path / "out" / "table.md").read_text()
    assert table.index("prototypical") < table.index("centres")
    assert (tmp_path / "out" / "comparison.png").exists()


@pytest.mark.long
def test_an_inference_of_ones_own_passes_and_is_trained(newton, tmp_path, capsys):
    load_plugins()
    names = check_inference(INFERENCE["newton"](Softmax()), variational=False)
    assert "settles" in names and "has an evidence" in names
    with pytest.raises(ConformanceError, match="the bound is stationary"):
        check_inference(INFERENCE["newton"](Softmax()))
    few = [f"trainer.{kind}_episodes=8" for kind in ("validation", "temperature", "test")]
    words = ["--dataset", "glyphs", "--backbone", "mlp", "--episodes", "4", "--inference", "newton"]
    settings = ["--set", "inference.rho=0.5", *few]
    assert meta_train.command_line([*words, "--run-dir", str(tmp_path / "run"), *settings]) == 0
    assert load_run(tmp_path / "run").config.inference == "newton"
    with pytest.raises(SystemExit, match="2"):
        meta_train.command_line(["--inference", "newton", "--likelihood", "student-t", "--dataset", "sinusoids"])
    assert "newton needs local_sites; StudentT offers none" in capsys.readouterr().err


def test_a_data_set_of_ones_own_is_loaded_and_named(digits, capsys):
    with pytest.raises(DataError, match="expected the name of a data set, got 'digits'"):
        load("digits")
    load_plugins()
    found = load("digits")
    assert found.image_shape == (8, 8, 1) and found.class_names["test"] == ("7", "8", "9")
    assert [found.train.classes, found.validation.classes, found.test.classes] == [5, 2, 3]
    with pytest.raises(DataError, match=r"try one of glyphs, .*, digits, flowers102"):
        load("digit")
    with pytest.raises(SystemExit, match="0"):
        meta_train.command_line(["--help"])
    assert "digits" in capsys.readouterr().out


@pytest.mark.long
def test_a_run_learns_from_a_data_set_of_ones_own(digits, tmp_path, capsys):
    few = [f"trainer.{kind}_episodes=8" for kind in ("validation", "temperature", "test")]
    words = ["--dataset", "digits", "--way", "2", "--backbone", "mlp", "--episodes", "4", "--set", *few]
    assert meta_train.command_line([*words, "--run-dir", str(tmp_path / "run")]) == 0
    assert "3 classes of digits never seen in training" in capsys.readouterr().out


@pytest.mark.long
def test_a_learner_of_ones_own_is_trained_and_opened_again(mine, tmp_path, monkeypatch, capsys):
    rng, arrays = np.random.default_rng(0), {}
    for part, names in (("train", "abc"), ("validation", "def"), ("test", "ghi")):
        labels = np.repeat(list(names), 12)
        arrays[f"{part}_labels"] = labels
        arrays[f"{part}_features"] = rng.normal(size=(36, 4)) + 4 * np.repeat(np.eye(3, 4), 12, axis=0)
    np.savez(tmp_path / "features.npz", **arrays)
    run, few = tmp_path / "run", [f"trainer.{kind}_episodes=8" for kind in ("validation", "temperature", "test")]
    words = ["--learner", "centres", "--dataset", f"embeddings:{tmp_path / 'features.npz'}", "--backbone", "identity"]
    words += ["--way", "3", "--query", "2", "--episodes", "4", "--run-dir", str(run), "--set", *few]
    assert meta_train.command_line(words) == 0
    assert load_run(run).temperature != 1  # the learner has no parameter, so no step is better than none
    mine()
    assert evaluate.command_line([str(run), "--episodes", "8"]) == 0
    capsys.readouterr()
    mine()
    assert type(load_run(run).learner).__name__ == "Centres"
    mine()
    monkeypatch.delenv("FEWSHOT_PLUGINS")
    with pytest.raises(
        RunError, match="as learner, got 'centres'; name the module that registers it in FEWSHOT_PLUGINS"
    ):
        load_run(run)
    with pytest.raises(SystemExit, match="2"):
        evaluate.command_line([str(run), "--episodes", "8"])
    assert "FEWSHOT_PLUGINS" in capsys.readouterr().err


def test_a_module_that_cannot_be_imported_is_one_line(mine, tmp_path, monkeypatch, capsys):
    (tmp_path / "broken.py").write_text("raise RuntimeError('two\\nlines')")
    (tmp_path / "ending.py").write_text("raise SystemExit('two\\nlines')")
    refused = [("absent", "ModuleNotFoundError"), ("mine, broken", "RuntimeError: two"), ("ending", "SystemExit: two")]
    for names, reason in refused:
        monkeypatch.setenv("FEWSHOT_PLUGINS", names)
        with pytest.raises(SystemExit, match="2"):
            meta_train.command_line(["--quiet"])
        message = capsys.readouterr().err
        assert f"in FEWSHOT_PLUGINS, got {names.split(', ')[-1]} ({reason}" in message
        assert len(message.splitlines()) == 1


@pytest.mark.parametrize("registry, base", [("LIKELIHOODS", "Softmax"), ("NOISE_MODELS", "Normal")])
def test_a_likelihood_of_ones_own_is_known_by_its_name(registry, base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("FEWSHOT_PLUGINS", "noisy")
    (tmp_path / "noisy.py").write_text(
        f"from fewshot.models import {registry}, {base}\n\n\nclass Noisy({base}):\n    pass\n\n\n"
        f'{registry}["noisy"] = Noisy\n'
    )
    load_plugins()
    try:
        dataset = {"LIKELIHOODS": "glyphs", "NOISE_MODELS": "sinusoids"}[registry]
        resolved = configuration.resolve(configuration.configured(dataset=dataset, likelihood="noisy"))
        assert resolved.likelihood == "noisy" and resolved.inference
    finally:
        sys.modules.pop("noisy", None)
        getattr(models, registry).pop("noisy", None)


@pytest.mark.parametrize("name", ["json", "sys"])
def test_a_module_that_another_hides_is_refused(name, mine, tmp_path, monkeypatch):
    monkeypatch.setenv("FEWSHOT_PLUGINS", f"mine,{name}")
    load_plugins()  # nothing is hidden
    (tmp_path / f"{name}.py").write_text("")
    with pytest.raises(ConfigError, match=rf"expected {name}.py as {name} in FEWSHOT_PLUGINS, but .* has that name"):
        load_plugins()


@pytest.mark.parametrize("names", ["", " , "])
def test_nothing_is_imported_unless_something_is_named(mine, monkeypatch, names):
    monkeypatch.setenv("FEWSHOT_PLUGINS", names)
    before = [*sys.path]
    load_plugins()
    assert "mine" not in sys.modules and sys.path == before
