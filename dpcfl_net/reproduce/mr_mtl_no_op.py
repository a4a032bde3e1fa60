"""MR-MTL against published code whose regulariser is lost in clipping, which amounts to Local."""

from __future__ import annotations

from pathlib import Path

from dpcfl_net.reproduce.base import Claim, Context, Reproduction, ReproductionResult
from dpcfl_net.reproduce.plots import lines
from dpcfl_net.reproduce.r_dpcfl_accuracy import CONFIGS, row_of
from dpcfl_net.results import compare

STRENGTHS = (0.0, 0.005, 0.02, 0.1, 0.5)
SEEDS = {"laptop": (0,), "paper": (0, 1, 2, 3)}


class NoOp(Reproduction):
    """Accuracy against lambda; at lambda = 0, or with the term in the loss under Opacus, MR-MTL equals Local."""

    name = "mr-mtl/no-op"
    paper = "Liu, Hu, Wu, Smith, On privacy and personalization in cross-silo federated learning, 2022, Algorithm A1"
    title = "A regulariser that works against one that has no effect"

    def compute(self, context: Context) -> ReproductionResult:
        setting = CONFIGS[context.scale][0]
        path, seeds = Path("configs/r_dpcfl/fig6") / f"{setting}.yaml", SEEDS[context.scale]
        pulled = context.results(path, {"algorithm.name": ["mr-mtl"], "algorithm.lam": STRENGTHS, "seed": seeds})
        alone = context.results(path, {"algorithm.name": ["local"], "seed": seeds})
        rows = [{"lam": result.settings["algorithm"].get("lam"), **row_of(setting, result)} for result in [*pulled, *alone]]
        by_strength = {
            measure: [
                (lam, sum(100 * float(r.final[measure]) for r in pulled if r.settings["algorithm"]["lam"] == lam) / len(seeds))
                for lam in STRENGTHS
            ]
            for measure in ("accuracy_mean", "accuracy_minority")
        }
        local = {m: sum(100 * float(r.final[m]) for r in alone) / len(seeds) for m in by_strength}
        figure = lines(
            "no-op", "Accuracy against lambda",
            {"mean": by_strength["accuracy_mean"], "minority": by_strength["accuracy_minority"],
             "mean, Local": [(lam, local["accuracy_mean"]) for lam in STRENGTHS]},
            "lambda", "accuracy, %", caption="Lambda 0 is what published code amounts to, whatever its lambda.",
        )  # fmt: skip
        table = compare.table(compare.rows([*pulled, *alone]))
        note = (
            "Written as a term of the loss, the pull has no effect under Opacus: its optimiser replaces the gradient by the "
            "clipped per-record sums, in which the term is not (a test shows it). Such code computes lambda = 0 whatever it is given."
        )
        return ReproductionResult(
            rows, self.claims(dict(by_strength["accuracy_mean"]), local["accuracy_mean"]), [figure], [table], [note]
        )

    def claims(self, mean: dict[float, float], local: float) -> list[Claim]:
        """Claim that the no-op equals Local, an effective regulariser changes the result, and the best lambda beats none."""
        best = max(mean, key=lambda lam: mean[lam])
        span = max(mean.values()) - min(mean.values())
        listed = ", ".join(f"lambda {lam:g}: {value:.1f} %" for lam, value in mean.items())
        return [
            Claim(
                "a regulariser without effect is Local (within 1 point; noise differs)",
                f"lambda 0: {mean[0.0]:.1f} %, Local: {local:.1f} %",
                abs(mean[0.0] - local) < 1,
                "the two runs have other noise, and may have other learning rates",
            ),
            Claim("one that acts changes the result by more than noise does (1 point)", listed, span > 1),
            Claim(
                "MR-MTL with the best lambda is above Local",
                f"best lambda {best:g}: {mean[best]:.1f} %, Local: {local:.1f} %",
                best > 0 and mean[best] > local,
                "clients of four rotations have little in common: the mean of all models is no good centre for any of them",
            ),
        ]
