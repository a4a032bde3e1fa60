"""O-DPCFL: DP-FedAvg within the true clusters, which the operator writes into the signed job, where the server reads them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from dpcfl_net.algorithms.asynchronous_options import asynchronous_of
from dpcfl_net.algorithms.buffered import WITHOUT_ANSWERS
from dpcfl_net.algorithms.global_model import Global
from dpcfl_net.algorithms.secure_clusters import also_without_survivors
from dpcfl_net.core.types import State
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.capabilities import Capabilities, Setting

WITHOUT_CLIENTS = "the mean of a cluster is over its clients that answered; a cluster without an answer keeps its model"


class Oracle(Global):
    """Upper bound of clustered methods: the round of Global in each true cluster, R(i) from round 1.

    Source: O-DPCFL in Malekmohammadi et al., TMLR 2025.
    """

    name = "oracle"
    paper = "O-DPCFL in Malekmohammadi et al., TMLR 2025"

    @classmethod
    def capabilities_for(cls, options: Any, setting: Setting) -> Capabilities:
        said = WITHOUT_CLIENTS if asynchronous_of(options) is None else WITHOUT_ANSWERS
        return replace(
            super().capabilities_for(options, setting), uses_oracle=True, published_models=setting.true_clusters,
            without_clients=also_without_survivors(said, setting),
        )  # fmt: skip

    def start(self, fed: Federation) -> State:
        assert self.protocol.oracle is not None
        models = np.repeat(fed.initial_model()[None], self.setting.true_clusters, axis=0)
        return State(models, [*self.protocol.oracle], diagnostics={"phase": "fixed"})
