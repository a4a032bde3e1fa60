"""What floating-point arithmetic tells a server: overflow, low bits, cancelling norms, ties (scenarios 18, 35, 36, 37)."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, assert_nothing_left, dpcfl, only_run
from records import Images
from scipy import stats
from torch import nn

from dpcfl_net.attacks import nan_oracle
from dpcfl_net.attacks.crafting import overflowing
from dpcfl_net.attacks.nan_probe import train_by_opacus
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.privacy.mechanisms import GRID_BITS
from dpcfl_net.privacy.normal_stream import NormalStream
from dpcfl_net.privacy.slots import DPSGDSlot
from dpcfl_net.results.summary import read_run_job
from dpcfl_net.training import dpsgd_steps, models
from dpcfl_net.training.dpsgd import Evaluator, Trainer
from dpcfl_net.training.models import flatten
from dpcfl_net.training.plain_path import fill

torch.set_num_threads(1)

DIGITS = (1, 8, 8)
KNOWN = Images(256, seed=9).x  # public records of the server


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


# 18


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> dict[str, Path]:
    """Two runs against the same hostile server: clients as they are, and clients that clip as Opacus does."""
    out = tmp_path_factory.mktemp("nan oracle")
    changes = [
        "data.clients=[3]",
        "data.train_per_client=400",
        "local.batch_size=200",
        "rounds=12",
        "runtime.clients_per_worker=3",
        f"privacy.noise_seed={'0a' * 32}",  # fixes who is in which batch; a random seed leaves no update without the record in 3 % of runs
    ]

    def record(name: str) -> Path:
        done = dpcfl("run", ROOT / "configs" / "threats" / f"{name}.yaml", *changes, "--out", out / name)
        assert done.returncode == 0, done.stderr + done.stdout
        return only_run(out / name)

    found = {"ours": record("nan_oracle"), "opacus": record("nan_oracle_opacus")}
    for folder in found.values():
        assert_nothing_left(folder)
    return found


def with_and_without(target: int) -> tuple[Images, Images]:
    """Records with number `target`, and the same with its slot empty: neighbours under zero-out."""
    present, absent = Images(target + 1), Images(target + 1)
    absent.x[target] = torch.nan
    return present, absent


def seen(trainer: Trainer, theta: np.ndarray, data: Images, noise: float, keys: range, direction: np.ndarray) -> np.ndarray:
    """What a server sees of updates under other keys, (4, n): along a direction, norm, largest and middle coordinate."""
    slot, found = DPSGDSlot("train", 1, 1), []
    for number in keys:
        update = (trainer.train(theta, data, slot, noise, key(number))[0] - theta).astype(np.float64)
        assert np.isfinite(update).all()
        found.append([update @ direction, np.linalg.norm(update), np.abs(update).max(), np.median(update)])
    return np.array(found).T


@pytest.mark.scenario(18)
def test_a_record_that_overflows_is_not_seen_in_the_update(recorded, evidence):
    module, target, many = models.build("digits-cnn", DIGITS, 10), 40, 60
    trainer = Trainer(module, clip=1.0, learning_rate=0.5, batch_size=20)
    (present, absent), first = with_and_without(target), models.initial("digits-cnn", DIGITS, 10, 0)
    crafted = overflowing(module, first, present.x[target:], KNOWN)
    assert np.isfinite(crafted).all()
    # Under the same key the very same bits, so under a random one the same distribution.
    slot = DPSGDSlot("train", 0.5, 2)
    for number in range(20):
        updates = [trainer.train(crafted, data, slot, 1.0, key(number))[0] for data in (present, absent)]
        assert np.array_equal(*updates)
        assert np.isfinite(updates[0]).all()
    alone = np.array([target])
    direction = trainer.clipped_sum(first, present, alone)
    worlds = [seen(trainer, crafted, data, 1.0, range(n, n + many), direction) for n, data in ((1000, present), (2000, absent))]
    least = min(stats.ks_2samp(a, b).pvalue for a, b in zip(*worlds, strict=True))
    assert least > 1e-7
    # The same test sees a record that counts, where its noise is small.
    worlds = [seen(trainer, first, data, 0.3, range(n, n + many), direction) for n, data in ((1000, present), (2000, absent))]
    power = min(stats.ks_2samp(a, b).pvalue for a, b in zip(*worlds, strict=True))
    assert power < 1e-7

    facts_of = {name: nan_oracle.attack(run).facts for name, run in recorded.items()}
    for facts in facts_of.values():
        assert facts["updates"] == 36
        assert len(facts["holders"]) == 1
        assert 0 < facts["present"] < 12
    ours, opacus = facts_of["ours"], facts_of["opacus"]
    assert (ours["not_finite"], ours["right"]) == (0, ours["blind"])
    assert (opacus["true_positives"], opacus["false_positives"]) == (opacus["present"], 0)
    assert opacus["right"] == 36 > opacus["blind"]
    evidence.got(
        f"every one of {ours['updates']} recorded updates is finite, {ours['present']} of them with the record: reading tells no more "
        f"than not looking; {2 * many} updates with and without it: same distribution (p {least:.2g})"
    )
    evidence.control(
        f"clients that clip as Opacus 1.6: {opacus['right']} of {opacus['updates']} bits right, {opacus['not_finite']} updates "
        "not finite, exactly those with the record"
    )


def test_opacus_tells_step_by_step_whether_the_record_was_drawn():
    module, target = models.build("digits-cnn", DIGITS, 10), 40
    data, slot = with_and_without(target)[0], DPSGDSlot("train", 0.5, 1)
    crafted = overflowing(module, models.initial("digits-cnn", DIGITS, 10, 0), data.x[target:], KNOWN)
    told, truth = [], []
    for number in range(60):
        data.rows.clear()
        told.append(not np.isfinite(train_by_opacus(module, crafted, data, slot, 1.0, key(number), clip=1.0, lr=0.5)).all())
        truth.append(target in data.rows[0])
    assert told == truth
    assert 10 < sum(truth) < 50


def test_the_attack_is_a_command_whose_result_stays_in_the_run_folder(recorded):
    done = dpcfl("attack", "nan-oracle", recorded["opacus"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("36 of 36 answers correct")
    kept = json.loads((recorded["opacus"] / "attacks" / "nan-oracle.json").read_text())
    assert kept["facts"] == nan_oracle.attack(recorded["opacus"]).facts
    assert len(kept["rows"]) == 3
    said = json.loads((recorded["opacus"] / "run.json").read_text())["privacy"]
    assert said["epsilon"] is None
    assert "as Opacus 1.6 does it" in said["not_covered"][0]


@pytest.mark.parametrize(
    ("clients", "finite", "said"),
    [
        ("ours", (True, True), "so there is nothing to read"),
        ("ours", (True, False), "THIS DEFENCE DID NOT HOLD"),
        ("opacus", (True, False), "each update reveals one exact bit"),
        ("opacus", (False, False), "one bit, wrong in 1 of them"),
    ],
)
def test_the_conclusion_is_that_of_the_answers(recorded, clients, finite, said):
    job = read_run_job(recorded[clients])
    readings = [nan_oracle.Reading(0, t, is_finite, present=t == 2) for t, is_finite in enumerate(finite, start=1)]
    assert said in nan_oracle.result(job, readings, [0]).sentences[-1]


def test_a_run_that_cannot_be_read_is_refused_with_the_reason(finished_run):
    with pytest.raises(ConfigError, match=r"sends no crafted weights: record one with dpcfl run threats/nan_oracle$"):
        nan_oracle.attack(finished_run)


@pytest.mark.parametrize("name", ["linear", "resnet18"])
def test_weights_are_crafted_for_networks_with_a_hidden_layer_only(name):
    module = models.build(name, (3, 32, 32), 10)
    with pytest.raises(ConfigError, match="hidden layer"):
        overflowing(module, flatten(module), torch.rand(1, 3, 32, 32), torch.rand(4, 3, 32, 32))


# 35


def reachable(seen: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Mironov's test for each coordinate: is there a float n with total + n == seen, in the precision of `seen`?"""
    total, found = total.astype(seen.dtype), np.zeros(seen.shape, bool)
    nearest = seen - total
    for direction in (-np.inf, np.inf):
        noise = nearest
        for _ in range(3):
            found |= total + noise == seen
            noise = np.nextafter(noise, seen.dtype.type(direction))
    return found


def impossible(seen: np.ndarray, total: np.ndarray) -> int:
    """How many coordinates of a noised sum cannot have come from `total`."""
    return int((~reachable(seen, total)).sum())


def area(out: list[int], inside: list[int]) -> float:
    """Area under the curve of a score that should be larger out: 0.5 tells nothing, 1 everything."""
    ranks = stats.rankdata(np.concatenate([out, inside]))
    return float((ranks[: len(out)].sum() - len(out) * (len(out) + 1) / 2) / (len(out) * len(inside)))


def naive(total: np.ndarray, deviation: float, rng: np.random.Generator | NormalStream, kind: type = np.float32) -> np.ndarray:
    """Sum plus noise as it comes, in one precision."""
    return total.astype(kind) + kind(deviation) * rng.standard_normal(total.size).astype(kind)


@pytest.mark.scenario(35)
def test_low_bits_of_noise_tell_nothing(monkeypatch, evidence):
    # A step of q = 1 whose divisor and learning rate are powers of two: the update has every bit of the noised sum.
    module, target, noise, times = models.build("digits-cnn", DIGITS, 10), 63, 1.1, 120
    trainer = Trainer(module, clip=1.0, learning_rate=0.5, batch_size=64)
    present, absent = with_and_without(target)
    theta = overflowing(module, models.initial("digits-cnn", DIGITS, 10, 0), present.x[target:], KNOWN)
    hidden, biases, last = theta[160:4768].reshape(32, -1), theta[4768:4800], theta[4800:6080]
    # Every hidden unit a gate, and an output layer of zeros: the record's gradient lies where the others' is exactly zero.
    hidden[:], biases[:], last[:] = hidden[0].copy(), biases[0].copy(), 0
    own = slice(4800, 6080)
    total = trainer.clipped_sum(theta, present, np.arange(64))[own]
    assert np.count_nonzero(total) >= 300
    assert not trainer.clipped_sum(theta, absent, np.arange(64))[own].any()

    def released(data: Images, number: int) -> np.ndarray:
        trained, _ = trainer.train(theta, data, DPSGDSlot("train", 1, 1), noise, key(number))
        return (trained - theta)[own] * np.float32(-64 / 0.5)

    def attacked() -> float:
        inside = [released(present, 2 * n) for n in range(times)]
        out = [released(absent, 2 * n + 1) for n in range(times)]
        return area(*([impossible(sums, total) for sums in world] for world in (out, inside)))

    ours, grid = attacked(), noise * 2.0**-GRID_BITS
    for sums in (released(present, 0), released(absent, 1)):
        assert np.array_equal((np.rint(sums.astype(np.float64) / grid) * grid).astype(np.float32), sums)
    assert abs(ours - 0.5) < 5.1 * np.sqrt((2 * times + 1) / 12) / times  # 5.1 deviations: one false alarm in 3 million
    monkeypatch.setattr(dpsgd_steps, "gaussian_on_grid", naive)
    plain, allowed = attacked(), stats.norm.cdf(trainer.clip / noise / np.sqrt(2))
    assert plain > 0.98 > allowed
    rng = np.random.default_rng(0)
    worlds = [[naive(known, noise, rng, np.float64) for _ in range(times)] for known in (0 * total, total)]
    double = area(*([impossible(sums, total) for sums in world] for world in worlds))
    assert double > 0.98
    evidence.got(f"every output a whole multiple of the grid, with and without the record; the same attack: AUC {ours:.2f}")
    evidence.control(
        f"float32 sum + noise, read from the update: AUC {plain:.3f}, where the noise allows {allowed:.2f}; float64 sum + noise, "
        f"read as it is: {double:.3f}"
    )


# 36


def cancelling_images(module: nn.Sequential) -> np.ndarray:
    """Weights of the CNN under which the second convolution's gradient is the difference of two nearly equal, huge patches."""
    module = copy.deepcopy(module)
    first, second, last = module[0], module[3], module[7]
    with torch.no_grad():
        first.bias[:] = 1e3
        for values in (second.weight, last.weight, last.bias):
            values.zero_()
        second.bias[:] = 1e-3  # keeps the rectifier open
        cells = last.weight.view(10, 32, 7, 7)
        cells[0, :, 2, 2], cells[0, :, 2, 3] = 1e3, -1e3
    return flatten(module)


def gram_norms(module: nn.Sequential, data: Images) -> torch.Tensor:
    """(n,) per-record norms in float32 without forming gradients, as ghost clipping has them: ||sum a_t b_t^T||^2 = <A A^T, B B^T>."""
    kept = []

    def keep(layer: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        output.retain_grad()
        kept.append((layer, inputs[0].detach(), output))

    handles = [layer.register_forward_hook(keep) for layer in module if any(True for _ in layer.parameters())]
    F.cross_entropy(module(data.x), data.y, reduction="sum").backward()
    squares = torch.zeros(len(data))
    for layer, a, output in kept:
        b = output.grad[:, None] if isinstance(layer, nn.Linear) else output.grad.flatten(2).transpose(1, 2)
        a = (
            a[:, None]
            if isinstance(layer, nn.Linear)
            else F.unfold(a, layer.kernel_size, padding=layer.padding).transpose(1, 2)
        )
        products = (a @ a.transpose(1, 2)) * (b @ b.transpose(1, 2))
        squares += products.sum((1, 2)).clamp(min=0) + b.sum(1).square().sum(1)
    for handle in handles:
        handle.remove()
    return squares.sqrt()


def cancelling_sequences() -> tuple[nn.Sequential, np.ndarray]:
    """The same for a layer that sees 16 positions, in a network that Opacus' own ghost clipping takes; and its weights."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4), nn.Flatten(), nn.Linear(64, 10))
    with torch.no_grad():
        for layer in (module[1], module[3]):
            layer.weight.zero_()
            layer.bias.zero_()
        module[0].bias[:] = 1e4
        module[3].weight.view(10, 16, 4)[0] = 1e3 * torch.tensor([1.0, -1.0] * 8)[:, None]
    return module, flatten(module)


def by_ghost_clipping(module: nn.Module, data: Images, row: int, clip: float) -> float:
    """The norm of one record's clipped gradient as Opacus' ghost clipping computes it, in its two backward passes."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(copy.deepcopy(module), max_grad_norm=clip, loss_reduction="sum").train()
    loss = F.cross_entropy(wrapped(data.x[[row]]), data.y[[row]], reduction="none")
    loss.sum().backward(retain_graph=True)
    factor = wrapped.get_clipping_coef()
    wrapped.zero_grad()
    wrapped.disable_hooks()
    (factor * loss).sum().backward()
    return float(torch.cat([p.grad.double().flatten() for p in wrapped.parameters()]).norm())


@pytest.mark.scenario(36)
@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_a_norm_that_cancels_is_clipped_all_the_same(evidence):
    clip, n = 1.0, 32
    torch.manual_seed(0)
    image_module, (sequence_module, sequence_theta) = models.build("cnn", (1, 28, 28), 10), cancelling_sequences()
    cases = {
        "images": (image_module, cancelling_images(image_module), Images(n, (1, 28, 28)), "fast"),
        "sequences": (sequence_module, sequence_theta, Images(n, (16, 8)), "opacus"),
    }
    longest, true = {}, {}
    for name, (module, theta, data, path) in cases.items():
        ours = Trainer(module, clip=clip, learning_rate=0.1, batch_size=n, path=path)
        free = Trainer(module, clip=1e9, learning_rate=0.1, batch_size=n, path=path)
        each = [np.array([row]) for row in range(n)]
        longest[name] = max(np.linalg.norm(ours.clipped_sum(theta, data, row)) for row in each)
        true[name] = np.array([np.linalg.norm(free.clipped_sum(theta.astype(np.float64), data, row)) for row in each])
        assert true[name].min() > 50 * clip
        assert 0.99 * clip < longest[name] <= clip

    module, theta, data, _ = cases["images"]
    fill(list(module.parameters()), torch.from_numpy(theta))
    factors = (clip / (gram_norms(module, data) + 1e-6)).clamp(max=1).numpy()
    through = factors * true["images"]
    assert (through > 50 * clip).sum() >= n / 4
    module, theta, data, _ = cases["sequences"]
    ghost = np.array([by_ghost_clipping(module, data, row, clip) for row in range(n)])
    assert (ghost > 50 * clip).sum() >= n / 4
    evidence.got(
        f"gradients of {true['images'].max():.0f} and {true['sequences'].max():.0f} times c count for {max(longest.values()):.4f} c"
    )
    evidence.control(
        f"a float32 Gram norm lets {(through > 50 * clip).sum()} of {n} records through at up to {through.max() / clip:.0f} c; "
        f"ghost clipping of Opacus 1.6 {(ghost > 50 * clip).sum()} of {n}, at up to {ghost.max() / clip:.0f} c"
    )


# 37


def plain_count(module: nn.Module, data: Images, records: int) -> int:
    """Records that are right, counted in batches of 128, the last one as long as it comes."""
    with torch.no_grad():
        return sum(
            int((module(data.x[k : min(k + 128, records)]).argmax(1) == data.y[k : min(k + 128, records)]).sum())
            for k in range(0, records, 128)
        )


def other_kernels(module: nn.Module, data: Images) -> list[int]:
    """Batch lengths whose rows come out otherwise in a batch of one record more; which ones is up to processor and library."""
    with torch.no_grad():
        outputs = {n: module(data.x[:n]) for n in range(1, 65)}
    return [n for n in range(1, 64) if not torch.equal(outputs[n], outputs[n + 1][:n])]


def tied(data: Images, rows: slice, rng: np.random.Generator) -> np.ndarray:
    """Weights of the linear model under which the records of `rows` have equal logits for two classes, but for rounding."""
    theta = np.zeros((10, 785))
    known, _ = np.linalg.qr(data.x[rows].flatten(1).double().numpy().T)
    across = rng.normal(size=784)
    for _ in range(2):
        across -= known @ (known.T @ across)
    theta[0, :784] = rng.normal(size=784)
    theta[1, :784] = theta[0, :784] + across
    theta[2:, 784] = -1e6
    return np.concatenate([theta[:, :784].ravel(), theta[:, 784]]).astype(np.float32)


@pytest.mark.scenario(37)
def test_ties_do_not_make_a_count_depend_on_the_batch(evidence):
    shape, rng = (1, 28, 28), np.random.default_rng(0)
    module, data = models.build("linear", shape, 10), Images(256, shape)
    data.y[:] = 0
    module.eval()
    lengths = other_kernels(module, data)
    last = max(lengths, default=0)  # of the second batch, when a record is left out
    attacked, records = 128 + last + 1, 128 + max(last + 1, 40)
    without = Images(records - 1, shape)
    without.x, without.y = data.x[: records - 1], data.y[: records - 1]
    middle = Images(records, shape)
    middle.x, middle.y = data.x[:records].clone(), data.y[:records]
    middle.x[130] = torch.nan
    data.x, data.y = data.x[:records], data.y[:records]
    evaluator, worst = Evaluator(module), 0
    for _ in range(60):
        theta = tied(data, slice(128, records), rng)
        fill(list(module.parameters()), torch.from_numpy(theta))
        worst = max(worst, plain_count(module, data, attacked - 1) - plain_count(module, data, attacked))
        losses, right = evaluator.each(theta, data)
        for other, gone in ((without, records - 1), (middle, 130)):
            kept = np.arange(records) != gone
            same = slice(None) if len(other) < records else kept
            other_losses, other_right = evaluator.each(theta, other)
            assert np.array_equal(losses[kept], other_losses[same])
            assert np.array_equal(right[kept], other_right[same])
            counts = [evaluator.count_correct(np.stack([theta, -theta]), held)[0] for held in (data, other)]
            assert counts[0] - counts[1] == int(right[gone])
    assert worst >= min(last, 2)  # no more records can change than the last batch has
    evidence.got(f"60 crafted ties, a record left out of {records}: every other record's loss and count bit for bit as before")
    evidence.control(
        f"plain batches of 128 and the rest: leaving one record out raises the count by up to {worst}, never allowed "
        f"(another kernel runs here for {len(lengths)} batch lengths below 64, up to {last})"
        if lengths
        else "NOT SHOWN: this machine's kernels agree for every batch length below 64, so plain batches give nothing away here"
    )
