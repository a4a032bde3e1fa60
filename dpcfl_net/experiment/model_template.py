"""Layout of a job's model, and checks that the gradient engines of this machine can train it."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.plugins import is_plugin
from dpcfl_net.core.plugins import load as load_function
from dpcfl_net.core.signed_settings import ModelTemplate
from dpcfl_net.data import cache
from dpcfl_net.data.datasets import Images
from dpcfl_net.experiment.config_schema import Config
from dpcfl_net.privacy.accounting.cache import cached
from dpcfl_net.training.worker_settings import as_in_a_worker

LARGE = 1e30  # a feature may be as large; far below the largest float32


def model_template(name: str, images: Images, seed: int, *, by_record: bool = True, batch_size: int = 32) -> ModelTemplate:
    """Return the fixed layout of a model that the engines can train.

    Args:
        name: Name of the model, as for `models.build`.
        images: Data set that the model is for.
        seed: Seed of the initial values.
        by_record: True if DP-SGD trains the model (else plain SGD).
        batch_size: Expected batch, for the check of a plugin model.

    Returns:
        Name, shapes and public seed of the model.

    Raises:
        ConfigError: If the engine cannot train the model.
    """
    spec: dict[str, Any] = {
        "model": name,
        "input_shape": images.input_shape,
        "classes": images.classes,
        "task": images.task,
        "by_record": by_record,
        "batch_size": batch_size,
    }
    from dpcfl_net.training import models

    plain = models.convolutional_layout(name, tuple(images.input_shape), images.classes)
    if is_plugin(name):
        layout = _layout(**spec, span=record_span(images))
    elif plain is not None and images.task == "classification":  # every engine trains these
        layout = [(key, shape) for key, shape in plain]
    else:  # cached per host, so that torch need not be loaded
        folder = Path(models.__file__).parent
        source = [version("torch"), *(hashlib.sha256((folder / file).read_bytes()).hexdigest() for file in models.FILES)]
        layout = cached(cache.folder() / "models", {**spec, "source": source}, lambda: _layout(**spec))
    return ModelTemplate(
        name=name, task=images.task, input_shape=list(images.input_shape), classes=images.classes,
        layout=[(key, shape) for key, shape in layout], parameters=sum(math.prod(shape) for _, shape in layout),
        initial_seed=seed,
    )  # fmt: skip


def record_span(images: Images) -> tuple[float, float]:
    """Return the smallest and largest number that a record may hold, as a model gets it; of features, large finite ones.

    Args:
        images: The data set.
    """
    ends = (0.0, 1.0) if images.train_x.dtype == np.uint8 else (-LARGE, LARGE)
    low, high = ((end - images.mean) / images.std for end in ends)
    return max(low, -LARGE), min(high, LARGE)


@as_in_a_worker()
def check_precision(config: Config, images: Images) -> None:
    """Check that this processor and the model's engine have local.precision.

    Args:
        config: The configuration.
        images: Data set that the model is for.

    Raises:
        ConfigError: If one of them lacks it.
    """
    from dpcfl_net.training import models
    from dpcfl_net.training.dpsgd import Trainer

    local = config.local
    module = models.build(config.model.name, images.input_shape, images.classes)
    Trainer(
        module, clip=local.clip, learning_rate=local.lr, batch_size=local.batch_size, precision=local.precision,
        input_shape=tuple(images.input_shape),
    )  # fmt: skip


@as_in_a_worker()
def _layout(
    model: str, input_shape: tuple[int, ...], classes: int, task: str, by_record: bool, batch_size: int,
    span: tuple[float, float] | None = None,
) -> list[tuple[str, list[int]]]:  # fmt: skip
    """Name and shape of each parameter; ConfigError as `model_template`."""
    from dpcfl_net.training import models
    from dpcfl_net.training.dpsgd import Evaluator, Trainer

    module = models.skeleton(model, input_shape, classes)  # the values are not read: 45 MB of a ResNet-18
    try:
        if is_plugin(model):
            _check_own_model(model, input_shape, classes, by_record, batch_size, span)
        elif by_record:
            Trainer(module, clip=1.0, learning_rate=0.1, batch_size=batch_size, task=task)
        else:
            Evaluator(module, task)
    except ConfigError as error:
        raise ConfigError([f"model.name is {model!r}: {problem}" for problem in error.problems]) from error
    return [(key, list(shape)) for key, shape in models.layout(module)]


# Functions whose model passed in this process: a job checks its model twice, a sweep many times.
_passed: dict[tuple[Any, ...], Callable[..., Any]] = {}


def _check_own_model(
    name: str, input_shape: tuple[int, ...], classes: int, by_record: bool, batch_size: int, span: tuple[float, float] | None
) -> None:
    import torch

    from dpcfl_net.training import model_check, models

    function = load_function("model.name", name)
    key = (id(function), input_shape, classes, by_record, batch_size, span)
    if _passed.get(key) is function:
        return
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = models.build(name, input_shape, classes)
    model_check.check(module, input_shape, classes, by_record, batch_size, span=span)
    # Every process draws the initial values independently.
    first, second = (models.initial(name, input_shape, classes, 0) for _ in range(2))
    if not np.array_equal(first, second):
        raise ConfigError(
            "called twice under one torch seed it gives different parameters: draw random numbers with torch only"
        )
    _passed[key] = function
