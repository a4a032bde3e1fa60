"""FedAvg as a loop in one thread, without any framework. Arguments: clients, rounds."""

from __future__ import annotations

import copy
import sys

import torch

from dpcfl_net.launch.bench.peers import networks
from dpcfl_net.launch.bench.peers.process import Rounds


def main(clients: int, rounds: int) -> None:
    """Run the rounds and report."""
    torch.set_num_threads(1)
    model, data, times = networks.cnn(), [networks.records() for _ in range(clients)], Rounds(warm=1)
    for _ in range(rounds + times.warm):
        times.mark()
        trained = []
        for x, y in data:
            local = copy.deepcopy(model)
            networks.train(local, x, y)
            trained.append(torch.nn.utils.parameters_to_vector(local.parameters()).detach())
        torch.nn.utils.vector_to_parameters(torch.stack(trained).mean(dim=0), model.parameters())
    times.mark()
    times.report()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
