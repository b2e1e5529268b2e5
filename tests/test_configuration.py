"""Flags, `auto` and `--set`: what is chosen, what is refused and in which words."""

import json
from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fewshot import inference, models
from fewshot.inference.inner.base import usable_inferences
from fewshot.models import LIKELIHOODS
from fewshot.models.conformance import weakly_typed
from fewshot.models.expectations import Exact, MonteCarlo
from fewshot.runners.cli.flags import dataset_name, parse
from fewshot.training import defaults, optimisation
from fewshot.training.configuration import REGISTRIES, RunConfig, TrainerSettings, override_targets, resolve
from fewshot.training.optimisers import OPTIMISERS, SCHEDULES
from fewshot.training.overrides import ConfigError, Override, converted, parse_override
from fewshot.training.run import build_run

CVI_SETTINGS = ", ".join(f"inference.{setting.name}" for setting in Override.of(inference.INFERENCE["cvi"]))


def refused(*flags):
    with pytest.raises(ConfigError) as error:
        resolve(parse(flags))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_defaults_are_decided_and_marked():
    config = resolve(parse([]))
    assert config.dataset == "glyphs" and config.inference == "cvi" and config.query == 0
    assert {"inference", "objective", "hypergradient", "kernel", "episodes", "inner_steps"} == set(config.chosen)
    objectives = {
        ("softmax", "cvi"): "leave-one-out",
        ("one-vs-each", "auto"): "leave-one-out",
        ("one-vs-each", "cavi"): "leave-one-out",
        ("logistic-softmax", "cavi"): "leave-one-out",
        ("logistic-softmax", "auto"): "elbo",
        ("softmax", "laplace"): "elbo",
        ("one-vs-each", "gibbs"): "predictive",
        ("logistic-softmax", "gibbs"): "predictive",
        ("gaussian", "auto"): "elbo",
    }
    for (likelihood, algorithm), objective in objectives.items():
        assert resolve(parse(["--likelihood", likelihood, "--inference", algorithm])).objective == objective
    assert resolve(parse(["--likelihood", "gaussian"])).inference == "exact"
    assert resolve(parse(["--inference", "gradient"])).hypergradient == "unroll"
    assert config.run_dir == "runs/glyphs-softmax-cvi-5way-1shot-0"


def test_inner_steps_are_those_of_the_inference_and_for_cvi_of_the_data_set():
    steps = {
        ("cvi", "glyphs"): 3,
        ("cvi", "omniglot"): 3,
        ("cvi", "omniglot-emnist"): 10,
        ("cvi", "flowers102-32"): 10,
        ("laplace", "omniglot-emnist"): 10,
        ("laplace", "omniglot"): 10,
    }
    for (algorithm, dataset), count in steps.items():
        assert resolve(parse(["--inference", algorithm, "--dataset", dataset])).inner_steps == count


@pytest.mark.parametrize("likelihood", models.LIKELIHOODS)
@pytest.mark.parametrize("algorithm", ["auto", *inference.INFERENCE])
def test_every_pair_has_defaults_or_is_refused_with_the_reason(likelihood, algorithm):
    config = resolve(parse(["--likelihood", likelihood, "--inference", algorithm, "--backbone", "identity"]))
    try:
        run = build_run(replace(config, query=1), (4, 4, 1))
    except ConfigError as error:
        assert algorithm not in usable_inferences(LIKELIHOODS[likelihood]())
        assert algorithm in str(error)  # the run-time type checker may speak first
    else:
        assert config.inference in usable_inferences(LIKELIHOODS[likelihood]())
        assert weakly_typed(run.learner) == []


def test_explicit_auto_is_the_default():
    flags = ["--inference", "auto", "--query", "auto", "--episodes", "auto", "--inner-steps", "auto"]
    assert resolve(parse(flags)) == resolve(parse([]))


def test_a_configuration_survives_its_file():
    config = resolve(parse(["--set", "trainer.learning_rate=0.5", "inference.expectation=exact"]))
    stored = json.loads(json.dumps(config.to_json()))
    assert RunConfig.from_json(stored, run_dir=config.run_dir) == config
    # Defaults of the trainer are stored too: they may change in a later version.
    assert {f"trainer.{entry.name}" for entry in fields(TrainerSettings)} <= stored["settings"].keys()
    with pytest.raises(ConfigError, match=r"got others \(way\); train again"):
        RunConfig.from_json({name: value for name, value in stored.items() if name != "way"})


def test_runs_from_before_training_images_were_changed_had_none_changed():
    stored = resolve(parse([])).to_json()
    del stored["settings"]["trainer.augment"]
    assert RunConfig.from_json(stored).trainer.augment == "none"


def test_matching_from_before_context_embeddings_had_none():
    stored = resolve(parse(["--learner", "matching"])).to_json()
    assert stored["settings"]["learner.context"] is True
    del stored["settings"]["learner.context"]
    assert RunConfig.from_json(stored).settings["learner.context"] is False
    asked = resolve(parse(["--learner", "matching", "--set", "learner.context=false"])).to_json()
    assert RunConfig.from_json(asked).settings["learner.context"] is False


def test_relation_has_a_conv4_of_its_own_and_runs_from_before_keep_theirs():
    config = resolve(parse(["--learner", "relation"]))
    assert config.backbone == "conv4-maps" and "backbone" in config.chosen
    assert resolve(parse(["--learner", "relation", "--backbone", "mlp"])).backbone == "mlp"
    assert resolve(parse(["--learner", "matching"])).backbone == "conv4"
    stored = {**config.to_json(), "backbone": "conv4", "chosen": []}
    assert RunConfig.from_json(stored).backbone == "conv4"


def test_the_prior_of_the_output_scale_goes_with_the_likelihood():
    """Regressed labels are -1 and 1; logits are larger."""

    def scale(*flags):
        model = build_run(replace(resolve(parse([*flags])), query=1), (28, 28, 1))
        assert model.learner.deep_kernel.hyperparameters()["log_scale"] == np.float32(
            np.log(model.learner.deep_kernel.kernel.prior_scale)
        )
        return model.learner.deep_kernel.kernel.prior_scale

    assert scale() == 30.0 and scale("--likelihood", "gaussian") == defaults.PRIOR_SCALE["gaussian"] < 30.0
    assert scale("--likelihood", "gaussian", "--set", "kernel.prior_scale=7") == 7.0
    stored = resolve(parse(["--likelihood", "gaussian"])).to_json()
    del stored["settings"]["kernel.prior_scale"]
    assert RunConfig.from_json(stored).settings["kernel.prior_scale"] == 30.0  # as when there was one for all


@pytest.mark.parametrize("kind", REGISTRIES)
def test_unknown_names_list_the_known_ones(kind):
    message = refused(f"--{kind}", "foo")
    assert message == f"expected a known {kind}, got 'foo'; known: {', '.join(REGISTRIES[kind])}"


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--foo"], "unrecognized arguments: --foo; try --help"),
        (["--way", "many"], "argument --way: invalid int value: 'many'; try --help"),
        (["--episodes", "0"], "argument --episodes: expected a whole number from 1, or auto, got '0'; try --help"),
        (["--query", "-3"], "argument --query: expected a whole number from 1, or auto, got '-3'; try --help"),
        (["--tasks-per-step", "0"], "--tasks-per-step must be at least 1, got 0"),
        (["--seed", "-1"], "argument --seed: expected a whole number from 0, got '-1'; try --help"),
        (
            ["--seed", str(2**63)],
            "argument --seed: expected a number of at most 4294967295, got 9223372036854775808; try --help",
        ),
        (["--set", "rho=1"], "expected --set group.name=value, got 'rho=1'; e.g. --set inference.rho=0.5"),
        (
            ["--set", "foo.rho=1"],
            "--set foo.rho: expected one of the groups inference, likelihood, kernel, backbone, trainer, got 'foo'",
        ),
        (
            ["--set", "inference.foo=1"],
            f"--set inference.foo: no such setting; known: {CVI_SETTINGS}",
        ),
        (
            ["--likelihood", "gaussian", "--set", "inference.rho=1"],
            "--set inference.rho: no such setting; known: none for this choice",
        ),
        (["--set", "inference.rho=fast"], "--set inference.rho: expected a number or none, got 'fast' (default None)"),
        (["--set", "backbone.width=1.5"], "--set backbone.width: expected a whole number, got 1.5 (default 64)"),
        (["--set", "trainer.schedule=linear"], "trainer.schedule must be one of constant, cosine, got 'linear'"),
        (["--set", "trainer.optimiser=lbfgs"], "trainer.optimiser must be one of adam, adamw, sgd, got 'lbfgs'"),
        (["--set", "trainer.learning_rate=-1"], "trainer.learning_rate must be positive, got -1.0"),
        (["--set", "trainer.steps_per_dispatch=-1"], "trainer.steps_per_dispatch must be at least 0, got -1"),
        (
            ["--set", "inference.expectation=3"],
            "--set inference.expectation: MonteCarlo needs an even number of draws (they come in antithetic pairs), "
            "got 3",
        ),
    ],
)
def test_bad_flags_are_refused_in_one_line(flags, message):
    assert refused(*flags) == message


@pytest.mark.parametrize(
    "setting, message",
    [
        ("backbone.width=0", "between 1 and 1024, got 0"),
        ("backbone.width=-1", "between 1 and 1024, got -1"),
        ("backbone.width=1000000", "between 1 and 1024, got 1000000"),
        ("kernel.log_scale=1e6", "between -40 and 40, got 1000000"),
        ("kernel.log_lengthscale=-1000", "between -40 and 40, got -1000"),
        ("kernel.prior_scale=1e6", "between 1e-05 and 100000, got 1000000"),
        ("kernel.prior_scale=inf", "got inf"),
        ("kernel.prior_scale=nan", "got nan"),
        ("trainer.learning_rate=inf", "at most 1000, got inf"),
        ("trainer.learning_rate=nan", "got nan"),
        ("trainer.clip_norm=nan", "got nan"),
        ("trainer.log_every=1000000000000", "got 1000000000000"),
        (f"trainer.clip_norm={'9' * 400}", "got 999"),
        (f"trainer.clip_norm={'9' * 5000}", "got inf"),
        ("inference.rho=nan", "got nan"),
        ("inference.expectation=1000000000000", "at most 1e"),
        ("likelihood.prediction_draws=0", "between 2 and"),
        ("backbone.momentum=2", "between 0 and 1, got 2"),
    ],
)
def test_settings_that_no_computer_can_work_with_are_refused_before_anything_is_written(setting, message, tmp_path):
    said = refused("--set", setting, "--run-dir", str(tmp_path / "run"))
    assert said.startswith(f"--set {setting.partition('=')[0]}: expected a number") and message in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("seed", [2**32, 2**63 - 1])
def test_a_seed_of_which_jax_takes_a_part_is_refused(seed):
    assert f"at most 4294967295, got {seed}" in refused("--seed", str(seed))
    assert resolve(parse(["--seed", str(2**32 - 1)])).seed == 2**32 - 1


def test_settings_reach_the_constructors():
    flags = ["--likelihood", "gaussian", "--kernel", "poly1", "--backbone", "mlp"]
    settings = ["likelihood.noise=0.5", "kernel.log_offset=1", "kernel.degree=2", "backbone.width=7"]
    config = replace(resolve(parse([*flags, "--set", *settings])), query=1)
    model = build_run(config, (4, 4, 1))
    assert float(model.learner.likelihood.noise) == pytest.approx(0.5)
    assert float(model.learner.deep_kernel.hyperparameters()["log_offset"]) == 1.0
    assert model.learner.deep_kernel.kernel.degree == 2
    assert model.learner.deep_kernel.backbone.features == 7


def test_an_expectation_rule_is_named_by_its_number_of_draws():
    targets = override_targets(resolve(RunConfig()))["inference"]
    assert converted({"expectation": 64, "rho": 1}, targets) == {"expectation": MonteCarlo(64), "rho": 1.0}
    assert converted({"expectation": "exact", "rho": None}, targets) == {"expectation": Exact(), "rho": None}


def test_none_is_a_word_where_words_are_expected():
    config = resolve(parse(["--dataset", "omniglot-emnist", "--set", "trainer.augment=none", "inference.rho=none"]))
    assert config.settings["trainer.augment"] == "none" and config.overrides("inference")["rho"] is None


@pytest.mark.parametrize(
    "text, value", [("a.b=1", 1), ("a.b=1e-3", 1e-3), ("a.b=true", True), ("a.b=None", None), ("a.b=x=y", "x=y")]
)
def test_values_are_read_as_numbers_and_words(text, value):
    name, parsed = parse_override(text)
    assert name == "a.b" and parsed == value and type(parsed) is type(value)


def test_network_and_hyper_parameters_have_their_own_rates():
    config = resolve(
        parse(["--set", "trainer.learning_rate=0.5", "trainer.kernel_learning_rate=0.1", "trainer.schedule=constant"])
    )
    optimiser = optimisation.build_optimiser(config)
    deep_kernel = {"backbone": {"kernel": 1.0}, "hyper": {"log_scale": 1.0}, "norm": {"scale": 1.0}}
    params = {"network$params": {"deep_kernel": deep_kernel, "likelihood_parameters": {"log_noise": 1.0}}}
    params = jax.tree.map(jnp.asarray, params)
    updates, _ = optimiser.update(params, optimiser.init(params), params)
    moved = optax.apply_updates(params, updates)
    moved = moved["network$params"]
    assert moved["likelihood_parameters"]["log_noise"] == pytest.approx(0.9, abs=1e-5)
    moved = moved["deep_kernel"]
    assert moved["hyper"]["log_scale"] == pytest.approx(0.9, abs=1e-5)
    assert moved["backbone"]["kernel"] == moved["norm"]["scale"] == pytest.approx(0.5, abs=1e-5)


@pytest.mark.parametrize("name, moved", [("adam", 0.5), ("adamw", 0.5 + 0.5 * 1e-4), ("sgd", 0.5 * 1.9)])
def test_the_optimiser_is_that_of_the_network_alone(name, moved):
    settings = {"trainer.learning_rate": 0.5, "trainer.kernel_learning_rate": 0.1, "trainer.schedule": "constant"}
    config = resolve(RunConfig(settings={**settings, "trainer.optimiser": name}))
    optimiser = optimisation.build_optimiser(config)
    params = {"backbone": jnp.ones(()), "hyper": jnp.ones(())}
    updates, _ = optimiser.update(params, optimiser.init(params), params)
    assert updates["backbone"] == pytest.approx(-moved, abs=1e-5)
    assert updates["hyper"] == pytest.approx(-0.1, abs=1e-5)


@pytest.mark.parametrize("name", ["optimiser", "schedule"])
def test_an_optimiser_of_ones_own_that_is_none_is_one_line(name, monkeypatch):
    registry = {"optimiser": OPTIMISERS, "schedule": SCHEDULES}[name]
    for entry, reason in ((5, "expected optax .*, got TypeError"), (lambda *_: None, "expected .* mine.*, got ")):
        monkeypatch.setitem(registry, "mine", entry)
        with pytest.raises(ConfigError, match=reason) as error:
            resolve(RunConfig(settings={f"trainer.{name}": "mine"}))
        assert "\n" not in str(error.value)


def test_one_long_gradient_does_not_stop_the_steps_after_it():
    config = resolve(parse(["--set", "trainer.schedule=constant", "trainer.learning_rate=1.0"]))
    optimiser = optimisation.build_optimiser(config)
    params = {"w": jnp.ones(2)}
    state, sizes = optimiser.init(params), []
    for length in [1.0] * 50 + [1e4] + [1.0] * 50:
        updates, state = optimiser.update({"w": jnp.full(2, length)}, state, params)
        sizes.append(-float(updates["w"][0]))
    assert sizes[49] == pytest.approx(1.0, abs=1e-3)  # a gradient of this length is left as it is
    assert min(sizes) > 0.3 and max(sizes) < 5


def test_the_cosine_schedule_ends_at_zero_after_the_last_step():
    config = resolve(parse(["--set", "trainer.schedule=cosine", "--episodes", "4"]))
    optimiser = optimisation.build_optimiser(config)
    params = {"w": jnp.ones(())}
    state, sizes = optimiser.init(params), []
    for _ in range(5):
        updates, state = optimiser.update(params, state, params)
        sizes.append(-float(updates["w"]))
    assert sizes == sorted(sizes, reverse=True) and sizes[3] > 0
    assert sizes[4] == pytest.approx(0.0, abs=1e-9)


def test_a_path_of_images_is_kept_from_the_root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert dataset_name("folder-28:letters/mine") == f"folder-28:{tmp_path / 'letters' / 'mine'}"
    assert dataset_name("flowers102-32") == "flowers102-32" and dataset_name("folder:") == "folder:"
    config = resolve(RunConfig(dataset=dataset_name("folder-28:letters/mine.1")))
    assert config.run_dir == "runs/folder-28-mine-softmax-cvi-5way-1shot-0"
