"""Row secure: a secure sum of clients and server in one process, without training and without messages, beside plain sending."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from dpcfl_net.core.signing import signing_pair, signing_public
from dpcfl_net.federation.secure import client_checks, client_stages
from dpcfl_net.federation.secure.server_stages import ServerRound
from dpcfl_net.federation.secure.terms import Settings, Terms
from dpcfl_net.launch.bench.figures import OURS, Figure
from dpcfl_net.launch.bench.options import Options
from dpcfl_net.launch.bench.sizes import CNN, RESNET18
from dpcfl_net.launch.bench.timing import Sample, processor_seconds
from dpcfl_net.privacy.randomness import derive
from dpcfl_net.privacy.secure_sum import SumCode
from dpcfl_net.results.number_format import counted

CASES = [(20, CNN, 1), (20, CNN, 4), (100, CNN, 1), (100, CNN, 4), (1000, CNN, 1), (1000, CNN, 4), (20, RESNET18, 1)]
QUICK = [(5, 1_000, 2)]
PLAIN = "plain"
KIB = 1024
Arrays = Mapping[str, np.ndarray]


@dataclass
class _Cost:
    """Seconds and bytes of one party in one sum."""

    cpu: float = 0.0
    wall: float = 0.0
    sent: int = 0

    @contextmanager
    def measured(self) -> Iterator[None]:
        cpu, wall = processor_seconds(), time.perf_counter()
        yield
        self.cpu += processor_seconds() - cpu
        self.wall += time.perf_counter() - wall

    def sample(self, units: int) -> Sample:
        return Sample(self.cpu / units, self.wall / units)


@dataclass
class _Costs:
    clients: _Cost = field(default_factory=_Cost)
    server: _Cost = field(default_factory=_Cost)


def measure(options: Options) -> list[Figure]:
    """Measure sums in which all clients answer; the plain way adds float32 updates of one block as they come."""
    _Sums(2, 10).play(1)  # imports
    return [figure for case in (QUICK if options.quick else CASES) for figure in _figures(*case, options)]


def _figures(n: int, p: int, blocks: int, options: Options) -> list[Figure]:
    case = f"{n} clients, p={p:,}, {counted(blocks, 'block')}"
    sums, plain = _Sums(n, p * blocks), [_plain(n, p, blocks) for _ in range(options.times(3 if n < 1000 else 1))]
    secure = [sums.play(t) for t in range(1, len(plain) + 1)]
    both = {OURS: secure, PLAIN: plain}
    models = 4 * p * blocks
    sent = {name: [cost.clients.sent / n / KIB for cost in costs] for name, costs in both.items()}
    got = {name: [(cost.server.sent / n + models) / KIB for cost in costs] for name, costs in both.items()}
    times = {name: [cost.clients.sample(n) for cost in costs] for name, costs in both.items()}
    server = {name: [cost.server.sample(1) for cost in costs] for name, costs in both.items()}
    return [
        Figure.of_times(f"{case}: a client", "ms per round", times),
        Figure.of_times(f"{case}: the server", "ms per round", server),
        Figure.of_values(f"{case}: to the server", "KiB per client", sent),
        Figure.of_values(f"{case}: from the server, with models", "KiB per client", got),
    ]


def _plain(n: int, p: int, blocks: int) -> _Costs:
    """The round of a trusted server, which gets one float32 update of each client and adds it in float64."""
    update, costs = np.random.default_rng(0).standard_normal(p, dtype=np.float32), _Costs()
    total = np.zeros((blocks, p))
    for client in range(n):
        with costs.clients.measured():
            sent = update.tobytes()
        costs.clients.sent += len(sent)
        with costs.server.measured():
            total[client % blocks] += np.frombuffer(sent, np.float32)
    return costs


class _Sums:
    """Clients and server of secure sums whose clients all answer."""

    def __init__(self, n: int, size: int) -> None:
        self._terms, self._context = Terms.of("ab" * 32, tuple(range(n)), Settings()), hashlib.sha256(b"model").digest()
        self._secrets = {client: bytes.fromhex(signing_pair()[1]) for client in range(n)}
        self._identities = {client: signing_public(secret) for client, secret in self._secrets.items()}
        self._code = SumCode(size, n, self._terms.honest, 1.0, 1.0)
        self._update = np.random.default_rng(0).standard_normal(size, dtype=np.float32)
        self._states: dict[int, dict[str, np.ndarray]] = {}
        _ = self._terms.holder_positions  # kept between the sums of a job

    def play(self, t: int) -> _Costs:
        """Run the sum of a round."""
        server, costs = ServerRound(self._terms, t, self._identities, self._code.d), _Costs()
        stages: list[tuple[Callable[[], dict], Callable[[int, int, dict], Arrays], Callable[[int, Arrays], bool]]] = [
            (server.keys_tasks, self._advertise, server.add_keys),
            (server.shares_tasks, self._share, server.add_boxes),
            (server.masked_tasks, self._mask, server.add_masked),
            (server.survivors_tasks, self._sign, server.add_signature),
            (server.unmask_tasks, self._unmask, server.add_shares),
        ]
        for tasks_of, answer, take in stages:
            with costs.server.measured():
                tasks = tasks_of()
            for client, task in tasks.items():
                costs.server.sent += _bytes(task)
                with costs.clients.measured():
                    release = answer(t, client, task)
                costs.clients.sent += _bytes(release)
                with costs.server.measured():
                    take(client, release)
        with costs.server.measured():
            self._code.decode(server.unmask(self._context))
        return costs

    def _advertise(self, t: int, client: int, task: dict[str, np.ndarray]) -> Arrays:
        client_checks.check_group(self._terms, client)
        return self._keep(client, client_stages.advertise(self._terms, t, client, self._secrets[client], self._key(client, t)))

    def _share(self, t: int, client: int, task: dict[str, np.ndarray]) -> Arrays:
        client_checks.check_keys(self._terms, t, client, self._identities, self._states[client], **task)
        state = self._states[client]
        return self._keep(client, client_stages.share(self._terms, t, client, state, **task, key=self._key(client, t)))

    def _mask(self, t: int, client: int, task: dict[str, np.ndarray]) -> Arrays:
        state = self._states[client]
        client_checks.check_mask(self._terms, t, client, state, **task)
        words = self._code.to_words(self._code.encode(self._update), self._key(client, t))
        after = client_stages.mask(self._terms, t, client, state, **task, context=self._context, vector=words)
        return self._keep(client, ({"masked": words}, after))

    def _sign(self, t: int, client: int, task: dict[str, np.ndarray]) -> Arrays:
        state = self._states[client]
        client_checks.check_survivors(self._terms, t, client, state, **task)
        signed = client_stages.sign_survivors(self._terms, t, client, state, task["survivors"], self._secrets[client])
        return self._keep(client, signed)

    def _unmask(self, t: int, client: int, task: dict[str, np.ndarray]) -> Arrays:
        state = self._states[client]
        client_checks.check_unmask(self._terms, t, client, self._identities, state, **task)
        return self._keep(client, client_stages.unmask(self._terms, t, client, state, task["survivors"]))

    def _keep(self, client: int, result: tuple[Arrays, dict[str, np.ndarray]]) -> Arrays:
        release, self._states[client] = result
        return release

    def _key(self, client: int, t: int) -> bytes:
        return derive(self._secrets[client], "bench", t)


def _bytes(tensors: Arrays) -> int:
    return sum(array.nbytes for array in tensors.values())
