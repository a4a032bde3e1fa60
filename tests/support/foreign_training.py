"""Private training as another project would write it, right and with one mistake each; adapters of `dpcfl conformance`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

RATE, STEPS, CLIP, LEARNING_RATE = 0.1, 60, 2.0, 0.5
Batches = Callable[[np.random.Generator, int, int], np.ndarray]


def poisson(rng: np.random.Generator, records: int, steps: int) -> np.ndarray:
    return rng.random((steps, records)) < RATE


def denser(rng: np.random.Generator, records: int, steps: int) -> np.ndarray:
    return rng.random((steps, records)) < 1.5 * RATE


def fixed(rng: np.random.Generator, records: int, steps: int) -> np.ndarray:
    return rng.random((steps, records)).argsort(1) < round(RATE * records)


def shuffled(rng: np.random.Generator, records: int, steps: int) -> np.ndarray:
    epoch = round(1 / RATE)
    orders = [rng.permutation(records).reshape(epoch, -1) for _ in range(-(-steps // epoch))]
    batches = np.zeros((steps, records), dtype=bool)
    for step, batch in enumerate(np.concatenate(orders)[:steps]):
        batches[step, batch] = True
    return batches


def allocated(rng: np.random.Generator, records: int, steps: int) -> np.ndarray:
    epoch = round(1 / RATE)
    places = rng.integers(epoch, size=(-(-steps // epoch), records))
    return (places[:, None, :] == np.arange(epoch)[:, None]).reshape(-1, records)[:steps]


def allocated_once(rng: np.random.Generator, records: int, steps: int) -> np.ndarray:
    epoch = round(1 / RATE)
    return np.tile(allocated(rng, records, epoch), (-(-steps // epoch), 1))[:steps]


def repeated(rng: np.random.Generator, records: int, steps: int) -> np.ndarray:
    return np.repeat(poisson(rng, records, 1), steps, axis=0)


def known(rng: np.random.Generator, records: int, steps: int) -> np.ndarray:
    return poisson(np.random.default_rng(7), records, steps)


def slices(rng: np.random.Generator, records: int, steps: int) -> np.ndarray:
    starts = rng.integers(0, records, (steps, 1))
    return (np.arange(records) - starts) % records < round(RATE * records)


def clipped(gradients: np.ndarray) -> np.ndarray:
    norms = np.linalg.norm(gradients, axis=1, keepdims=True)
    return gradients * np.minimum(1.0, CLIP / np.maximum(norms, 1e-30))


def clipped_by_coordinate(gradients: np.ndarray) -> np.ndarray:
    return np.clip(gradients, -CLIP, CLIP)


def clipped_by_small_coordinate(gradients: np.ndarray) -> np.ndarray:
    """Less than the clip norm on 25 coordinates or fewer."""
    return np.clip(gradients, -CLIP / 5, CLIP / 5)


def clipped_by_tensor(gradients: np.ndarray) -> np.ndarray:
    """The first and the second half of the coordinates each have the clip norm."""
    middle = gradients.shape[1] // 2
    return np.concatenate([clipped(gradients[:, :middle]), clipped(gradients[:, middle:])], axis=1)


def normal(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return rng.normal(size=shape)


def laplace(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return rng.laplace(size=shape) / np.sqrt(2)


def same_for_all_coordinates(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return np.broadcast_to(rng.normal(size=(shape[0], 1)), shape)


def same_at_each_step(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return np.broadcast_to(rng.normal(size=(1, shape[1])), shape)


def none_on_the_last_coordinate(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return normal(rng, shape) * (np.arange(shape[1]) < shape[1] - 1)


def none_on_the_first_coordinate(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return normal(rng, shape) * (np.arange(shape[1]) > 0)


def none_at_the_last_step(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return normal(rng, shape) * (np.arange(shape[0]) < shape[0] - 1)[:, None]


def cut_off(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    return normal(rng, shape).clip(-3, 3)


def program(
    batches: Batches = poisson,
    clip: Callable = clipped,
    noise: Callable = normal,
    *,
    scale: float = 1.0,
    seed: int | None = None,
) -> Callable[..., dict[str, np.ndarray]]:
    """A training function with the option `noise_multiplier`; a seed of its own is fixed in every run."""

    def train(records: np.ndarray, noise_multiplier: float = 1.0) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(SEEDS.integers(2**31) if seed is None else seed)
        sums = batches(rng, len(records), STEPS).astype(float) @ clip(records.astype(float))
        sums += noise(rng, sums.shape) * noise_multiplier * scale * CLIP
        return {"weight": np.cumsum(-LEARNING_RATE * sums / (RATE * len(records)), axis=0).astype(np.float32)}

    return train


SEEDS = np.random.default_rng(5)  # the tests are repeatable, and runs are still different

sound = program()
missing_clip = program(clip=lambda gradients: gradients)
coordinate_clip = program(clip=clipped_by_coordinate)
small_coordinate_clip = program(clip=clipped_by_small_coordinate)
fixed_batches, shuffled_batches, dense_batches = program(fixed), program(shuffled), program(denser)
one_batch, sliced_batches = program(repeated), program(slices)
allocated_batches, allocated_once_batches = program(allocated), program(allocated_once)
little_noise, much_noise = program(scale=0.7), program(scale=1.3)
laplace_noise, shared_noise, stuck_noise = (
    program(noise=laplace),
    program(noise=same_for_all_coordinates),
    program(noise=same_at_each_step),
)
fixed_seed = program(seed=1)
known_batches, tensor_clip = program(known), program(clip=clipped_by_tensor)
bare_bias, bare_first, bare_step, cut_noise = (
    program(noise=none_on_the_last_coordinate),
    program(noise=none_on_the_first_coordinate),
    program(noise=none_at_the_last_step),
    program(noise=cut_off),
)


def noisy_only(records: np.ndarray) -> dict[str, np.ndarray]:
    """Sound, without an option to switch the noise off."""
    return sound(records)


def noisy_missing_clip(records: np.ndarray) -> dict[str, np.ndarray]:
    return missing_clip(records)


def noisy_tensor_clip(records: np.ndarray) -> dict[str, np.ndarray]:
    return tensor_clip(records)


def end_only(records: np.ndarray) -> dict[str, np.ndarray]:
    """Sound; only the parameters after the last step, as two tensors."""
    last = sound(records)["weight"][-1]
    return {"first": last[:7], "rest": last[7:].reshape(1, -1)}


def end_only_fixed(records: np.ndarray) -> dict[str, np.ndarray]:
    return {"weight": fixed_batches(records)["weight"][-1]}


def end_only_much_noise(records: np.ndarray) -> dict[str, np.ndarray]:
    return {"weight": much_noise(records)["weight"][-1]}


def end_only_shuffled(records: np.ndarray) -> dict[str, np.ndarray]:
    return {"weight": shuffled_batches(records)["weight"][-1]}


def end_only_bare_bias(records: np.ndarray) -> dict[str, np.ndarray]:
    return {"weight": bare_bias(records)["weight"][-1]}


def end_only_allocated(records: np.ndarray) -> dict[str, np.ndarray]:
    return {"weight": allocated_batches(records)["weight"][-1]}


def updates(records: np.ndarray, seed: int = 0) -> dict[str, np.ndarray]:
    """Sound; the mean gradient of each step. It draws from the seed that it is given."""
    rng = np.random.default_rng(seed)
    sums = poisson(rng, len(records), STEPS).astype(float) @ clipped(records.astype(float))
    print("a foreign program may print")
    return {"mean": (sums + CLIP * rng.normal(size=sums.shape)) / (RATE * len(records))}


def deaf(records: np.ndarray) -> dict[str, np.ndarray]:
    """Releases noise only."""
    return {"weight": program(clip=np.zeros_like)(records)["weight"]}


def wrong_shape(records: np.ndarray) -> dict[str, Any]:
    return {"weight": np.zeros((3, 4))}


def hidden_part(records: np.ndarray) -> dict[str, Any]:
    """Sound in its real part; the imaginary one releases the records."""
    return {"weight": sound(records)["weight"] + 1j * records.sum(0)}


def raises(records: np.ndarray) -> dict[str, Any]:
    raise RuntimeError("no such layer")


def nothing(records: np.ndarray) -> dict[str, Any]:
    return {}


def not_finite(records: np.ndarray) -> dict[str, Any]:
    return {"weight": np.full(records.shape[1], np.nan)}


def needs_more(records: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    return {"weight": labels}
