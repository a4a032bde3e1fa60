"""MR-MTL against published code whose regulariser has no effect, because clipping discards it."""

from __future__ import annotations

from dpcfl_net.reproduce.base import Claim, Context, Reproduction, ReproductionResult, packaged
from dpcfl_net.reproduce.plots import lines
from dpcfl_net.reproduce.r_dpcfl_accuracy import CONFIGS, row_of
from dpcfl_net.results import compare, compare_table

STRENGTHS = (0.0, 0.005, 0.02, 0.1, 0.5)
SEEDS = {"laptop": (0,), "paper": (0, 1, 2, 3)}


class NoOp(Reproduction):
    """Accuracy against lambda; at lambda = 0, or with the term in the loss under Opacus, MR-MTL equals Local."""

    name = "mr-mtl/no-op"
    paper = "Liu, Hu, Wu, Smith, On privacy and personalization in cross-silo federated learning, 2022, Algorithm A1"
    title = "MR-MTL: effective regulariser against a regulariser without effect"

    def compute(self, context: Context) -> ReproductionResult:
        setting = CONFIGS[context.scale][0]
        path, seeds = packaged(f"r_dpcfl/fig6/{setting}"), SEEDS[context.scale]
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
            "lambda", "accuracy, %", caption="Published code computes lambda 0 for every lambda.",
        )  # fmt: skip
        table = compare_table.table(compare.rows([*pulled, *alone]))
        note = (
            "As a term of the loss, the regulariser has no effect under Opacus: its optimiser replaces the gradient by the "
            "clipped per-record sums, which do not contain the term (a test shows it). "
            "Such code computes lambda = 0 for every lambda."
        )
        return ReproductionResult(
            rows, self.claims(dict(by_strength["accuracy_mean"]), local["accuracy_mean"]), [figure], [table], [note]
        )

    def claims(self, mean: dict[float, float], local: float) -> list[Claim]:
        """Check that lambda 0 equals Local, that lambda has an effect, and that the best lambda beats Local.

        Args:
            mean: Lambda to accuracy in percent.
            local: Accuracy of Local in percent.

        Returns:
            The claims.
        """
        best = max(mean, key=lambda lam: mean[lam])
        span = max(mean.values()) - min(mean.values())
        listed = ", ".join(f"lambda {lam:g}: {value:.1f} %" for lam, value in mean.items())
        return [
            Claim(
                "MR-MTL without an effective regulariser equals Local (within 1 point; noise differs)",
                f"lambda 0: {mean[0.0]:.1f} %, Local: {local:.1f} %",
                abs(mean[0.0] - local) < 1,
                "the two runs have other noise, and may have other learning rates",
            ),
            Claim("an effective regulariser changes the result by more than the noise (1 point)", listed, span > 1),
            Claim(
                "MR-MTL with the best lambda is above Local",
                f"best lambda {best:g}: {mean[best]:.1f} %, Local: {local:.1f} %",
                best > 0 and mean[best] > local,
                "clients of four rotations have little in common: the mean of all models is a poor centre for each of them",
            ),
        ]
