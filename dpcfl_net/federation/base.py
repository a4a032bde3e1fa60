"""Federation: the interface by which a server calls client steps, in one process or over the network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from dpcfl_net.core.errors import RunFailed
from dpcfl_net.core.files import shown
from dpcfl_net.core.protocol import Protocol as Job
from dpcfl_net.core.seeds import derive_seed
from dpcfl_net.federation.aggregation import GroupedMeans, ModelMeans, chosen_row
from dpcfl_net.federation.asynchronous import Outcome, Participation, RawRelease
from dpcfl_net.federation.call_arguments import arguments_problem, step_of, sums_problem, work_problem
from dpcfl_net.federation.in_order import Arrays, Take, window
from dpcfl_net.federation.message_encoding import MessageEncoding
from dpcfl_net.federation.round_counts import RoundCounts, answers_needed

__all__ = ["Arrays", "Federation", "Results"]

NO_OPEN_TASKS = "tasks cannot stay open with runtime.aggregators: use calls, or set runtime.aggregators to 0"


class CentralServer(Protocol):
    """The part of a trusted server that rounds use; `central_dp.CentralDPServer` implements it."""

    shown: dict[str, Any]

    def participations_left(self, slot: str, before: int) -> dict[int, int]: ...

    def participants(self, slot: str, round: int) -> list[int] | None: ...

    def release(self, fed: Federation, kind: str, tensors: Arrays, buffer: Mapping[int, Arrays] | None) -> Arrays | None: ...


class Results(Mapping[int, Arrays]):
    """Releases by client, in client order.

    Args:
        asked: Clients that were asked.
        answers: Client to its release, in any order.

    Attributes:
        missing: Clients that did not answer in time.
    """

    def __init__(self, asked: list[int], answers: Mapping[int, Arrays]) -> None:
        self._answers = {client: answers[client] for client in sorted(asked) if client in answers}
        self.missing = [client for client in sorted(asked) if client not in answers]

    def __getitem__(self, client: int) -> Arrays:
        return self._answers[client]

    def __iter__(self) -> Iterator[int]:
        return iter(self._answers)

    def __len__(self) -> int:
        return len(self._answers)

    def column(self, name: str) -> dict[int, np.ndarray]:
        """Select one tensor of every release.

        Args:
            name: Name of the tensor.

        Returns:
            Client to its tensor.

        Raises:
            KeyError: If a release has no tensor of this name.
        """
        for arrays in self._answers.values():
            if name not in arrays:
                raise KeyError(f"no tensor {name!r} in a release: its tensors are {', '.join(sorted(arrays))}")
        return {client: arrays[name] for client, arrays in self._answers.items()}


def _arrays(tensors: Arrays) -> dict[str, np.ndarray]:
    """Convert NumPy's numbers, which have no memory by which `memory_of` tells them apart, to arrays."""
    return {name: np.asarray(value) for name, value in tensors.items()}


class Federation(ABC):
    """The server's view of its clients; a subclass defines how tasks are delivered.

    Args:
        protocol: The signed protocol.
        quorum: Fraction of the asked clients that must answer a call.

    Attributes:
        clients: Client ids of the roster.
        round: Current round.
        counts: Clients that answered, were missing, late or away in the current round.
        needed: Number of answers that the current call needs.
        lost: Clients whose answer to the last call a crash lost; it is charged, and it will never come.
        refused: Clients that refused the last call.
        reasons: Reason by client that gave no release to the last call; silent clients have none.
        central_server: The trusted server; None if the job trusts no server.
        in_central_step: True while a trusted server runs a central step, the only code that its raw releases may reach.
    """

    central_server: CentralServer | None = None
    in_central_step = False

    def __init__(self, protocol: Job, *, quorum: float = 1.0) -> None:
        self.protocol, self.quorum = protocol, quorum
        self.clients = protocol.clients
        self.round = 0
        self.counts = RoundCounts(0)
        self.needed = 0
        self.lost: list[int] = []
        self.refused: list[int] = []
        self.reasons: dict[int, str] = {}

    @property
    def missing(self) -> list[int]:
        """Clients without an answer to a call of this round."""
        return sorted(self.counts.missing)

    @property
    def answered(self) -> int:
        """Number of clients that answered in this round."""
        return len(self.counts.answered)

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes received and sent so far."""
        return 0, 0

    @property
    def live(self) -> int:
        """Number of connected clients."""
        return len(self.clients)

    @property
    def started(self) -> int:
        """Number of client starts so far."""
        return 0

    def away(self, t: int) -> list[int]:
        """List the clients that the signed schedule names as away in round t."""
        if not self.protocol.has_schedule:
            return []
        return [entry.id for entry in self.protocol.roster if not entry.is_there(t)]

    def call(
        self,
        method: Any,
        *,
        common: Arrays | None = None,
        each: Mapping[int, Arrays] | None = None,
        quorum: float | None = None,
    ) -> Results:
        """Run a client step on every client, or on those in `each`, and collect the releases.

        Clients that are away by schedule are not asked and do not count towards the quorum. An answer that a crash lost counts
        towards the quorum: asking again cannot produce it.

        Args:
            method: The client step.
            common: Tensors for all clients.
            each: Client to its separate tensors; None: all clients are asked.
            quorum: Fraction of the asked clients that must answer this call; None: that of the run.

        Returns:
            The releases in client order.

        Raises:
            RunFailed: If fewer clients than the quorum answer, if `method` is no client step, if `common`, `each` or `quorum` are
                not as above, or if the job has a trusted server and the call is outside a central step.
        """
        answers: dict[int, Arrays] = {}
        asked = self._run(method, answers.__setitem__, common, each, quorum, None)
        return Results(asked, answers)

    def stream(
        self,
        method: Any,
        take: Take,
        *,
        common: Arrays | None = None,
        each: Mapping[int, Arrays] | None = None,
        quorum: float | None = None,
        refusals_count: bool = False,
    ) -> list[int]:
        """Run a client step as `call` does, and pass each release on in client order without keeping it.

        Early answers wait in a bounded window (`in_order.window`), so that memory does not grow with the number of clients. If
        the call fails, or the process ends, what was passed on is lost with it: a resumed round asks the clients again, and
        they send the same bytes.

        Args:
            method: The client step.
            take: Receives client and release, in client order.
            common: As `call`.
            each: As `call`.
            quorum: As `call`.
            refusals_count: True if a refusal counts towards the quorum, as an answer that a crash lost.

        Returns:
            The clients that answered, in client order.

        Raises:
            RunFailed: As `call`.
        """
        answered: list[int] = []

        def count_and_take(client: int, release: Arrays) -> None:
            answered.append(client)
            take(client, release)

        self._run(method, count_and_take, common, each, quorum, window(self.protocol.model.parameters), refusals_count)
        return answered

    def add_up(
        self,
        method: Any,
        means: ModelMeans,
        rows: Mapping[int, int] | None = None,
        *,
        common: Arrays | None = None,
        each: Mapping[int, Arrays] | None = None,
    ) -> dict[int, int]:
        """Run a client step as `stream` does, and add each update to the mean of a model.

        Unlike with `stream`, aggregators send the sums of their clients' updates instead of the updates. The last bits of the
        means depend on the groups of the signed protocol, and on nothing else.

        Args:
            method: The client step; it releases the tensor "update", and "choice" if `rows` is None.
            means: Receives the updates.
            rows: Row of each client's model; None: the row that the client chooses. An index without a model is ignored, and so
                is that client's update.
            common: As `call`.
            each: As `call`.

        Returns:
            The row of each client whose update was added.

        Raises:
            RunFailed: As `call`, if the client step does not release these tensors, or if a client that is asked has no row.
        """
        self._require_sums(method, rows, each)
        added: dict[int, int] = {}
        grouped = GroupedMeans(means, [entry.clients for entry in self.protocol.aggregators])

        def take(client: int, release: Arrays) -> None:
            row = rows[client] if rows is not None else chosen_row(release, len(means.models))
            if row is not None:
                added[client] = row
                grouped.add(row, client, release["update"])

        self.stream(method, take, common=common, each=each)
        grouped.close_group()
        return added

    def _require_sums(self, method: Any, rows: Mapping[int, int] | None, each: Mapping[int, Arrays] | None) -> None:
        """RunFailed if the updates of a client step cannot be added up."""
        asked = sorted(set(self.clients if each is None else each) - set(self.away(self.round)))
        if problem := sums_problem(step_of(method), rows, asked):
            raise RunFailed(f"round {self.round}: {problem}")

    def _run(
        self,
        method: Any,
        take: Take,
        common: Arrays | None,
        each: Mapping[int, Arrays] | None,
        quorum: float | None,
        window: int | None,
        refusals_count: bool = False,
    ) -> list[int]:
        """Deliver a call, pass the decoded releases on in client order, and return the clients that were asked."""
        step = step_of(method)
        if self.protocol.privacy.central and not self.in_central_step:
            raise RunFailed(
                f"round {self.round}: client step {step.kind!r} was called outside a central step, where its raw releases "
                "may become public without noise: call it by me.call or me.stream in a method with @on_central_server, and that "
                "method by fed.release"
            )
        encoding = MessageEncoding(method.__self__)
        tasks = self._begin(common, each, quorum)
        answered: list[int] = []

        def decode_and_take(client: int, tensors: Arrays) -> None:
            answered.append(client)
            take(client, encoding.decode_release(step, tensors))

        self._exchange(step.kind, encoding.encode_tasks(step, tasks), decode_and_take, window)
        return self._end(list(tasks), answered, quorum, refusals_count)

    def _begin(
        self, common: Arrays | None, each: Mapping[int, Arrays] | None, quorum: float | None
    ) -> dict[int, dict[str, np.ndarray]]:
        """Begin a call: set the number of needed answers, and return the tasks of the clients that are asked, in order."""
        if self.counts.round != self.round:
            self.counts = RoundCounts(self.round, self.away(self.round))
        if problem := arguments_problem(common, each, quorum, self.clients):
            raise RunFailed(f"round {self.round}: {problem}")
        asked = sorted(set(self.clients if each is None else each) - set(self.counts.away))
        self.needed = answers_needed(self.quorum if quorum is None else quorum, len(asked))
        self.reasons = {}
        shared = _arrays(common or {})
        return {client: {**shared, **_arrays(each[client] if each else {})} for client in asked}

    def _end(
        self, asked: list[int], answered: list[int], quorum: float | None = None, refusals_count: bool = False
    ) -> list[int]:
        """Count the answers of a call and return the clients that were asked; RunFailed below the quorum."""
        self.counts.add_call(asked, answered)
        if (count := len(answered) + len(self.lost) + len(self.refused) * refusals_count) < self.needed:
            raise RunFailed(
                f"round {self.round}: {count} of {len(asked)} clients answered, the quorum is {self.needed} "
                f"{self._quorum_advice(quorum)}{self._first_reason()}"
            )
        return asked

    def _quorum_advice(self, quorum: float | None = None) -> str:
        """Say in brackets where a quorum is set, the one of a call or that of the run, and what a lower one does."""
        where = (
            f"runtime.quorum is {self.quorum:g}"
            if quorum is None
            else f"{self.protocol.algorithm} sets {quorum:g} for this call"
        )
        return f"({where}; with a lower one the run continues without the others)"

    def _first_reason(self) -> str:
        """Tell why the first client gave no release, to end a sentence; empty if no reason is known."""
        if not self.reasons:
            return ""
        client, reason = min(self.reasons.items())
        same = list(self.reasons.values()).count(reason) - 1
        return f"; client {client}{f' and {same} more' if same else ''}: {reason}"

    @property
    def trusted_server(self) -> CentralServer:
        """The trusted server; RunFailed if the job has none."""
        if self.central_server is None:
            raise RunFailed(f"{self.protocol.algorithm} needs a trusted server, and this job has none")
        return self.central_server

    def release(self, method: Any, *, buffer: Mapping[int, Arrays] | None = None, **tensors: np.ndarray) -> Arrays | None:
        """Run a central step behind the trusted server's privacy gate.

        Args:
            method: The central step.
            buffer: Raw releases that arrived before the charge, by client; None: the step calls the clients.
            tensors: Its tensors.

        Returns:
            The release; None if a crash lost the round.

        Raises:
            RunFailed: If the job has no trusted server, or its gate refuses the step.
        """
        return self.trusted_server.release(self, method.central_step.kind, tensors, buffer)

    @abstractmethod
    def _exchange(self, kind: str, tasks: Mapping[int, dict[str, np.ndarray]], take: Take, window: int | None) -> None:
        """Deliver encoded tasks and pass encoded releases to `take` in client order; sets `lost` and `refused`.

        `window` is the most clients asked ahead of the first without an answer; None: no limit.
        """

    def submit(self, work: Participation) -> None:
        """Give a client a task without waiting for its answer; nothing happens if the client has an open one.

        Args:
            work: The task.

        Raises:
            RunFailed: If the clients connect to aggregators, which only pass on calls, or if `work` is no task for a client.
        """
        if problem := work_problem(work, self.clients):
            raise RunFailed(f"round {self.round}: {problem}")
        self._submit(replace(work, tensors=_arrays(work.tensors)))

    def next_outcome(self, among: Collection[int] | None = None) -> Outcome:
        """Wait until the next open task ends, in order of arrival.

        Args:
            among: Wait for one of these clients; the others stay open. None: for any client.

        Returns:
            Its outcome. With a trusted server only a central step can read the release (`RawRelease`): pass it to `release` as part
            of `buffer`.

        Raises:
            RunFailed: As `submit`.
        """
        outcome = self._next_outcome(among)
        if outcome.release is None or not self.protocol.privacy.central:
            return outcome
        return replace(outcome, release=RawRelease(self, outcome.client, outcome.release))

    def gather(self, count: int, among: Collection[int] | None = None) -> list[Outcome]:
        """Collect the next outcomes of open tasks, as one call of this round: sets `counts` and `lost`.

        Args:
            count: Number of outcomes; at least so many tasks must be open.
            among: Take the outcomes of these clients only; None: of any client.

        Returns:
            The outcomes in client order, so that the sum of their updates does not depend on the order of arrival.

        Raises:
            RunFailed: If fewer outcomes than the quorum are answers (an answer that a crash lost counts); also as `submit`.
        """
        if self.counts.round != self.round:  # before the wait, in which late answers arrive
            self.counts = RoundCounts(self.round)
        found = sorted((self.next_outcome(among) for _ in range(count)), key=lambda outcome: outcome.client)
        self.lost = [outcome.client for outcome in found if outcome.lost]
        self.counts = replace(RoundCounts(self.round), late=self.counts.late)
        self.counts.add_call(
            [outcome.client for outcome in found], [outcome.client for outcome in found if outcome.release is not None]
        )
        needed, answered = answers_needed(self.quorum, count), len(self.counts.answered) + len(self.lost)
        if answered < needed:
            raise RunFailed(
                f"round {self.round}: {answered} of {count} buffered participations were answered, the quorum is {needed} "
                f"{self._quorum_advice()}"
            )
        return found

    def _submit(self, work: Participation) -> None:
        """Give a client a task as `submit`."""
        raise RunFailed(NO_OPEN_TASKS)

    def _next_outcome(self, among: Collection[int] | None) -> Outcome:
        """Wait for the end of an open task; errors as `submit`."""
        raise RunFailed(NO_OPEN_TASKS)

    def rng(self, purpose: str) -> np.random.Generator:
        """Make a generator for one purpose of this round; a resumed run gets the same one.

        Args:
            purpose: Name of the purpose.

        Raises:
            RunFailed: If `purpose` is no text.
        """
        return np.random.Generator(np.random.Philox(self.seed(purpose)))

    def seed(self, purpose: str) -> int:
        """Derive a public 31-bit seed for one purpose of this round.

        Args:
            purpose: Name of the purpose.

        Raises:
            RunFailed: If `purpose` is no text.
        """
        if not isinstance(purpose, str):
            raise RunFailed(f"round {self.round}: purpose is {shown(purpose)}: must be text, such as 'k-means'")
        return derive_seed(f"{self.protocol.server_seed}/{self.round}".encode(), purpose, 31)

    def initial_model(self, number: int = 0) -> np.ndarray:
        """Build initial parameters from the protocol, theta_init; every reader of the protocol gets the same.

        Args:
            number: Each number gives other values.

        Returns:
            (p,) float32.
        """
        from dpcfl_net.training.models import initial

        m = self.protocol.model
        seed = m.initial_seed if number == 0 else derive_seed(str(m.initial_seed).encode(), f"initial model {number}")
        return initial(m.name, tuple(m.input_shape), m.classes, seed)
