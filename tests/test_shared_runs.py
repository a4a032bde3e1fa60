"""A run that tests share is made once for all test processes, and is never changed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from shared_runs import shared_run


class Maker:
    """Writes a run folder of one file and counts its calls; the first `failures` calls fail halfway."""

    def __init__(self, failures: int = 0) -> None:
        self.calls, self.failures = 0, failures

    def __call__(self, out: Path) -> Path:
        self.calls += 1
        assert not [*out.iterdir()]
        (out / "run").mkdir()
        (out / "run" / "run.json").write_text("{}")
        if self.calls <= self.failures:
            raise OSError("no space left")
        return out / "run"


@pytest.fixture
def process_of(tmp_path, monkeypatch):
    """Stands for `tmp_path_factory` in a process of pytest-xdist."""
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    return lambda name: SimpleNamespace(getbasetemp=lambda: tmp_path / name)


def test_the_second_process_reads_what_the_first_has_made(process_of):
    make = Maker()
    with shared_run(process_of("gw0"), "tiny", make) as first, shared_run(process_of("gw1"), "tiny", make) as second:
        assert (first, make.calls) == (second, 1)
        assert (second / "run.json").read_text() == "{}"
    with shared_run(process_of("gw1"), "other", make) as other:
        assert (other != first, make.calls) == (True, 2)


def test_a_run_that_failed_is_made_again_from_an_empty_folder(process_of):
    make = Maker(failures=1)
    with pytest.raises(OSError, match="no space left"), shared_run(process_of("gw0"), "tiny", make):
        pass
    with shared_run(process_of("gw1"), "tiny", make) as folder:
        assert (make.calls, (folder / "run.json").exists()) == (2, True)


@pytest.mark.parametrize("change", [lambda run: (run / "run.json").write_text("[]"), lambda run: (run / "new").touch()])
def test_a_test_that_changes_it_fails_the_session(process_of, change):
    with (
        pytest.raises(AssertionError, match=r"tests changed .*\['(run.json|new)'\]"),
        shared_run(process_of("gw0"), "tiny", Maker()) as folder,
    ):
        change(folder)
