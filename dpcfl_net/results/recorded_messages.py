"""Messages of a transcript with decoded models and updates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dpcfl_net.core.errors import ConfigError, Refused
from dpcfl_net.core.run_folder import RunFolder
from dpcfl_net.core.tensors import describe
from dpcfl_net.federation.capabilities import ClientSide, client_steps
from dpcfl_net.federation.message_encoding import MessageEncoding
from dpcfl_net.results.run_files import mapping, read_mapping
from dpcfl_net.transport import transcript
from dpcfl_net.transport.messages import Header, match_template
from dpcfl_net.transport.transcript import Record


def transcript_of(folder: Path, kept: str = "full") -> Path:
    """Return the transcript of a run, for a reader of its messages.

    Args:
        folder: Run folder.
        kept: The least `output.transcript` that the reader needs, for the error.

    Raises:
        ConfigError: If the run recorded none.
    """
    path = RunFolder(folder).transcript
    if path.exists():
        return path
    needed = {"output.transcript": kept, "runtime.federation": "network", "runtime.aggregators": 0}
    config = read_mapping(RunFolder(folder).config, [])
    if config:  # name only the settings that the run had otherwise
        own = {key: mapping(config, key.partition(".")[0]).get(key.partition(".")[2]) for key in needed}
        needed = {key: value for key, value in needed.items() if own[key] != value}
        if (recorded := own["output.transcript"]) != "off":
            raise ConfigError(
                f"{folder} has no {path.name}, though its output.transcript is {recorded!r}: it was removed, or the coordinator, which writes "
                "it, has not started in this folder"
            )
    settings = " ".join(f"{key}={value}" for key, value in needed.items())
    raise ConfigError(f"{folder} has no {path.name}: record the run with {settings}")


def why_no_tensors(folder: Path) -> str:
    """Say why the transcript of a run holds no tensors that a reader looks for.

    Args:
        folder: Run folder.
    """
    output = mapping(read_mapping(RunFolder(folder).config, []), "output")
    if output.get("transcript") == "full":
        return "it is full, and no client answered such a task"
    return "it must be full: output.transcript=full"


def decoded_messages(path: Path, algorithm: ClientSide) -> Iterator[tuple[Record, Header, dict[str, np.ndarray] | None]]:
    """Yield the messages of a transcript as `transcript.messages`, with tensors as client steps take and give them.

    Args:
        path: The transcript.
        algorithm: The job's algorithm.

    Yields:
        First record, header and tensors. Tensors are None where they were not kept or do not fit the job (the receiver refused
        them).
    """
    steps, encoding = client_steps(algorithm), MessageEncoding(algorithm)
    for record, header, tensors in transcript.messages(path):
        step = steps.get(header.task)
        if tensors and step is not None:
            try:
                if header.kind == "TASK":
                    match_template(describe(tensors), encoding.task_template(step))
                    tensors = encoding.decode_task(step, tensors)
                else:
                    match_template(describe(tensors), encoding.release_template(step))
                    tensors = encoding.decode_release(step, tensors)
            except Refused:
                tensors = None
        yield record, header, tensors
