"""Public part of a signed job, the only part that the coordinator reads; its canonical form and hash."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import (
    Field,
    InstanceOf,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_serializer,
    model_validator,
)

from dpcfl_net.core.canonical import canonical_json
from dpcfl_net.core.errors import ConfigError, Refused
from dpcfl_net.core.files import read_bytes
from dpcfl_net.core.frozen import FrozenModel as FrozenModel
from dpcfl_net.core.frozen import invalid_fields as invalid_fields
from dpcfl_net.core.roster import ENTRIES, MOST_EPSILON, Roster, RosterFile, RosterReference
from dpcfl_net.core.roster import ClientEntry as ClientEntry
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.signing import check_signature
from dpcfl_net.core.tuning import Tuning
from dpcfl_net.core.types import Adjacency

LARGE_ROSTER = 2_000  # clients from which a run packs keys, groups clients in processes, and samples them in figures
SHOWN = 20  # clients that a comparison of two jobs names
CUT_SHARE = 0.01  # share of delta for batches that constant pace cuts
FORMAT: Literal[3] = 3  # of jobs that this version makes and runs
SECURE_SHARE = 0.001  # share of delta for the distance of a secure sum's noise from a Gaussian


PartType = TypeVar("PartType", bound=FrozenModel)
Value = TypeVar("Value")


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


class LocalTraining(FrozenModel):
    """Local training: DP-SGD with secret random batches (R-DPCFL, Algorithm 1), or plain SGD under a trusted server."""

    epochs: int = Field(default=1, ge=1, le=10_000, description="local epochs a round (K)")
    batch_size: int = Field(
        default=32, ge=1, le=10_000_000, description="batch size; for DP-SGD the expected size of a Poisson batch (b)"
    )
    lr: float = Field(default=0.1, gt=0, le=1e6, allow_inf_nan=False, description="learning rate")
    clip: float = Field(
        default=1.0, ge=1e-9, le=1e9, allow_inf_nan=False,
        description="clip norm: of a record's gradient (c), or of a client's whole update (C) with unit client",
    )  # fmt: skip
    momentum: float = Field(default=0.0, ge=0, lt=1, allow_inf_nan=False, description="plain SGD only; 0 for DP-SGD")
    weight_decay: float = Field(default=0.0, ge=0, le=1e6, allow_inf_nan=False, description="plain SGD only; 0 for DP-SGD")
    pace: Literal["free", "constant"] = Field(
        default="free",
        description="DP-SGD only: free: the duration of a step depends on its batch size, which the server can observe; "
        "constant: every step computes the same number of padded batches, and larger batches are cut with a probability "
        "that delta covers",
    )
    deadline_s: float | None = Field(
        default=None, gt=0, le=1e6, allow_inf_nan=False,
        description="pace constant: an answer is sent a multiple of this many seconds after its task; null: immediately",
    )  # fmt: skip
    precision: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="DP-SGD only: precision of forward and backward passes; bfloat16 needs avx512_bf16 or AMX on every worker; "
        "clipping, sums and noise are in float32 or wider",
    )
    sampling: Literal["poisson", "allocation"] = Field(
        default="poisson",
        description="DP-SGD only: poisson: each record is in each batch with probability b/N; allocation: each record is in one of "
        "the ceil(N/b) batches of each epoch, drawn uniformly, which costs less epsilon under zero-out at equal noise",
    )

    @model_serializer(mode="wrap")
    def _without_added_defaults(self, standard: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Omit these fields when they have their defaults so that the job hash is unchanged.
        added = {"precision": "float32", "sampling": "poisson"}
        return {key: value for key, value in standard(self).items() if key not in added or added[key] != value}


class SecureAggregation(FrozenModel):
    """Terms of secure sums: how many participants must answer, and how many may work with the server."""

    threshold: float = Field(
        default=2 / 3, ge=2 / 3, le=1, allow_inf_nan=False,
        description="fraction of the participants of a sum that must answer; always more than two thirds of them",
    )  # fmt: skip
    colluders: int = Field(
        default=0, ge=0, le=1_000_000,
        description="most participants of a sum that may work with the server; the noise of the others protects the sum",
    )  # fmt: skip
    neighbours: int | None = Field(
        default=None, ge=64, le=1_000_000, multiple_of=2,
        description="other participants with which each one shares masks, with more than 64 participants; even; null: enough "
        "for 30 % drop-outs",
    )  # fmt: skip
    stage_deadline_s: float = Field(
        default=0.2, gt=0, le=1e6, allow_inf_nan=False,
        description="unit client: the answers of a sum before and after the masked vector are sent a multiple of this many "
        "seconds after their task; local.deadline_s is that of the masked vector",
    )  # fmt: skip


class PrivacyTarget(FrozenModel):
    """Privacy guarantee of every client, and the side that adds the noise."""

    epsilon: float = Field(
        ge=1e-9, le=MOST_EPSILON, allow_inf_nan=False, description="target epsilon of every client over the whole run"
    )
    delta: float = Field(gt=0, lt=1, allow_inf_nan=False, description="target delta")
    unit: Literal["sample", "client"] = Field(
        default="sample", description="protected unit: one training record, or all data of one client"
    )
    adjacency: Adjacency = Field(default="zero-out", description="neighbouring relation")
    accountant: Literal["pld", "rdp"] = Field(default="pld", description="how events are composed")
    noise: Literal["os", "seeded"] = Field(
        default="os", description="os: keys from the operating system; seeded: reproducible, without any epsilon (INSECURE)"
    )
    trust: Literal["untrusted-server", "trusted-server", "secure-aggregation"] = Field(
        default="untrusted-server",
        description="who adds the noise: each client, a server that receives raw updates, or all clients of a secure sum "
        "together, of whose updates the server learns the sum only",
    )
    secure_aggregation: SecureAggregation | None = Field(
        default=None, description="trust secure-aggregation only: terms of secure sums; null: the defaults"
    )

    @property
    def secure(self) -> bool:
        """True with secure sums."""
        return self.trust == "secure-aggregation"

    @model_serializer(mode="wrap")
    def _without_unused_terms(self, standard: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Omit `secure_aggregation` when unset so that the job hash is unchanged.
        return {key: value for key, value in standard(self).items() if key != "secure_aggregation" or value is not None}


class ModelTemplate(FrozenModel):
    """Model shapes that every tensor on the wire must fit; `initial_seed` is public. Regression has one output."""

    name: str
    task: Literal["classification", "regression"] = "classification"
    input_shape: list[int]
    classes: int = Field(ge=1)
    layout: list[tuple[str, list[int]]]
    parameters: int = Field(ge=1)
    initial_seed: int


class Upload(FrozenModel):
    """Form in which a client sends its updates; applied to what its mechanism released, so it costs no privacy."""

    form: Literal["float32", "int8", "top-k"] = Field(
        default="float32",
        description="int8: one byte a coordinate and a scale for each block; top-k: the largest coordinates and their indices",
    )
    fraction: float | None = Field(default=None, gt=0, le=1, description="top-k: fraction of the coordinates that is sent")
    error_feedback: bool = Field(
        default=False, description="top-k: the client adds the coordinates that it did not send to its next release"
    )

    @model_validator(mode="after")
    def _check_form(self) -> Upload:
        if (self.fraction is not None) != (self.form == "top-k"):
            raise ValueError(f"fraction is {self.fraction}: required with form top-k and only there, form is {self.form!r}")
        if self.error_feedback and self.form != "top-k":
            raise ValueError(f"error_feedback is true: belongs to form top-k, form is {self.form!r}")
        return self


class Communication(FrozenModel):
    """Forms in which models and updates cross the wire."""

    down: Literal["float32", "float16", "bfloat16"] = Field(
        default="float32", description="form of the models that the server sends; clients train from the rounded model"
    )
    up: Upload = Field(default=Upload(), description="form of the updates that clients send")


class Protocol(FrozenModel):
    """Public part of a job, the only part that the coordinator reads.

    Format 1, of earlier versions, holds the roster. Format 2, of earlier versions, names the file of the roster by its hash. Format 3
    has the same fields; payloads of its run are hashed with BLAKE3, before with SHA-256.
    """

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

    @model_serializer(mode="wrap")
    def _without_unused_parts(self, standard: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Omit parts with their default values so that the job hash is unchanged.
        used = {
            "communication": self.communication != Communication(),
            "aggregators": bool(self.aggregators),
            "tuning": self.tuning is not None,
        }
        return {key: value for key, value in standard(self).items() if used.get(key, True)}

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
    """Say why a roster entry does not fit the job's privacy target; empty if it does."""
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
            "hashes differ: finish the run with the version that started it, or start a new run from its config.yaml"
        )


def canonical(part: FrozenModel) -> bytes:
    """Return the canonical JSON of a part, which is hashed and signed; errors as `canonical_json`."""
    return canonical_json(part.model_dump(mode="json"))


_found: dict[int, dict[Hashable, Any]] = {}  # by the identity of parts that are alive


def once(part: FrozenModel, name: Hashable, compute: Callable[[], Value]) -> Value:
    """Compute a value of a part once per object: with 100,000 clients a pass over the roster takes a tenth of a second.

    Args:
        part: The part, which never changes.
        name: Name of the value.
        compute: Computes the value; it must not refer to the part.
    """
    if id(part) not in _found:
        _found[id(part)] = {}
        weakref.finalize(part, _found.pop, id(part), None)
    found = _found[id(part)]
    if name not in found:
        found[name] = compute()
    value: Value = found[name]
    return value


def digest(part: FrozenModel) -> str:
    """Return the sha256 of the canonical JSON, 64 hex digits; the digest of the protocol is the job hash."""
    return once(part, "digest", lambda: hashlib.sha256(canonical(part)).hexdigest())


def derive_seed(secret: bytes, purpose: str, bits: int = 63) -> int:
    """Derive a seed for one purpose; it reveals neither the secret nor the seed of another purpose.

    Args:
        secret: Secret bytes.
        purpose: Name of the purpose.
        bits: Length of the seed in bits, at most 256.
    """
    return int.from_bytes(hashlib.sha256(b"dpcfl-seed\0" + purpose.encode() + b"\0" + secret).digest(), "big") >> (256 - bits)


def read_protocol(path: Path) -> Protocol:
    """Read a protocol file and verify the roster beside it.

    Raises:
        ConfigError: As `read_part`, and if the roster cannot be read.
        Refused: As `read_part`, and "roster" if the roster is not the one that the protocol names.
    """
    protocol = read_part(path, Protocol)
    if isinstance(protocol.roster, RosterFile):
        protocol.roster.verify()
    return protocol


def read_signed_protocol(path: Path, operator_key: str) -> Protocol:
    """Read a protocol file and check the operator's signature; errors as `read_protocol` and `check_signature`."""
    protocol = read_protocol(path)
    check_signature(path, operator_key)
    return protocol


def read_part(path: Path, kind: type[PartType]) -> PartType:
    """Read one part of a job.

    Args:
        path: File of the part.
        kind: Its model.

    Raises:
        ConfigError: If the file cannot be read.
        Refused: "job-invalid" if the content does not fit the model or is not in canonical form.
    """
    data = read_bytes(path)
    try:
        part = kind.model_validate_json(data, context={"roster": RunFolder(path.parent).roster})
    except ValidationError as error:
        raise Refused("job-invalid", f"{path}: {invalid_fields(error)}") from None
    if not _is_canonical(part, data):
        raise Refused("job-invalid", f"{path} is not in canonical form")
    once(part, "digest", lambda: hashlib.sha256(data).hexdigest())
    return part


def _is_canonical(part: FrozenModel, data: bytes) -> bool:
    """Return True if the bytes are canonical; infinity can be read but has no canonical form."""
    try:
        return canonical(part) == data
    except ValueError:
        return False


def differences(mine: FrozenModel, theirs: FrozenModel) -> list[str]:
    """List the fields in which two job parts differ, one line per field, and the first clients in which their rosters do."""
    found: list[str] = []

    def walk(path: str, a: Any, b: Any) -> None:
        if isinstance(a, dict) and isinstance(b, dict):
            for key in sorted({*a, *b}):
                walk(f"{path}.{key}" if path else key, a.get(key), b.get(key))
        elif a != b:
            found.append(f"{path}: {a!r} here, {b!r} there")

    documents = [part.model_dump(mode="json") for part in (mine, theirs)]
    if not (isinstance(mine, Protocol) and isinstance(theirs, Protocol)):
        walk("", *documents)
        return found
    rosters = [document.pop("roster") for document in documents]
    walk("", *documents)
    return [*found, *(_different_clients(mine, theirs) if rosters[0] != rosters[1] else ())]


def _different_clients(mine: Protocol, theirs: Protocol) -> Iterator[str]:
    """Describe how two rosters differ: their numbers of clients, and the first SHOWN clients that differ."""
    counts = len(mine.roster), len(theirs.roster)
    if counts[0] != counts[1]:
        yield f"roster: {counts[0]} clients here, {counts[1]} there"
    both = zip(mine.roster, theirs.roster, strict=False)
    different = ((a.model_dump(), b.model_dump()) for a, b in both if a != b)
    for a, b in islice(different, SHOWN):
        fields = [f"{key} {a.get(key)!r} here, {b.get(key)!r} there" for key in sorted({*a, *b}) if a.get(key) != b.get(key)]
        yield f"roster: client {a['id']}: {'; '.join(fields)}"
    if more := sum(1 for _ in different):
        yield f"roster: {more} more clients differ"
