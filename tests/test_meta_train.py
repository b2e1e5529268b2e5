"""meta_train.py: one tiny run from start to table, and everything that it must refuse."""

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_omniglot

from fewshot import tasks
from fewshot.runners import meta_train
from fewshot.runners.cli.flags import parse
from fewshot.training import checkpoint, run_directory, shape_temperature
from fewshot.training import loop as loop_module
from fewshot.training.class_problem import ClassProblem
from fewshot.training.configuration import RunConfig, resolve
from fewshot.training.curve_problem import CurveProblem
from fewshot.training.interruption import AT_ONCE
from fewshot.training.overrides import ConfigError
from fewshot.training.run import load_run
from fewshot.training.run_directory import RunError

ROWS = ["trained", "trained, raw (temperature 1)", "untrained network", "1-nearest neighbour on pixels"]


def error_line(capfd, *words):
    """What the command prints when it refuses: one line, exit code 2."""
    with pytest.raises(SystemExit) as exit_info:
        meta_train.command_line([str(word) for word in words])
    printed = capfd.readouterr()
    assert exit_info.value.code == 2
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    return printed.err.removeprefix("error: ").removesuffix("\n")


def contents(folder):
    """All files but the temperatures of other shapes, which are kept once they have been fitted."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != shape_temperature.KEPT)
    return {path.relative_to(folder): path.read_bytes() for path in files}


def test_a_run_ends_with_a_table_of_all_models(tiny_run):
    assert tiny_run.result["run_dir"] == str(tiny_run.path)
    assert list(tiny_run.result["test"]) == ROWS
    for row in ROWS:
        assert f"\n{row}  " in tiny_run.printed
        assert 0 <= tiny_run.result["test"][row]["accuracy"] <= 1
    trained, raw = (tiny_run.result["test"][row] for row in ROWS[:2])
    assert trained["accuracy"] == raw["accuracy"] and trained["nll"] != raw["nll"]
    assert trained.keys() >= {"accuracy_ci95", "nll", "brier", "ece", "ece_floor"}


def test_choices_and_costs_are_printed_first(tiny_run):
    choices, settings, normalised, costs, progress = tiny_run.printed.splitlines()[:5]
    assert choices.startswith(
        f"{tiny_run.path}: dataset omniglot, learner gaussian-process, likelihood softmax, inference cvi*, "
    )
    assert "way 3, shot 1, query 3, episodes 20," in choices and choices.endswith("(* chosen automatically)")
    assert "trainer.test_episodes=12" in settings
    assert normalised.startswith("Batch norms use the running statistics of training")
    assert costs.startswith("a step takes ") and "of memory: about" in costs
    assert progress.startswith("0/20 episodes") and "validation" in progress


def test_the_first_step_is_not_part_of_the_estimate(monkeypatch):
    """A clock that moves when results are waited for: one second a step, ten for the first."""
    clock, pending, messages = [0.0], [10.0], []

    class Compiled(jax.stages.Compiled):
        def __init__(self):
            pass

        def __call__(self, state, index, sampler):
            pending.append(1.0)
            return state, None

        def memory_analysis(self):
            return None

    def wait(tree):
        clock[0] += sum(pending)
        pending.clear()
        return tree

    monkeypatch.setattr(loop_module.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(loop_module.jax, "block_until_ready", wait)
    loop = SimpleNamespace(
        state={},
        step=0,
        _next_count=lambda: 1,
        _program=lambda count: Compiled(),
        trainer=SimpleNamespace(step=SimpleNamespace(sampler=None)),
        config=SimpleNamespace(steps=50),
        progress=SimpleNamespace(message=messages.append),
    )
    loop_module.Training._estimate(loop)
    assert messages[0].startswith("a step takes 1e+03 ms") and "about 50 s of training" in messages[0]


def test_a_run_is_repeated_but_for_the_flags_that_are_given(tiny_run, tmp_path):
    config, own = parse(["--config", str(Path(tiny_run.path) / "config.json")]), load_run(tiny_run.path).config
    assert config.run_dir is None and resolve(config).to_json() == own.to_json()
    changed = parse(["--config", str(tiny_run.path), "--seed", "7", "--set", "trainer.test_episodes=3"])
    assert changed.seed == 7 and changed.settings == own.settings | {"trainer.test_episodes": 3}
    with pytest.raises(ConfigError, match="expected --config or --resume, got both"):
        parse(["--config", str(tiny_run.path), "--resume"])
    with pytest.raises(ConfigError, match=r"to be a run folder or its config.json, got .*metrics.jsonl"):
        parse(["--config", str(Path(tiny_run.path) / "metrics.jsonl")])
    with pytest.raises(RunError, match="no run in"):
        parse(["--config", str(tmp_path)])


@pytest.mark.long
def test_a_finished_run_is_tested_again_and_times_no_step(tiny_run, tiny_data, tmp_path, capfd):
    shutil.copytree(tiny_run.path, tmp_path / "copy")
    assert meta_train.command_line(["--resume", "--run-dir", str(tmp_path / "copy"), "--data-root", tiny_data]) == 0
    printed = capfd.readouterr().out
    assert "resumed after step 20 of 20" in printed and "a step takes" not in printed
    assert printed.endswith(tiny_run.printed[tiny_run.printed.index("\nTest on") :])


def test_the_run_folder_holds_everything(tiny_run):
    run = run_directory.load(tiny_run.path)
    assert run.config["kernel"] == "rbf" and "kernel" in run.config["chosen"]
    assert run.config["image_shape"] == [16, 16, 1]
    assert checkpoint.steps(run.checkpoints) == [18, 20]
    assert {path.name for path in tiny_run.path.iterdir()} - {shape_temperature.KEPT} == {
        "config.json",
        "metrics.jsonl",
        "checkpoints",
        "weights.safetensors",
        ".lock",
    }


def test_metrics_tell_the_course_of_training(tiny_run):
    records = run_directory.load(tiny_run.path).read_metrics()
    assert [record["step"] for record in records] == [0, *range(2, 21, 2)]
    assert [record["step"] for record in records if "validation_accuracy" in record] == [0, 6, 12, 18, 20]
    for record in records[1:]:
        assert record["loss"] == pytest.approx(-record["objective"] - record["log_prior"], rel=1e-5)
        assert record["scale"] == pytest.approx(math.exp(record["log_scale"]))
        assert record["failures"] == 0 and record["residual"] >= 0 and record["episodes_per_second"] > 0
    centre = load_run(tiny_run.path).learner.deep_kernel.kernel.priors()["log_scale"].loc
    assert records[-1]["prior_pull"] * (records[-1]["log_scale"] - centre) < 0
    assert records[-1]["seconds"] > records[1]["seconds"] > 0


def test_the_best_weights_are_exported_with_their_temperature(tiny_run):
    records = [record for record in run_directory.load(tiny_run.path).read_metrics() if "validation_accuracy" in record]
    best = max(records, key=lambda record: (record["validation_accuracy"], -record["validation_nll"]))
    model = load_run(tiny_run.path)
    assert model.temperature == best["temperature"] == tiny_run.result["temperature"] != 1
    assert records[0]["step"] == 0 and records[0]["temperature"] == 1  # nothing is learned yet
    assert float(model.learner.deep_kernel.hyperparameters()["log_scale"]) == best["log_scale"]


def test_of_weights_equally_accurate_those_with_the_least_nll_are_best():
    """Where little is learned, a kernel on features of one's own say, accuracy may not move at all."""
    rows = [(0.4, 1.5), (0.4, 1.4), (0.4, 1.45), (0.3, 0.1)]
    logged = [{"validation_accuracy": accuracy, "validation_nll": nll} for accuracy, nll in rows]
    logged.append({"validation_accuracy": 0.4})  # of an old run
    best = max(range(5), key=lambda i: ClassProblem.selection.value(logged[i]))
    assert best == 1
    assert CurveProblem.selection.value(logged[3]) > CurveProblem.selection.value(logged[1])


def test_validation_needs_one_program_each(tiny_run):
    assert tiny_run.programs <= 4  # one that embeds and one that solves, for the learner and for the nearest neighbour


@pytest.mark.long
def test_another_likelihood_and_objective_train_too(tiny_data, tmp_path):
    settings = tiny_omniglot.SETTINGS | {"trainer.learning_rate": 0.01}
    flags = tiny_omniglot.FLAGS | {"backbone": "mlp", "episodes": 7, "tasks_per_step": 2, "settings": settings}
    config = RunConfig(
        **flags, likelihood="gaussian", objective="predictive", run_dir=str(tmp_path / "run"), data_root=tiny_data
    )
    result = meta_train.main(config)
    records = run_directory.load(tmp_path / "run").read_metrics()
    assert [(record["step"], record["episodes"]) for record in records] == [(0, 0), (2, 4), (4, 8)]
    assert records[0]["log_noise"] != records[-1]["log_noise"]  # it is learned
    assert float(load_run(tmp_path / "run").learner.likelihood.noise) == pytest.approx(
        math.exp(records[-1]["log_noise"]), rel=0.1
    )
    assert result["failures"] == {}


@pytest.mark.long
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(tiny_data, tmp_path, capfd):
    settings = tiny_omniglot.SETTINGS | {"trainer.kernel_learning_rate": 1000.0}
    cheap = {"backbone": "mlp", "likelihood": "gaussian"}  # whose programs another test has compiled
    flags = tiny_omniglot.arguments(**cheap, settings=settings, run_dir=tmp_path / "run", data_root=tiny_data)
    message = error_line(capfd, *flags)
    assert message.startswith("the loss of step 2 is nan (1 tasks failed in it); the checkpoint of step 0 is kept;")
    assert message.endswith("; try a smaller trainer.learning_rate, or try more --inner-steps")
    learner = load_run(tmp_path / "run").learner
    assert loop_module.advice(1, learner).startswith(
        "no step was taken yet, so look at what --set"
    )  # no rate has been used
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == [0]
    assert [record["step"] for record in run_directory.load(tmp_path / "run").read_metrics()] == [0]
    assert np.isfinite(load_run(tmp_path / "run").temperature)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"kernel": "foo"}, "expected a known kernel, got 'foo'"),
        ({"dataset": "foo"}, "expected the name of a data set, got 'foo'; try one of glyphs, omniglot"),
        (
            {"objective": "evidence", "hypergradient": "unroll"},
            "inference cvi with objective evidence and hyper-gradient unroll is refused: log Z gives a gradient",
        ),
        ({"way": 300}, "expected at least 300 classes for 300-way tasks, got 200"),
        ({"way": 20}, "expected at least 20 classes for 20-way tasks, got 10"),  # validation
        ({"query": 20}, "expected at least 21 images in every class (shot 1 + query 20), got 20 in the smallest"),
        ({"shot": 20}, "expected at least 23 images"),
        ({"data_root": "/no/such/folder"}, "expected the data root to be a folder, got '/no/such/folder'; try"),
        ({"settings": {"backbone.foo": 1}}, "--set backbone.foo: no such setting; known: backbone.width"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(changes, message, tiny_data, tmp_path, capfd):
    flags = tiny_omniglot.arguments(**{"data_root": tiny_data, "run_dir": tmp_path / "run", **changes})
    assert error_line(capfd, *flags).startswith(message)
    assert not (tmp_path / "run").exists()


def test_images_too_small_for_the_network_are_refused(tmp_path, capfd):
    tiny_omniglot.write(tmp_path, size=8, images=5)
    flags = tiny_omniglot.arguments(data_root=tmp_path, run_dir=tmp_path / "run")
    assert error_line(capfd, *flags).startswith("Conv4 expects images of at least 16x16, got 8x8")


def test_damaged_data_are_refused(tmp_path, capfd):
    file = tiny_omniglot.write(tmp_path) / tiny_omniglot.FILE
    file.write_bytes(file.read_bytes()[:1000])
    flags = tiny_omniglot.arguments(data_root=tmp_path, run_dir=tmp_path / "run")
    assert str(file) in error_line(capfd, *flags)


@pytest.mark.parametrize("value, got", [(np.nan, "nan to nan"), (2.0, "0.0 to 2.0")])
def test_nan_pixels_are_refused(value, got, tiny_data, tmp_path, capfd, monkeypatch):
    def load(root):
        splits = tasks.omniglot.load(root)
        images = (splits.validation.images / 255).astype(jnp.float32).at[3, 2, 1].set(value)
        return splits._replace(validation=splits.validation._replace(images=images.at[0, 0, 0].set(0.0)))

    monkeypatch.setitem(tasks.DATASETS, "omniglot", load)
    flags = tiny_omniglot.arguments(data_root=tiny_data, run_dir=tmp_path / "run")
    message = error_line(capfd, *flags)
    expected = "expected the validation images of omniglot within [0, 1], got values from"
    assert message == f"{expected} {got}; remove NaN and rescale them"


def test_an_existing_run_is_neither_overwritten_nor_mixed_with_other_flags(tiny_run, tiny_data, capfd):
    before = contents(tiny_run.path)
    where = ["--run-dir", tiny_run.path, "--data-root", tiny_data]
    message = error_line(capfd, *tiny_omniglot.arguments(), *where)
    assert (
        message == f"run folder {tiny_run.path} already exists; continue it with --resume or choose another --run-dir"
    )
    message = error_line(capfd, "--shot", 5, "--resume", *where)
    assert message.startswith(f"run folder {tiny_run.path} was trained with shot 1, got 5; resume it without that")
    message = error_line(capfd, "--set", "backbone.width=8", "--resume", *where)
    assert "was trained with backbone.width 4, got 8" in message
    assert contents(tiny_run.path) == before


def test_a_seed_of_zero_is_a_seed_when_a_run_is_resumed(tiny_run, tmp_path, capfd):
    stored = {**json.loads((tiny_run.path / "config.json").read_text()), "seed": 3}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    message = error_line(capfd, "--resume", "--run-dir", tmp_path, "--query", "auto", "--seed", 0)
    assert "was trained with seed 3, got 0" in message


def test_there_must_be_a_run_to_resume(tmp_path, capfd):
    message = error_line(capfd, "--resume", "--run-dir", tmp_path / "none")
    assert message.startswith(f"no run in {tmp_path / 'none'}: expected ")


def test_a_truncated_checkpoint_is_named_and_nothing_is_changed(tiny_run, tiny_data, tmp_path, capfd):
    copy = tmp_path / "copy"
    shutil.copytree(tiny_run.path, copy)
    data = max(
        (path for path in (copy / "checkpoints" / "20").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size
    )
    data.write_bytes(data.read_bytes()[:-7])
    before = contents(copy)
    message = error_line(capfd, "--resume", "--run-dir", copy, "--data-root", tiny_data)
    assert message.startswith(f"damaged checkpoint: {data} differs from what was saved; remove ")
    assert message.endswith("to continue from step 18")
    assert contents(copy) == before


def test_metrics_that_are_gone_are_an_error_in_one_line(tiny_run, tiny_data, tmp_path, capfd):
    copy = tmp_path / "copy"
    shutil.copytree(tiny_run.path, copy)
    records = [record for record in run_directory.load(copy).read_metrics() if record["step"] < 10]
    (copy / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    message = error_line(capfd, "--resume", "--run-dir", copy, "--data-root", tiny_data)
    assert "ends at step 8, the newest checkpoint is of step 20" in message


def test_ctrl_c_before_training_prints_no_traceback(monkeypatch, capfd):
    monkeypatch.setattr(meta_train, "main", lambda config: (_ for _ in ()).throw(KeyboardInterrupt))
    assert meta_train.command_line([]) == 130
    assert capfd.readouterr().err == f"{AT_ONCE}\n"
