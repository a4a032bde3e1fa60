"""The `data` section of a configuration: settings, and combinations that are impossible on any records."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from dpcfl_net.core.files import shown
from dpcfl_net.core.frozen import FrozenModel
from dpcfl_net.core.plugins import is_plugin
from dpcfl_net.data import regression
from dpcfl_net.data.datasets import MIX, NAMES
from dpcfl_net.data.files import FORMATS, FileSource
from dpcfl_net.data.quantity import SizeLaw
from dpcfl_net.data.shifts import NAMES as SHIFTS
from dpcfl_net.data.shifts import ShiftName, most_clusters

MOST_CLIENTS, MOST_RECORDS = 1_000_000, 100_000_000
OWNED = ("natural", "roles")  # partitions whose clients are owners that the data set names
UNMIXABLE = ("shakespeare", "regression", *FORMATS)


class DataSettings(FrozenModel):
    """The `data` section of a configuration."""

    added = ("sizes", "files", "min_per_client", "central_test", "evaluate")
    dataset: str = Field(
        "digits",
        description="digits, mnist, fashion-mnist, cifar10, cifar100, emnist-balanced (or -byclass, -bymerge, -digits, "
        "-letters, -mnist), shakespeare, regression; one for each true cluster, as mnist+fashion-mnist; files of your own: npz, "
        "leaf, image-folder, huggingface; or your own function: package.module:function",
    )
    clients: list[int] = Field([2, 2, 2, 2], min_length=1, description="clients in each true cluster, e.g. [3, 6, 6, 6]")
    shift: ShiftName | list[ShiftName] = Field(
        "rotation",
        description="difference of cluster k, or a list of differences: images rotated by k * 90 degrees; labels shifted to "
        "(y + k) mod classes, or permuted; images with inverted contrast (odd k), blurred by k / 2 pixels, with Gaussian noise "
        "of k / 10 of the largest value, or with permuted colours; another line (regression); or none",
    )
    partition: Literal["equal", "dirichlet", "roles", "natural"] = Field(
        "equal",
        description="equal: random shares of equal size; dirichlet: equal size with different label proportions for each "
        "client; roles: each speaking role is a client (shakespeare); natural: the clients that the records name",
    )
    alpha: float | None = Field(
        None,
        ge=1e-3,
        le=1e6,
        allow_inf_nan=False,
        description="partition dirichlet: concentration; small values give uneven labels",
    )
    train_per_client: int | None = Field(
        None,
        ge=1,
        le=MOST_RECORDS,
        description="training records per client; null: as many as equal disjoint slices allow, at most the papers' share; "
        "partition natural: at most this many; null: all",
    )
    min_per_client: int | None = Field(
        None,
        ge=1,
        le=MOST_RECORDS,
        description="partition natural: clients with fewer training records are left out; null: none",
    )
    sizes: list[int] | SizeLaw | None = Field(
        None,
        description="partition equal: training records of each client, cluster by cluster, or a law of unequal sizes, as "
        "{law: lognormal, spread: 1.0}, with train_per_client as their mean; null: equal sizes",
    )
    validation: float = Field(
        0.0, ge=0, lt=1, allow_inf_nan=False, description="fraction of a client's training records for validation"
    )
    evaluate: Literal["test", "validation"] = Field(
        "test", description="records on which the observer evaluates: test, or validation for the trials of `dpcfl tune`"
    )
    test_per_client: int | None = Field(
        None,
        ge=1,
        le=MOST_RECORDS,
        description="test records per client; null: equal disjoint slices of the test set, at most the papers' share; "
        "partition natural: at most this many; null: all",
    )
    central_test: int | None = Field(
        None,
        ge=1,
        le=MOST_RECORDS,
        description="number of records of a public test set, taken from the data set's test split, which no client holds; the "
        "observer evaluates every client's model on it, never the server; null: none",
    )
    noise: float | None = Field(
        None, ge=0, le=1e6, allow_inf_nan=False,
        description=f"dataset regression: standard deviation around the line; null: {regression.NOISE}",
    )  # fmt: skip
    files: FileSource | None = Field(None, description="dataset npz, leaf, image-folder or huggingface: your files")
    sha256: str | None = Field(
        None,
        pattern="^[0-9a-f]{64}$",
        description="content hash of a data set of your own; null: the current content, which the job pins",
    )

    @field_validator("clients")
    @classmethod
    def _countable(cls, clients: list[int]) -> list[int]:
        if any(size < 1 for size in clients) or sum(clients) > MOST_CLIENTS:
            raise ValueError(f"is {shown(clients)}: must be whole numbers from 1 on, together at most {MOST_CLIENTS:,}")
        return clients

    @field_validator("shift")
    @classmethod
    def _together(cls, shift: ShiftName | list[ShiftName]) -> ShiftName | list[ShiftName]:
        if isinstance(shift, list) and (not shift or len(set(shift)) < len(shift) or {"none", "line"} & set(shift)):
            allowed = ", ".join(name for name in SHIFTS if name not in ("none", "line"))
            raise ValueError(f"is {shown(shift)}: a list must name different shifts of {allowed}")
        return shift

    @model_validator(mode="after")
    def _possible(self) -> DataSettings:
        if problem := _contradiction(self):
            raise ValueError(problem)
        # The limit of label-flip depends on the classes of the records (`shifts.problems`).
        most = None if "label-flip" in self.shifts else most_clusters(self.shifts, classes=1)
        if most is not None and len(self.clients) > most and len(self.datasets) == 1:
            raise ValueError(f"shift {self.shift!r} makes at most {most} different clusters, clients has {len(self.clients)}")
        if self.sha256 is not None and not is_own(self.dataset):
            raise ValueError(f"sha256 belongs to a data set of your own; dataset is {self.dataset!r}")
        return self

    @property
    def datasets(self) -> list[str]:
        """Data set of each true cluster of a mixture, or the one data set of all."""
        return self.dataset.split(MIX)

    @property
    def shifts(self) -> tuple[str, ...]:
        """Shifts of every cluster together; none: empty."""
        return tuple(self.shift) if isinstance(self.shift, list) else () if self.shift == "none" else (self.shift,)

    @property
    def client_count(self) -> int:
        """Number of clients of all true clusters together."""
        return sum(self.clients)

    @property
    def true_clusters(self) -> list[int]:
        """True cluster of each client, in natural order."""
        return [cluster for cluster, size in enumerate(self.clients) for _ in range(size)]

    @property
    def central_evaluations(self) -> int:
        """Records of the central test set that a round evaluates at least: all of them for each true cluster."""
        if self.central_test is None or self.evaluate != "test":
            return 0
        differ = self.shifts or len(self.datasets) > 1
        return self.central_test * (len(self.clients) if differ else 1)

    @property
    def clusters_known(self) -> bool:
        """True if `true_clusters` describes how clients differ; False with label skew, roles, or natural clients alone."""
        return self.partition == "equal" or (self.partition == "natural" and len(self.clients) > 1)


def is_own(dataset: str) -> bool:
    """Return True for a data set of the user's: files, or a function.

    Args:
        dataset: Name of the data set.
    """
    return dataset in FORMATS or is_plugin(dataset)


def _contradiction(data: DataSettings) -> str | None:
    """Message about the first contradiction between the settings; None without one, or with a data set of unknown name."""
    if any(name not in NAMES and not is_plugin(name) for name in data.datasets):
        return None  # what belongs to it is unknown; the check of its name reports it
    if data.evaluate == "validation" and not data.validation:
        return "evaluate is 'validation': needs validation above 0, for example data.validation=0.2"
    return _of_dataset(data) or _of_partition(data) or _of_sizes(data)


def _of_dataset(data: DataSettings) -> str | None:
    synthetic, text = data.dataset == "regression", data.dataset == "shakespeare"
    if data.dataset in FORMATS and data.files is None:
        return f"files is missing: dataset {data.dataset!r} needs it, as {{path: my_folder}}"
    if data.files is not None and data.dataset not in FORMATS:
        return f"files belongs to dataset {', '.join(FORMATS)}; dataset is {data.dataset!r}"
    if len(data.datasets) > 1 and (problem := _of_mixture(data)):
        return problem
    if synthetic != (data.shift == "line"):
        return f"shift 'line' and dataset 'regression' go together only, got {data.shift!r} with {data.dataset!r}"
    if text != (data.partition == "roles"):
        return f"partition 'roles' and dataset 'shakespeare' go together only, got {data.partition!r} with {data.dataset!r}"
    if text and (data.shifts or len(data.clients) > 1):
        return (
            f"dataset 'shakespeare' has no known clusters: shift must be 'none' and clients one number, [{data.client_count}]; "
            f"got {data.shift!r} and {data.clients}"
        )
    if synthetic and data.partition != "equal":
        return f"partition must be 'equal' for dataset 'regression', which has no labels, got {data.partition!r}"
    if data.noise is not None and not synthetic:
        return f"noise belongs to dataset 'regression', got {data.noise} with {data.dataset!r}"
    return None


def _of_mixture(data: DataSettings) -> str | None:
    names = data.datasets
    if odd := [name for name in names if name in UNMIXABLE or is_plugin(name)]:
        return f"dataset is {data.dataset!r}: {odd[0]!r} cannot be joined by +; write a function that returns all records"
    if len(set(names)) < len(names):
        return f"dataset is {data.dataset!r}: names a data set twice"
    if len(names) != len(data.clients):
        clusters = len(data.clients)
        return f"dataset is {data.dataset!r}: has {len(names)} data sets, one for each true cluster; clients has {clusters}"
    if data.partition != "equal":
        return f"partition must be 'equal' with several data sets, got {data.partition!r}"
    return None


def _of_partition(data: DataSettings) -> str | None:
    if data.partition == "dirichlet" and data.shifts:
        return (
            f"shift must be 'none' with partition 'dirichlet', got {data.shift!r}: clients of one cluster would differ, so "
            "that there would be no true clusters"
        )
    if (data.alpha is not None) != (data.partition == "dirichlet"):
        return f"alpha belongs to partition 'dirichlet', which needs it; got {data.alpha} with {data.partition!r}"
    if data.partition == "dirichlet" and len(data.clients) > 1:
        return (
            "partition 'dirichlet' has no known clusters, and clusters would share records: clients must be one number, "
            f"[{data.client_count}]; got {data.clients}"
        )
    if data.partition == "natural" and not is_own(data.dataset):
        return (
            f"partition 'natural' needs records that name their clients: {', '.join(FORMATS)} or a function of your own; "
            f"got {data.dataset!r}"
        )
    if data.partition == "natural" and not data.shifts and len(data.clients) > 1:
        return (
            "partition 'natural' with shift 'none' has no known clusters: clients must be one number, "
            f"[{data.client_count}]; got {data.clients}"
        )
    if data.central_test is not None and data.partition == "roles":
        return f"central_test is {data.central_test}: must be null with partition 'roles', where every test window belongs to a role"
    if data.min_per_client is not None and data.partition != "natural":
        return f"min_per_client belongs to partition 'natural', got {data.min_per_client} with {data.partition!r}"
    if data.min_per_client is not None and data.train_per_client is not None and data.min_per_client > data.train_per_client:
        return f"min_per_client is {data.min_per_client}: must be at most train_per_client, {data.train_per_client}"
    return None


def _of_sizes(data: DataSettings) -> str | None:
    if data.sizes is not None and data.partition != "equal":
        return f"sizes belongs to partition 'equal', got {data.partition!r}"
    if isinstance(data.sizes, list):
        if data.train_per_client is not None:
            return "train_per_client must be null with a list of sizes"
        if len(data.sizes) != data.client_count or min(data.sizes) < 1:
            return f"sizes is {shown(data.sizes)}: must be {data.client_count} whole numbers from 1 on, one for each client"
    return None
