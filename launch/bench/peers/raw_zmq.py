"""A round over ZeroMQ alone: each worker gets the model and answers with a copy. Arguments: parameters, workers, rounds."""

from __future__ import annotations

import os
import sys

import numpy as np
import zmq

from dpcfl_net.launch.bench.peers.process import Rounds


def _work(endpoint: str) -> None:
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(endpoint)
    socket.send(b"ready")
    while True:
        frames = socket.recv_multipart(copy=False)
        if len(frames) == 1:
            os._exit(0)
        model = np.frombuffer(frames[1].buffer, np.float32)
        socket.send_multipart([b"update", memoryview(model)], copy=False)


def main(parameters: int, workers: int, rounds: int) -> None:
    """Fork the workers, run rounds with a mean of the answers, and report."""
    endpoint = f"ipc://@dpcfl-bench-{os.getpid()}"
    children = []
    for _ in range(workers):
        child = os.fork()
        if not child:
            _work(endpoint)
        children.append(child)
    socket = zmq.Context().socket(zmq.ROUTER)
    socket.bind(endpoint)
    peers = [socket.recv_multipart()[0] for _ in range(workers)]
    model, times = np.random.default_rng(0).standard_normal(parameters, dtype=np.float32), Rounds()
    for _ in range(rounds + times.warm):
        times.mark()
        for peer in peers:
            socket.send_multipart([peer, b"task", memoryview(model)], copy=False)
        total = np.zeros(parameters)
        for _ in peers:
            total += np.frombuffer(socket.recv_multipart(copy=False)[-1].buffer, np.float32)
        model = (total / workers).astype(np.float32)
    times.mark()
    times.report()
    for peer in peers:
        socket.send_multipart([peer, b"end"])
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
