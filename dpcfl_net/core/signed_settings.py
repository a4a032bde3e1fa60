"""Settings in the signed protocol: local training, privacy target, model shapes, forms of models and updates on the wire."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from dpcfl_net.core.frozen import FrozenModel
from dpcfl_net.core.roster import MOST_EPSILON
from dpcfl_net.core.types import Adjacency


class LocalTraining(FrozenModel):
    """Local training: DP-SGD with secret random batches (R-DPCFL, Algorithm 1), or plain SGD under a trusted server."""

    added = ("precision", "sampling")
    epochs: int = Field(default=1, ge=1, le=10_000, description="local epochs a round (K)")
    batch_size: int = Field(
        default=32, ge=1, le=10_000_000, description="batch size; for DP-SGD the expected size of a Poisson batch (b)"
    )
    lr: float = Field(default=0.1, ge=1e-9, le=1e6, allow_inf_nan=False, description="learning rate")
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
        default=None, ge=1e-3, le=1e6, allow_inf_nan=False,
        description="pace constant, or unit client with secure aggregation: an answer is sent a multiple of this many seconds after its "
        "task; null: immediately",
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


class SecureAggregation(FrozenModel):
    """Terms of secure sums: how many participants must answer, and how many may act together or with the server."""

    threshold: float = Field(
        default=2 / 3, ge=2 / 3, le=1, allow_inf_nan=False,
        description="fraction of the participants of a sum that must answer; always more than two thirds of them",
    )  # fmt: skip
    colluders: int = Field(
        default=0, ge=0, le=1_000_000,
        description="largest number of participants of a sum that may act together, with the server or with the models alone; the "
        "noise of the others protects the sum",
    )  # fmt: skip
    neighbours: int | None = Field(
        default=None, ge=64, le=1_000_000, multiple_of=2,
        description="number of other participants with which each one shares masks, in sums of more than 64 participants; even; "
        "null: enough for 30 % drop-outs",
    )  # fmt: skip
    stage_deadline_s: float = Field(
        default=0.2, ge=1e-3, le=1e6, allow_inf_nan=False,
        description="unit client: the answers of a sum before and after the masked vector are sent a multiple of this many "
        "seconds after their task; local.deadline_s is that of the masked vector",
    )  # fmt: skip


class PrivacyTarget(FrozenModel):
    """Privacy guarantee of every client, and the side that adds the noise."""

    added = ("secure_aggregation",)
    epsilon: float = Field(
        ge=1e-9,
        le=MOST_EPSILON,
        allow_inf_nan=False,
        description="target epsilon of every client over the whole run; for a baseline with almost no noise 10000, and runtime.max_epsilon "
        "10000",
    )
    delta: float = Field(gt=0, lt=1, allow_inf_nan=False, description="target delta")
    unit: Literal["sample", "client"] = Field(
        default="sample", description="protected unit: one training or validation record, or all data of one client"
    )
    adjacency: Adjacency = Field(default="zero-out", description="neighbouring relation")
    accountant: Literal["pld", "rdp"] = Field(default="pld", description="how events are composed")
    noise: Literal["os", "seeded"] = Field(
        default="os", description="os: keys from the operating system; seeded: reproducible, without any epsilon (INSECURE)"
    )
    trust: Literal["untrusted-server", "trusted-server", "secure-aggregation"] = Field(
        default="untrusted-server",
        description="who adds the noise: each client; a server that receives raw updates; or all clients of a secure sum "
        "together, so that the server learns only the sum of their updates",
    )
    secure_aggregation: SecureAggregation | None = Field(
        default=None, description="trust secure-aggregation only: terms of secure sums; null: the defaults"
    )

    @property
    def central(self) -> bool:
        """True if a trusted server, which receives raw updates, adds the noise (central differential privacy)."""
        return self.trust == "trusted-server"

    @property
    def secure(self) -> bool:
        """True if releases are added by secure sums."""
        return self.trust == "secure-aggregation"


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
