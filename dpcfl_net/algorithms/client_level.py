"""Base of client-level algorithms: noisy sums of clipped updates, by a trusted server that samples clients, or by secure sums."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from math import ceil
from typing import Any, Literal

import numpy as np
from pydantic import Field

from dpcfl_net.algorithms.base import Algorithm, Options
from dpcfl_net.core.roster import ClientEntry
from dpcfl_net.core.seeds import derive_seed
from dpcfl_net.core.types import State
from dpcfl_net.federation.base import Federation
from dpcfl_net.federation.capabilities import Capabilities, Setting
from dpcfl_net.federation.clipped_sums import ClippedSums, Contribution
from dpcfl_net.federation.secure.job_terms import honest_shares
from dpcfl_net.federation.secure.rounds import SecureSum, secure_sums
from dpcfl_net.federation.secure.stages import secure_rounds
from dpcfl_net.privacy.secure_sum import SumCode
from dpcfl_net.privacy.slots import CentralSlot, RawSlot, SecureSlot, Slot, given

WITHOUT_CLIENTS = (
    "clients are sampled whether they are there or not; the noisy sum lacks the updates of those without an "
    "answer, and is divided by q n as always"
)
WITHOUT_SURVIVORS = (
    "the secure sum is over the clients whose masked vector arrived, and is divided by their expected number in the sample; "
    "with fewer than the threshold it is aborted, and the model stays"
)
IN_TIME = (
    "who was in the sample, if a task with its wait for a core takes longer than local.deadline_s: the answer then leaves at a later "
    "multiple of it"
)
VISIBLE = "which clients take part in which round: the schedule is public, and epsilon counts every participation in full"


class Sampled(Options):
    """Options of client sampling and of the server step."""

    why_synchronous = (
        "its epsilon holds for a fresh secret sample of the clients in each round, and clients that take part whenever they are "
        "free are no such sample"
    )

    sampling_rate: float = Field(default=0.1, gt=0, le=1, description="q: fraction of the clients that a round samples")
    sampling: Literal["auto", "poisson", "fixed", "visible"] = Field(
        default="auto",
        description="poisson: each client with probability q; fixed: q n clients; auto: fixed for replace-one, else poisson; "
        "visible: secure aggregation only, q n clients by a public schedule, without amplification",
    )
    server_lr: float = Field(
        default=1.0, gt=0, le=1e6, description="gamma: learning rate of the server for the noisy mean update"
    )


class ClientLevel(Algorithm):
    """Whole-client protection: updates are clipped to C and summed with noise at the server; clients run plain SGD."""

    Options = Sampled

    @classmethod
    def capabilities_for(cls, options: Any, setting: Setting) -> Capabilities:
        able = Capabilities(
            expected_releases=float(options.sampling_rate * setting.clients) * setting.rounds,
            protects=(("client", "trusted-server"), ("client", "secure-aggregation")),
            plain_sgd=True,
            without_clients=WITHOUT_CLIENTS,
        )
        if not setting.privacy.secure:
            return able
        visible = options.sampling == "visible"
        each_round = options.sampling_rate * setting.clients if visible else setting.clients
        return replace(
            able,
            expected_releases=float(each_round * setting.rounds),
            without_clients=WITHOUT_SURVIVORS,
            caveats=(VISIBLE if visible else IN_TIME,),
        )

    @classmethod
    def problems(cls, options: Any, setting: Setting) -> list[str]:
        per_round, adjacency = options.sampling_rate * setting.clients, setting.privacy.adjacency
        sampling = sampling_of(options.sampling, adjacency)
        problems = []
        if per_round < 1:
            problems.append(
                f"algorithm.sampling_rate is {options.sampling_rate}: samples less than one of {setting.clients} clients, must be at "
                f"least 1/{setting.clients}"
            )
        if sampling == "fixed" and adjacency != "replace-one":
            why = "the size of a fixed sample does not depend on the clients, so only replacement can be protected"
            problems.append(f"algorithm.sampling is 'fixed': needs privacy.adjacency replace-one, since {why}")
        if (sampling == "fixed" or options.sampling == "visible") and abs(per_round - round(per_round)) > 1e-9:
            problems.append(
                f"algorithm.sampling_rate is {options.sampling_rate}: {per_round:g} of {setting.clients} clients is not a whole number"
            )
        holds_state = cls.capabilities_for(options, setting).holds_state
        if sampling == "fixed" and holds_state:
            why = "clients that keep a state reveal earlier samples, which a sample of fixed size does not hide"
            problems.append(f"{cls.name} with these options needs Poisson sampling, since {why}")
        return problems + cls.secure_problems(options, setting, holds_state)

    @staticmethod
    def secure_problems(options: Any, setting: Setting, holds_state: bool) -> list[str]:
        """List the problems of sampling with secure sums, or of an option that only they have.

        Args:
            options: Validated options.
            setting: Public facts of the run.
            holds_state: True if a client's release depends on earlier rounds in which it took part.
        """
        secure, visible, problems = setting.privacy.secure, options.sampling == "visible", []
        if visible and not secure:
            problems.append("algorithm.sampling is 'visible': needs privacy.trust secure-aggregation")
        if visible and holds_state:
            problems.append(
                "algorithm.sampling is 'visible': must be poisson, since clients keep a state, which only secret coins hide"
            )
        if secure and not visible and setting.local.deadline_s is None:
            why = "the time of an answer would tell which clients trained"
            problems.append(f"local.deadline_s is null: must be set for secure aggregation with secret coins, since {why}")
        return problems

    @property
    def clients_per_round(self) -> float:
        """q n, the expected number of clients in a round; public, and the divisor of the sums over all clients."""
        return float(self.options.sampling_rate * len(self.clients))

    @property
    def secure(self) -> bool:
        """True if updates are added by secure sums, False if a trusted server adds them."""
        return self.setting.privacy.secure

    @property
    def coin(self) -> float:
        """Probability with which a client of a secure sum is in it: q with secret coins, 1 by a public schedule."""
        return 1.0 if self.options.sampling == "visible" else float(self.options.sampling_rate)

    def plan(self, client: ClientEntry) -> list[Slot]:
        """List one release for each round: raw to the trusted server, or masked."""
        if not self.secure:
            return [RawSlot("raw")] * self.protocol.rounds
        return secure_rounds(SecureSlot("masked", self.coin), ceil(self.protocol.rounds / self._cycle))

    def central_plan(self) -> list[Slot]:
        return [] if self.secure else [round_slot(self.options, self.setting)] * self.protocol.rounds

    # ---- secure sums

    @property
    def _participants(self) -> int:
        """Number of clients that send in a round: all with secret coins, q n by the public schedule."""
        return round(self.clients_per_round) if self.options.sampling == "visible" else len(self.clients)

    @property
    def _cycle(self) -> int:
        """Rounds in which each client sends at most once: 1 with secret coins."""
        return len(self.clients) // self._participants

    def secure_group(self, t: int) -> tuple[int, ...]:
        """Return the clients of a round: all with secret coins; by the public schedule each at most once a cycle of rounds."""
        if self.options.sampling != "visible":
            return tuple(self.clients)
        cycle, place = divmod(t - 1, self._cycle)
        seed = derive_seed(self.protocol.server_seed.encode(), f"participants {cycle}")
        order = np.random.Generator(np.random.Philox(seed)).permutation(self.clients)
        return tuple(sorted(order[place * self._participants : (place + 1) * self._participants].tolist()))

    def secure_code(self, participants: int) -> SumCode | None:
        if not self.secure or participants != self._participants:
            return None
        if (honest := honest_shares(participants, self.setting.privacy)) < 1:
            return None
        sums = self.new_sums()
        return SumCode(
            d=sums.total.size, participants=participants, honest=honest,
            noise_multiplier=given(self.protocol.roster[0].noise_multiplier), clip=sums.unit,
        )  # fmt: skip

    @abstractmethod
    def new_sums(self) -> ClippedSums:
        """Return empty sums of a round's clipped updates."""

    def vector(self, parts: Contribution, counted_in: int | None = None) -> np.ndarray:
        """Return one client's clipped contribution to the sums, (d,) float64.

        Args:
            parts: Parts of the update and their blocks.
            counted_in: Block in which the client is counted, if clients are counted.
        """
        own = self.new_sums()
        own.add(0, parts, counted_in)
        return own.total.reshape(-1)

    def sum_securely(self, fed: Federation, step: Any, **tensors: np.ndarray) -> SecureSum:
        """Run the secure sum of a round.

        Args:
            fed: Federation of the clients.
            step: Client step that releases the masked vector.
            **tensors: Its tensors.
        """
        (result,) = secure_sums(fed, step, {self.secure_group(fed.round): tensors}).values()
        return result

    def start(self, fed: Federation) -> State:
        return State(models=fed.initial_model()[None], assignment=[0] * len(fed.clients))


def sampling_of(asked: str, adjacency: str) -> Literal["poisson", "fixed"]:
    """Choose the sampling of a round.

    Args:
        asked: The option: "poisson", "fixed" or "auto".
        adjacency: Adjacency of the privacy target, which decides for "auto".
    """
    if asked == "auto":
        return "fixed" if adjacency == "replace-one" else "poisson"
    return "fixed" if asked == "fixed" else "poisson"


def round_slot(options: Any, setting: Setting, *parts: tuple[str, float]) -> CentralSlot:
    """Build the central slot of one round.

    Args:
        options: Options of a client-level algorithm.
        setting: Public facts of the run.
        parts: (name, share of 1 / z^2) of each release of the round; the sums alone by default.
    """
    sampling = sampling_of(options.sampling, setting.privacy.adjacency)
    per_round = float(options.sampling_rate * setting.clients)
    size = round(per_round) if sampling == "fixed" else per_round
    return CentralSlot("round", sampling, size, setting.clients, parts or (("sums", 1.0),))
