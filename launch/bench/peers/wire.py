"""Messages with one tensor from one process to another, until they are acknowledged. Arguments: way, parameters, messages.

dpcfl: header, hash, chunks and all checks of the transport, over ZeroMQ. frames: header and one frame over ZeroMQ, without checks.
msgpack: one msgpack document over ZeroMQ. pickle: a pipe of multiprocessing. grpc: a unary call.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from dpcfl_net.launch.bench.peers.process import Rounds

WARM = 3
Handler = Callable[[Any], Any]


def _touch(array: Any) -> None:
    np.frombuffer(array, np.uint8)[::4096].sum()


def _zmq(messages: int, build: Callable[[], list[Any]], read: Callable[[list[Any]], None]) -> None:
    """Send messages to a forked receiver, which answers each."""
    import zmq

    endpoint, child = f"ipc://@dpcfl-wire-{os.getpid()}", os.fork()
    if not child:
        context = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        socket.bind(endpoint)
        for _ in range(messages + WARM):
            peer, *frames = socket.recv_multipart(copy=False)
            read(frames)
            socket.send_multipart([peer.bytes, b"done"])
        socket.close(linger=1000)
        context.term()  # the last answer leaves the process before it ends
        os._exit(0)
    socket = zmq.Context().socket(zmq.DEALER)
    socket.connect(endpoint)

    def send() -> None:
        socket.send_multipart(build(), copy=False)
        socket.recv()

    _measure(send, messages)
    os.waitpid(child, 0)


def _measure(send: Callable[[], None], messages: int) -> None:
    times = Rounds(warm=0)
    for _ in range(WARM):
        send()
    times.mark()
    for _ in range(messages):
        send()
    times.mark()
    (first, before), (last, after) = times.marks
    times.marks = [(0.0, 0.0), ((last - first) / messages, (after - before) / messages)]
    times.report()


def _dpcfl(array: np.ndarray, messages: int) -> None:
    from dpcfl_net.transport.messages import VERSION, Header, decode, encode
    from dpcfl_net.transport.payload import Assembly, Payload

    common: dict[str, Any] = {
        "version": VERSION, "run": "0" * 32, "job": "0" * 64, "boot": "0" * 32, "sequence": 1, "id": "0" * 32,
    }  # fmt: skip

    def build() -> list[Any]:
        payload = Payload.of({"update": array})
        header = Header(
            **common, kind="RESULT", code="release", tensors=payload.rows, blake3=payload.blake3, chunks=len(payload.chunks)
        )
        return [encode(header), *payload.chunks]

    def read(frames: list[Any]) -> None:
        assembly = Assembly(decode(frames[0].buffer))
        for index, frame in enumerate(frames[1:]):
            assembly.add(index, frame.buffer)
        _touch(assembly.tensors()["update"])

    _zmq(messages, build, read)


def _frames(array: np.ndarray, messages: int) -> None:
    import msgpack

    header = {"kind": "update", "round": 1, "dtype": "<f4", "shape": [array.size]}
    _zmq(messages, lambda: [msgpack.packb(header), memoryview(array)], lambda frames: _touch(frames[1].buffer))


def _msgpack(array: np.ndarray, messages: int) -> None:
    import msgpack

    _zmq(
        messages,
        lambda: [msgpack.packb({"kind": "update", "round": 1, "update": memoryview(array).cast("B")})],
        lambda frames: _touch(msgpack.unpackb(frames[0].buffer, max_bin_len=1 << 31)["update"]),
    )


def _pickle(array: np.ndarray, messages: int) -> None:
    here, there = multiprocessing.Pipe()
    child = os.fork()
    if not child:
        for _ in range(messages + WARM):
            _touch(there.recv()["update"])
            there.send(True)
        os._exit(0)

    def send() -> None:
        here.send({"kind": "update", "round": 1, "update": array})
        here.recv()

    _measure(send, messages)
    os.waitpid(child, 0)


def _grpc(array: np.ndarray, messages: int) -> None:
    from concurrent import futures
    from signal import SIGKILL

    read_end, write_end = os.pipe()
    child = os.fork()
    limits = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    import grpc  # after the fork: its threads do not survive one

    if not child:

        def receive(data: bytes, context: Any) -> bytes:
            _touch(data)
            return b"done"

        server = grpc.server(futures.ThreadPoolExecutor(2), options=limits)
        handler = grpc.unary_unary_rpc_method_handler(receive)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", {"send": handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        os.write(write_end, str(port).encode())
        server.wait_for_termination()
    channel = grpc.insecure_channel(f"127.0.0.1:{os.read(read_end, 10).decode()}", options=limits)
    call = channel.unary_unary("/bench/send")
    _measure(lambda: call(array.tobytes()), messages)
    os.kill(child, SIGKILL)
    os.waitpid(child, 0)


WAYS: dict[str, Callable[[np.ndarray, int], None]] = {
    "dpcfl": _dpcfl, "frames": _frames, "msgpack": _msgpack, "pickle": _pickle, "grpc": _grpc,
}  # fmt: skip


if __name__ == "__main__":
    WAYS[sys.argv[1]](np.random.default_rng(0).standard_normal(int(sys.argv[2]), dtype=np.float32), int(sys.argv[3]))
