"""The protocol: public part of a signed job, the only part that the coordinator reads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from pydantic import (
    Field,
    InstanceOf,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)

from dpcfl_net.core.canonical import canonical_json
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.frozen import FrozenModel, once
from dpcfl_net.core.roster import ENTRIES, ClientEntry, Roster, RosterFile, RosterReference
from dpcfl_net.core.signed_settings import Communication, LocalTraining, ModelTemplate, PrivacyTarget
from dpcfl_net.core.tuning import Tuning

LARGE_ROSTER = 2_000  # clients from which a run packs keys, groups clients in processes, and samples them in figures
CUT_SHARE = 0.01  # share of delta for batches that constant pace cuts
FORMAT: Literal[3] = 3  # of jobs that this version makes and runs
SECURE_SHARE = 0.001  # share of delta for the distance of a secure sum's noise from a Gaussian


class AggregatorEntry(FrozenModel):
    """One aggregator: it adds the answers of clients `first` to `last` for the server.

    Attributes:
        public_key: CURVE public key; the clients of the group accept no other server.
        first: First client id of the group.
        last: Last client id of the group.
    """

    public_key: str
    first: int = Field(ge=0)
    last: int = Field(ge=0)

    @property
    def clients(self) -> range:
        """Client ids of the group."""
        return range(self.first, self.last + 1)


class Protocol(FrozenModel):
    """Public part of a job, the only part that the coordinator reads.

    Format 1, of earlier versions, holds the roster. Format 2, of earlier versions, names the file of the roster by its hash. Format 3
    has the same fields; payloads of its run are hashed with BLAKE3, before with SHA-256.
    """

    added = ("communication", "aggregators", "tuning")
    format: Literal[1, 2, 3] = FORMAT
    run: str = Field(pattern=r"^[0-9a-f]{32}$")
    name: str
    algorithm: str
    options: dict[str, Any]
    rounds: int = Field(ge=2)
    local: LocalTraining
    privacy: PrivacyTarget
    model: ModelTemplate
    roster: InstanceOf[Roster]
    coordinator_key: str
    observer_key: str
    server_seed: str
    ledger_scope: Literal["run", "dataset"]
    security: Literal["curve", "none"]
    oracle: list[int] | None = None
    curator_noise_multiplier: float | None = Field(default=None, gt=0)  # of a round, if a trusted server adds the noise
    unprotected: list[str] = []  # reasons why there is no finite epsilon; signed
    communication: Communication = Communication()
    aggregators: list[AggregatorEntry] = []
    tuning: Tuning | None = None  # how the settings were chosen, for the statement
    experiment_hash: str

    @field_validator("roster", mode="before")
    @classmethod
    def _open_roster(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, dict) and info.context and "privacy" in info.data:
            reference = RosterReference.model_validate(value)
            return RosterFile(info.context["roster"], reference, partial(entry_problem, info.data["privacy"]))
        if isinstance(value, list):
            entries = all(isinstance(entry, ClientEntry) for entry in value)
            return Roster.of(value if entries else ENTRIES.validate_json(canonical_json(value)))
        return value

    @field_serializer("roster", when_used="json")
    def _name_roster(self, roster: Sequence[ClientEntry]) -> Any:
        if self.format == 1:
            return ENTRIES.dump_python(list(roster), mode="json")
        return Roster.of(roster).reference.model_dump()

    @model_validator(mode="after")
    def _check_aggregators(self) -> Protocol:
        bounds = [-1, *(bound for entry in self.aggregators for bound in (entry.first, entry.last)), len(self.roster)]
        joined = all(bounds[k + 1] == bounds[k] + 1 for k in range(0, len(bounds), 2))
        if self.aggregators and not (joined and all(entry.clients for entry in self.aggregators)):
            raise ValueError("aggregators must name groups of clients in order, each client of the roster once")
        if self.aggregators and self.privacy.central:
            raise ValueError(
                "aggregators must be empty with trust trusted-server: they would read raw updates, and are not trusted"
            )
        return self

    @model_validator(mode="after")
    def _check_error_feedback(self) -> Protocol:
        if self.communication.up.error_feedback and self.privacy.central:
            raise ValueError(
                "communication.up.error_feedback must be false with trust trusted-server: what a client kept of a raw update would tell in "
                "which samples it was before"
            )
        return self

    @model_validator(mode="after")
    def _check_secure_aggregation(self) -> Protocol:
        secure = self.privacy.secure
        if (self.privacy.secure_aggregation is not None) != secure:
            raise ValueError(f"privacy.secure_aggregation belongs to trust secure-aggregation, trust is {self.privacy.trust!r}")
        if secure and self.aggregators:
            raise ValueError("aggregators must be empty with trust secure-aggregation")
        return self

    @model_validator(mode="after")
    def _check_entries(self) -> Protocol:
        if not isinstance(self.roster, RosterFile):  # which checks each entry when it is read
            problem = next(filter(None, (entry_problem(self.privacy, entry) for entry in self.roster)), "")
            if problem:
                raise ValueError(f"roster: {problem}")
        return self

    @property
    def kept_delta(self) -> float:
        """Part of delta reserved for batches that constant pace cuts; 0 for free pace."""
        return CUT_SHARE * self.privacy.delta if self.local.pace == "constant" else 0.0

    @property
    def secure_delta(self) -> float:
        """Part of delta reserved for the distance of a secure sum's noise from a Gaussian; 0 without secure sums."""
        return SECURE_SHARE * self.privacy.delta if self.privacy.secure else 0.0

    @property
    def accounted_delta(self) -> float:
        """Part of delta for the accountant."""
        return self.privacy.delta - self.kept_delta - self.secure_delta

    @property
    def clients(self) -> Sequence[int]:
        """Client ids of the roster, in its order; not to be changed."""
        if isinstance(self.roster, RosterFile):
            return range(len(self.roster))
        return once(self, "clients", lambda: [entry.id for entry in self.roster])

    def client(self, number: int) -> ClientEntry:
        """Return the roster entry of a client; KeyError if it is not in the roster."""
        return Roster.of(self.roster).client(number)

    @property
    def records(self) -> dict[int, float]:
        """Number of training records N_i of each client, in the roster's order; not to be changed."""
        return once(self, "records", lambda: {entry.id: float(entry.records) for entry in self.roster})

    @property
    def has_schedule(self) -> bool:
        """True if a client is away in some rounds by schedule."""
        return once(self, "schedule", lambda: any(entry.rounds is not None for entry in self.roster))

    def epsilon_of(self, entry: ClientEntry) -> float:
        """Return the target epsilon of a client: its own one, or that of the job."""
        return self.privacy.epsilon if entry.epsilon is None else entry.epsilon

    @property
    def epsilon(self) -> float:
        """Largest target epsilon of a client."""
        return once(self, "epsilon", lambda: max(map(self.epsilon_of, self.roster), default=self.privacy.epsilon))

    def server_key(self, client: int) -> str:
        """Return the public key of the server that a client connects to: its aggregator's, or the coordinator's."""
        return next((entry.public_key for entry in self.aggregators if client in entry.clients), self.coordinator_key)


def entry_problem(privacy: PrivacyTarget, entry: ClientEntry) -> str:
    """Say why a roster entry does not fit the job's privacy target.

    Args:
        privacy: Privacy target of the job.
        entry: The entry.

    Returns:
        The reason; empty if the entry fits.
    """
    if (entry.identity is not None) != privacy.secure:
        return "each client has an identity with trust secure-aggregation, and only there"
    if entry.epsilon is not None and (privacy.unit, privacy.trust) != ("sample", "untrusted-server"):
        return "a client has its own epsilon only with unit sample and trust untrusted-server"
    return ""


def check_runnable(protocol: Protocol) -> None:
    """Check that this version can run a job; it reads metrics, models, reports and ledgers of older ones.

    Args:
        protocol: The protocol.

    Raises:
        ConfigError: For a job of an older format: ids of its debits and hashes of its kept releases are made from SHA-256.
    """
    if protocol.format != FORMAT:
        raise ConfigError(
            f"the job (protocol.json) has format {protocol.format}, and this version of dpcfl_net runs format {FORMAT}, whose payload "
            "hashes differ: finish the run with the version that started it, or start a new run from its config.yaml; for a cell of a sweep or "
            "tuning, delete the run's folder"
        )
