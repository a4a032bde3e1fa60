"""FedAvg in pfl's simulation, in one process. Arguments: clients, rounds."""

from __future__ import annotations

import sys
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import nn

from dpcfl_net.launch.bench.peers import networks
from dpcfl_net.launch.bench.peers.process import Rounds


class Network(nn.Module):
    """The CNN with the methods that pfl calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = networks.cnn()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(x)
        return logits

    def loss(self, x: torch.Tensor, y: torch.Tensor, is_eval: bool = False) -> torch.Tensor:
        return nn.functional.cross_entropy(self(x), y.long())

    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        return {"loss": Weighted(float(self.loss(x, y)), 1)}


def main(clients: int, rounds: int) -> None:
    """Run the rounds and report."""
    torch.set_num_threads(1)
    network, times = Network(), Rounds(warm=1)
    model = PyTorchModel(
        network, local_optimizer_create=torch.optim.SGD, central_optimizer=torch.optim.SGD(network.parameters(), 1.0)
    )
    data = {str(client): networks.records() for client in range(clients)}
    users = FederatedDataset(lambda user: Dataset(raw_data=list(data[user])), get_user_sampler("minimize_reuse", list(data)))

    class Marked(TrainingProcessCallback):
        """Notes the end of each round."""

        def after_central_iteration(self, *args: Any, **kwargs: Any) -> tuple[bool, Metrics]:
            times.mark()
            return False, Metrics()

    times.mark()
    count = rounds + times.warm
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=count, evaluation_frequency=count + 1, train_cohort_size=clients, val_cohort_size=0
        ),
        SimulatedBackend(training_data=users, val_data=None), model,
        NNTrainHyperParams(local_learning_rate=networks.RATE, local_num_epochs=1, local_batch_size=networks.BATCH),
        NNEvalHyperParams(local_batch_size=networks.RECORDS), callbacks=[Marked()],
    )  # fmt: skip
    times.report()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
