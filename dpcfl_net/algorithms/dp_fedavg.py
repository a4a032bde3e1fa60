"""DP-FedAvg (McMahan, Ramage, Talwar, Zhang, "Learning differentially private recurrent language models", ICLR 2018)."""

from __future__ import annotations

from dpcfl_net.algorithms.one_model import OneModel


class DPFedAvg(OneModel):
    """One model for all clients; the noisy sum of clipped updates is divided by the public number q n.

    Updates are clipped once, after all local steps, and clients weigh the same. The paper clips after each step and weighs clients by
    their records up to a cap.

    Source: McMahan et al. 2018, Algorithm 1.
    """

    name = "dp-fedavg"
    paper = "McMahan, Ramage, Talwar, Zhang, ICLR 2018, Algorithm 1"
