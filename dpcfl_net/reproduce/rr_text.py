"""RR-Cluster's table 2 (8 with DP-FedPer): an LSTM predicts the next character; clients are speaking roles of Shakespeare's plays."""

from __future__ import annotations

from collections.abc import Sequence

from dpcfl_net.reproduce.base import Context, ReproductionResult
from dpcfl_net.reproduce.claims import Cause, Claim
from dpcfl_net.reproduce.rr_accuracy import GUARANTEES, PAPER, AccuracyTable, Rows, System, found_in, planned, table
from dpcfl_net.reproduce.rr_leads import highest, raised

EPSILONS = (4, 8, 16)
MIDDLE = 8
MIN_SIZE = 6  # k B <= q n: 30 clients a round, 4 clusters
SETTING = "shakespeare"
FEDAVG = System("DP-FedAvg", {"name": "dp-fedavg"}, {SETTING: (4.47, 13.43, 17.53)})
FEDPER = System("DP-FedPer", {"name": "dp-fedper"}, {SETTING: (13.09, 13.14, 13.18)})
IFCA, FESEM, FEDCAM = (
    System(f"DP-{title}", {"name": "rr-cluster", "base": title.lower(), "min_cluster_size": 0}, {SETTING: paper})
    for title, paper in (("IFCA", (12.62, 12.64, 13.20)), ("FeSEM", (10.97, 12.99, 15.89)), ("FedCAM", (None, None, 4.47)))
)
REBALANCED = System(
    "RR-Cluster (IFCA)",
    {"name": "rr-cluster", "base": "ifca", "min_cluster_size": MIN_SIZE},
    {SETTING: (13.42, 13.83, 16.25)},
)
HEADLINE = (FEDAVG, IFCA, REBALANCED)
ALL = (FEDAVG, FEDPER, IFCA, FESEM, FEDCAM, REBALANCED)
USED = {"laptop": ("expected",), "paper": tuple(GUARANTEES)}


class Table2(AccuracyTable):
    """All systems at the middle epsilon; DP-FedAvg, and IFCA without and with rebalancing, at all three.

    The true clusters, if there are any, are unknown.
    """

    name = "rr-cluster/table2"
    paper = PAPER + ", Tables 2 and 8"
    title = "Shakespeare, 300 roles: accuracy of the next character"

    def compute(self, context: Context) -> ReproductionResult:
        used = USED[context.scale]
        cells = planned(context, (SETTING,), used, ALL, HEADLINE, EPSILONS, MIDDLE)
        measured = self.measured(context, cells, "{setting}")
        rows = measured.rows
        shown = table("Accuracy, %", SETTING, found_in(rows), ALL, used, EPSILONS)
        note = "The paper states an LSTM of unknown size, grids of learning rates and clips, and no rounds; its numbers come from other choices."
        return measured.count(ReproductionResult(rows, claims(rows, used), [], [shown], [note]))


def claims(rows: Rows, guarantees: Sequence[str]) -> list[Claim]:
    """State the paper's claims for each guarantee (section 5.2).

    Args:
        rows: Lines of data.csv.
        guarantees: Keys of GUARANTEES.

    Returns:
        Rebalancing raises the accuracy of DP-IFCA; no other system reaches it.
    """
    found, claimed = found_in(rows), list[Claim]()
    cause = Cause("roles do not form clusters that differ in the next character")
    for guarantee in guarantees:
        claimed += raised(guarantee, rows, SETTING, guarantee, (IFCA, REBALANCED), cause)
        claimed += highest(guarantee, found, SETTING, guarantee, REBALANCED, ALL[:-1])
    return claimed
