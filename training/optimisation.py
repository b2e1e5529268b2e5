"""The outer loop of a configuration: its sampler and its optimiser."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Key, PyTree

from fewshot.inference.outer.devices import task_mesh
from fewshot.inference.outer.svi import Sampler, Trainer, make_trainer
from fewshot.learners import TrainsOn
from fewshot.tasks import Dataset, LabelledImages, Task, sample_batch, sample_task
from fewshot.tasks.augmentation import AUGMENTATIONS, augment
from fewshot.training.configuration import RunConfig
from fewshot.training.data import training_classes
from fewshot.training.optimisers import SCHEDULES, optimiser_of_network
from fewshot.training.overrides import ConfigError
from fewshot.training.run import Run, keys


def build_trainer(run: Run, dataset: Dataset) -> Trainer:
    """The outer loop on a training split, less the classes that are held out of it."""
    return trainer_on(run, jax.tree_util.Partial(sampler(run), training_classes(run.config, dataset)))


def trainer_on(run: Run, draw: Sampler) -> Trainer:
    """The outer loop on what `draw` draws from a key."""
    config = run.config
    return make_trainer(
        keys(config.seed)[1],
        run.learner,
        draw,
        build_optimiser(config),
        tasks_per_step=config.tasks_per_step,
        mesh=mesh(config),
    )


def sampler(run: Run) -> Callable[[Dataset, Key[Array, ""]], Task | LabelledImages]:
    """What the learner trains on, one from each key, with its images changed as `trainer.augment` says."""
    config, augmentation = run.config, AUGMENTATIONS[run.config.trainer.augment]

    def draw_task(images: Dataset, key: Key[Array, ""]) -> Task:
        task = sample_task(key, images, config.way, config.shot, config.query)
        # One call for all images of the task: every image is changed by its own key. `sample_task` splits the key in
        # two, which are fold_in(key, 0) and fold_in(key, 1).
        changed = augment(jax.random.fold_in(key, 2), jnp.concatenate([task.x_support, task.x_query]), augmentation)
        shots = len(task.x_support)
        return Task(changed[:shots], task.y_support, changed[shots:], task.y_query)

    def draw_batch(images: Dataset, key: Key[Array, ""]) -> LabelledImages:
        batch = sample_batch(key, images, run.learner.batch_size)
        return batch._replace(x=augment(jax.random.fold_in(key, 2), batch.x, augmentation))

    return draw_batch if run.learner.traits.trains_on is TrainsOn.BATCHES else draw_task


def mesh(config: RunConfig) -> Mesh | None:
    """The devices that share the tasks of a step; None for one. Raises ConfigError unless they divide the tasks."""
    try:
        return task_mesh(config.tasks_per_step)
    except ValueError as error:
        raise ConfigError(f"--tasks-per-step: {error}") from error


def build_optimiser(config: RunConfig) -> optax.GradientTransformation:
    """That of the settings for the network, and Adam for the hyper-parameters of kernel and likelihood.

    The few hyper-parameters have priors and a rate of their own; decay of weights would be one more prior.
    """
    settings = config.trainer
    network = optimiser_of_network(settings.optimiser, settings.schedule, settings.learning_rate, config.steps)
    kernel = optax.adam(SCHEDULES[settings.schedule](settings.kernel_learning_rate, config.steps))
    return clipped(optax.partition({"network": network, "kernel": kernel}, _labels), settings.clip_norm)


def clipped(optimiser: optax.GradientTransformation, norm: float) -> optax.GradientTransformation:
    """The optimiser, given gradients of at most that global norm; its state is the same.

    One gradient that is a thousand times too long, as estimates from draws can be, would make Adam's steps a thousandth
    of what they were for a thousand steps.
    """
    clip = optax.clip_by_global_norm(norm)

    def update(gradient: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        return optimiser.update(clip.update(gradient, optax.EmptyState())[0], state, params)

    return optax.GradientTransformation(optimiser.init, update)


def _labels(params: PyTree) -> PyTree:
    """The word kernel for the hyper-parameters of kernel and likelihood, network for all else."""

    def label(path: tuple, leaf: PyTree) -> str:
        del leaf
        names = {getattr(entry, "key", None) for entry in path}
        return "kernel" if names & {"hyper", "likelihood_parameters"} else "network"

    return jax.tree_util.tree_map_with_path(label, params)
