"""Device of the cells that other hosts run: the submitting host cannot look for their GPUs, so that the sweep states it."""

from __future__ import annotations

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.experiment.config_schema import Config
from dpcfl_net.launch.new_run import check_gpus
from dpcfl_net.launch.sweep_grid import Cell

DEVICES = ("cpu", "cuda")


def with_device(config: Config, device: str | None) -> Config:
    """Replace `runtime.device: auto` by the device of a sweep.

    Args:
        config: The configuration.
        device: One of DEVICES; None: leave the configuration unchanged.
    """
    if device is None or config.runtime.device != "auto":
        return config
    return config.model_copy(update={"runtime": config.runtime.model_copy(update={"device": device})})


def check_devices(cells: list[Cell], device: str | None) -> None:
    """Check that every cell gets the device that its configuration asks for.

    Args:
        cells: Cells of the sweep.
        device: Device on other hosts; None: the cells run on this machine.

    Raises:
        ConfigError: For a GPU that this machine lacks, or one that is not requested from the other hosts.
    """
    for cell in cells:
        if device is None:
            check_gpus(cell.config)
        elif device == "cuda" and cell.config.runtime.federation == "in-process":
            raise ConfigError(
                f"runtime.federation is 'in-process' (cell {cell.label}): computes on the CPU; give no --gpus, or set it to 'network'"
            )
        elif device == "cpu" and cell.config.runtime.device.startswith("cuda"):
            raise ConfigError(
                f"runtime.device is {cell.config.runtime.device!r} (cell {cell.label}): request GPUs for each cell with --gpus"
            )
