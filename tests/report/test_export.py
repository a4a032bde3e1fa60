"""`dpcfl export`: models, metrics, figures and privacy statement of a run as files."""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from conftest import dpcfl
from run_folder import privacy, true_clusters, write_lines, write_run, write_start
from safetensors.numpy import load_file, save_file

import dpcfl_net as package
from dpcfl_net.core import runlog
from dpcfl_net.core.errors import ConfigError
from dpcfl_net.report.export import export
from dpcfl_net.results.run_view import read_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = write_run(tmp_path / "run", 6)
    (folder / "models").mkdir()
    for name in ("cluster_0", "client_3_personal"):
        save_file({"weight": np.arange(3, dtype=np.float32)}, folder / "models" / f"{name}.safetensors")
    return folder


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_command_writes_and_names_every_file(run: Path) -> None:
    done = dpcfl("export", run)
    assert done.returncode == 0, done.stderr
    written = {path.relative_to(run / "export").as_posix() for path in (run / "export").rglob("*") if path.is_file()}
    assert {Path(line).relative_to(run / "export").as_posix() for line in done.stdout.split()} == written
    assert written >= {
        "models/cluster_0.safetensors",
        "rounds.csv",
        "clients.csv",
        "privacy.json",
        "privacy.txt",
        "figures/accuracy.svg",
    }


def test_models_are_copied_but_no_personal_ones(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out" / "models").iterdir()] == ["cluster_0.safetensors"]
    assert load_file(tmp_path / "out" / "models" / "cluster_0.safetensors")["weight"].tolist() == [0, 1, 2]


def test_metrics_are_tables_by_round_and_by_client(run: Path, tmp_path: Path) -> None:
    repeated = {"view": "server", "round": 6, "seconds": 2.5, "bytes_up": 7, "answered": 19, "missing": [4, 9]}
    write_lines(run / "metrics.jsonl", [repeated])
    export(run, tmp_path)
    rounds, clients = table(tmp_path / "rounds.csv"), table(tmp_path / "clients.csv")
    assert [row["round"] for row in rounds] == ["1", "2", "3", "4", "5", "6"]
    assert (rounds[-1]["seconds"], rounds[-1]["bytes_up"], rounds[-1]["missing"]) == ("6.6", "2436007", "4 9")
    assert 0 < float(rounds[-1]["accuracy_worst"]) < float(rounds[-1]["accuracy"]) < 1
    assert len(clients) == 6 * 21
    last = [row for row in clients if row["round"] == "6"]
    assert list(last[0]) == ["round", "client", "true_cluster", "cluster", "accuracy", "epsilon_spent"]
    assert [int(row["client"]) for row in last] == list(range(21))
    view = read_run(run)
    assert [int(row["cluster"]) for row in last] == view.grouping[6]["assignment"]
    assert [float(row["epsilon_spent"]) for row in last] == view.spent[6]
    assert [int(row["true_cluster"]) for row in last] == true_clusters()
    assert np.mean([float(row["accuracy"]) for row in last]) == pytest.approx(float(rounds[-1]["accuracy"]))


def test_figures_are_drawings_with_their_own_colours(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path)
    figures = sorted((tmp_path / "figures").iterdir())
    assert len(figures) > 8
    for path in figures:
        assert ElementTree.parse(path).getroot().tag.endswith("svg")
        assert "var(" not in path.read_text(encoding="utf-8")


def test_what_an_earlier_export_left_is_removed_and_other_files_stay(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(run, out)
    stale = ["models/cluster_1.safetensors", "models/base.safetensors", "figures/choices.svg", "figures/diagnostics-x.svg"]
    other = ["models/mine.safetensors", "models/cluster_1_of_mine.safetensors", "figures/mine.svg", "notes.csv"]
    for name in [*stale, *other]:
        (out / name).write_text("")
    written = export(run, out)
    assert {path for path in out.rglob("*") if path.is_file()} == {*written, *(out / name for name in other)}


def test_tables_of_an_earlier_export_go_where_the_run_has_no_rounds(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "out")
    (run / "metrics.jsonl").unlink()
    export(run, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.csv"))


def test_the_statement_is_kept_whole(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path)
    assert json.loads((tmp_path / "privacy.json").read_text(encoding="utf-8")) == privacy()
    text = (tmp_path / "privacy.txt").read_text(encoding="utf-8")
    assert "epsilon 5, delta 0.0001, per sample" in text
    assert all(f"- {item}" in text for item in [*privacy()["covered"], *privacy()["not_covered"]])


def test_a_run_without_a_statement_is_refused(tmp_path: Path) -> None:
    folder = write_start(tmp_path / "run")
    (folder / "run.json").unlink()
    with pytest.raises(ConfigError, match="no privacy statement yet; write it with: dpcfl report"):
        export(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_run_folder_itself_is_refused(run: Path) -> None:
    """A model would be copied onto itself."""
    before = sorted(run.rglob("*"))
    with pytest.raises(ConfigError, match=r"must be another one than the run's; the default is .*export$"):
        export(run, run / "models" / "..")
    assert sorted(run.rglob("*")) == before


def test_the_statement_beside_an_export_says_that_it_tells_how_many_clients_a_round_drew(tmp_path: Path) -> None:
    """The bytes of rounds.csv are those of the drawn clients' updates; the statement named the run folder and its report only."""
    settings = {
        "name": "drawn", "rounds": 6, "model": {"name": "linear"}, "local": {"batch_size": 16, "lr": 0.5},
        "data": {"dataset": "digits", "clients": [6], "train_per_client": 30, "test_per_client": 10},
        "algorithm": {"name": "dp-fedavg", "sampling_rate": 0.5},
        "privacy": {"unit": "client", "trust": "trusted-server", "epsilon": 8, "delta": 1e-2},
        "network": {"clock": "virtual", "default": "4g"},
    }  # fmt: skip
    done = package.run(settings, tmp_path, "in-process", progress=False)
    export(done.path, tmp_path / "export")
    drawn = Counter(line["round"] for line in runlog.read(done.path / "messages.jsonl") if line["kind"] == "RESULT")
    sent = {int(row["round"]): int(row["bytes_up"]) for row in table(tmp_path / "export" / "rounds.csv")}
    each = sum(sent.values()) / drawn.total()
    assert {t: round(count / each) for t, count in sent.items()} == {t: drawn[t] for t in sent}
    assert "what is exported or tracked of a run" in (tmp_path / "export" / "privacy.txt").read_text()


@pytest.mark.parametrize("bad", ["run.json", "run.json/below", "a\0b"])
def test_a_folder_that_cannot_be_written_is_a_sentence_with_its_path(run: Path, bad: str, monkeypatch) -> None:
    """It was an OSError of the system, or a ValueError."""
    monkeypatch.chdir(run)  # a long path would be cut in the message
    with pytest.raises(ConfigError, match=re.escape(repr(bad)[1:-1])):
        package.open_run(run).export(bad)


@pytest.mark.parametrize("method", ["export", "trace"])
def test_an_empty_path_is_not_the_current_folder(run: Path, tmp_path: Path, method: str, monkeypatch) -> None:
    """`run.export("")`, as with an unset variable, wrote into the current folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ConfigError, match=r"^out is '': must be a path; write '\.' for the current folder$"):
        getattr(package.open_run(run), method)("")
    assert not list(Path.cwd().iterdir())


@pytest.mark.parametrize("name", ["models/cluster_0.safetensors", "rounds.csv"])
def test_a_file_that_cannot_be_replaced_is_named(run: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "out" / name).mkdir(parents=True)
    with pytest.raises(ConfigError, match=f"^{tmp_path / 'out' / name}: is a folder, not a file"):
        export(run, tmp_path / "out")
