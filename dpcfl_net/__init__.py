"""Simulator of differentially private clustered federated learning with real processes and an untrusted server.

This module is the public Python API: `import dpcfl_net as dpcfl`. It loads each name on first use, which keeps the import
fast. `help(dpcfl.run)` is a start.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dpcfl_net.algorithms.base import Algorithm as Algorithm
    from dpcfl_net.algorithms.base import Options as Options
    from dpcfl_net.algorithms.base import on_central_server as on_central_server
    from dpcfl_net.algorithms.base import on_client as on_client
    from dpcfl_net.core.errors import ConfigError as ConfigError
    from dpcfl_net.core.errors import DataMissing as DataMissing
    from dpcfl_net.core.errors import DpcflError as DpcflError
    from dpcfl_net.core.errors import LedgerError as LedgerError
    from dpcfl_net.core.errors import Refused as Refused
    from dpcfl_net.core.errors import RunFailed as RunFailed
    from dpcfl_net.core.errors import StopRun as StopRun
    from dpcfl_net.core.types import Release as Release
    from dpcfl_net.core.types import State as State
    from dpcfl_net.core.types import TensorSpec as TensorSpec
    from dpcfl_net.experiment.config_schema import Config as Config
    from dpcfl_net.federation.base import Federation as Federation
    from dpcfl_net.federation.base import Results as Results
    from dpcfl_net.federation.capabilities import Capabilities as Capabilities
    from dpcfl_net.federation.capabilities import Setting as Setting
    from dpcfl_net.federation.central_context import CentralContext as CentralContext
    from dpcfl_net.federation.client import Client as Client
    from dpcfl_net.federation.clipped_sums import ClippedSums as ClippedSums
    from dpcfl_net.launch.api import TuneOptions as TuneOptions
    from dpcfl_net.launch.api import account as account
    from dpcfl_net.launch.api import compare as compare
    from dpcfl_net.launch.api import load as load
    from dpcfl_net.launch.api import open_run as open_run
    from dpcfl_net.launch.api import resume as resume
    from dpcfl_net.launch.api import run as run
    from dpcfl_net.launch.api import sweep as sweep
    from dpcfl_net.launch.api import tune as tune
    from dpcfl_net.launch.api_results import SweepResult as SweepResult
    from dpcfl_net.launch.api_results import TuneResult as TuneResult
    from dpcfl_net.privacy.events.allocated_gaussian import AllocatedGaussian as AllocatedGaussian
    from dpcfl_net.privacy.events.bounded_range_selection import BoundedRangeSelection as BoundedRangeSelection
    from dpcfl_net.privacy.events.data_free import DataFree as DataFree
    from dpcfl_net.privacy.events.fixed_size_gaussian import FixedSizeGaussian as FixedSizeGaussian
    from dpcfl_net.privacy.events.labelled_fixed_size_gaussian import LabelledFixedSizeGaussian as LabelledFixedSizeGaussian
    from dpcfl_net.privacy.events.randomised_response import RandomisedResponse as RandomisedResponse
    from dpcfl_net.privacy.events.sampled_gaussian import SampledGaussian as SampledGaussian
    from dpcfl_net.privacy.events.unprotected import Unprotected as Unprotected
    from dpcfl_net.privacy.slots import CentralSlot as CentralSlot
    from dpcfl_net.privacy.slots import DPSGDSlot as DPSGDSlot
    from dpcfl_net.privacy.slots import GaussianSlot as GaussianSlot
    from dpcfl_net.privacy.slots import LabelledCentralSlot as LabelledCentralSlot
    from dpcfl_net.privacy.slots import LabelSlot as LabelSlot
    from dpcfl_net.privacy.slots import ParticipationSlot as ParticipationSlot
    from dpcfl_net.privacy.slots import RawSlot as RawSlot
    from dpcfl_net.privacy.slots import SecureSlot as SecureSlot
    from dpcfl_net.privacy.slots import SelectionSlot as SelectionSlot
    from dpcfl_net.privacy.slots import StageSlot as StageSlot
    from dpcfl_net.privacy.slots import UnprotectedSlot as UnprotectedSlot
    from dpcfl_net.report.run import Run as Run
    from dpcfl_net.report.trackers.base import Tracker as Tracker
    from dpcfl_net.report.trackers.mlflow import MLflow as MLflow
    from dpcfl_net.report.trackers.tensorboard import TensorBoard as TensorBoard
    from dpcfl_net.report.trackers.wandb import WandB as WandB
    from dpcfl_net.results.comparison import Comparison as Comparison
    from dpcfl_net.results.rounds import RoundMetrics as RoundMetrics

_NAMES = {
    "algorithms.base": ("Algorithm", "Options", "on_central_server", "on_client"),
    "core.errors": ("ConfigError", "DataMissing", "DpcflError", "LedgerError", "Refused", "RunFailed", "StopRun"),
    "core.types": ("Release", "State", "TensorSpec"),
    "experiment.config_schema": ("Config",),
    "federation.base": ("Federation", "Results"),
    "federation.capabilities": ("Capabilities", "Setting"),
    "federation.central_context": ("CentralContext",),
    "federation.client": ("Client",),
    "federation.clipped_sums": ("ClippedSums",),
    "launch.api": ("TuneOptions", "account", "compare", "load", "open_run", "resume", "run", "sweep", "tune"),
    "launch.api_results": ("SweepResult", "TuneResult"),
    "privacy.events.allocated_gaussian": ("AllocatedGaussian",),
    "privacy.events.bounded_range_selection": ("BoundedRangeSelection",),
    "privacy.events.data_free": ("DataFree",),
    "privacy.events.fixed_size_gaussian": ("FixedSizeGaussian",),
    "privacy.events.labelled_fixed_size_gaussian": ("LabelledFixedSizeGaussian",),
    "privacy.events.randomised_response": ("RandomisedResponse",),
    "privacy.events.sampled_gaussian": ("SampledGaussian",),
    "privacy.events.unprotected": ("Unprotected",),
    "privacy.slots": (
        "CentralSlot", "DPSGDSlot", "GaussianSlot", "LabelSlot", "LabelledCentralSlot", "ParticipationSlot", "RawSlot", "SecureSlot",
        "SelectionSlot", "StageSlot", "UnprotectedSlot",
    ),
    "report.run": ("Run",),
    "report.trackers.base": ("Tracker",),
    "report.trackers.mlflow": ("MLflow",),
    "report.trackers.tensorboard": ("TensorBoard",),
    "report.trackers.wandb": ("WandB",),
    "results.comparison": ("Comparison",),
    "results.rounds": ("RoundMetrics",),
}  # fmt: skip
_MODULES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}

__all__ = ["__version__", *_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
