"""FedAvg in Flower's simulation engine (Ray). Arguments: noop or train, parameters, clients, rounds."""

from __future__ import annotations

import logging
import sys
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from dpcfl_net.core.cores import usable_cores
from dpcfl_net.launch.bench.peers.process import Rounds


def _client(what: str) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Any, context: Any) -> Message:
        arrays = message.content["arrays"]
        if what == "train":
            import torch

            from dpcfl_net.launch.bench.peers import networks

            torch.set_num_threads(1)
            module = networks.cnn()
            module.load_state_dict(arrays.to_torch_state_dict())
            networks.train(module, *networks.records())
            arrays = ArrayRecord(module.state_dict())
        content = {"arrays": arrays, "metrics": MetricRecord({"num-examples": 200})}
        return Message(content=RecordDict(content), reply_to=message)

    return app


def _initial(what: str, parameters: int) -> ArrayRecord:
    if what == "train":
        from dpcfl_net.launch.bench.peers import networks

        return ArrayRecord(networks.cnn().state_dict())
    return ArrayRecord([np.random.default_rng(0).standard_normal(parameters, dtype=np.float32)])


def main(what: str, parameters: int, clients: int, rounds: int) -> None:
    """Run the rounds and report."""
    times, server = Rounds(), ServerApp()

    class Marked(FedAvg):
        """FedAvg that notes the start of each round."""

        def configure_train(self, *args: Any, **kwargs: Any) -> Any:
            times.mark()
            return super().configure_train(*args, **kwargs)

    @server.main()
    def run(grid: Any, context: Any) -> None:
        strategy = Marked(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
        strategy.start(grid=grid, initial_arrays=_initial(what, parameters), num_rounds=rounds + times.warm)
        times.mark()

    logging.getLogger("flwr").setLevel(logging.WARNING)
    backend: Any = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": usable_cores(), "include_dashboard": False},
    }  # fmt: skip
    run_simulation(server_app=server, client_app=_client(what), num_supernodes=clients, backend_config=backend)
    times.report()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
