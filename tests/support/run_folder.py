"""A realistic run folder in the format of the processes, as input of the tests of report and screen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

START = 1_760_000_000.0
SIZES = (3, 6, 6, 6)


def true_clusters(seed: int = 3) -> list[int]:
    """The true cluster of each of 21 clients, in a shuffled order."""
    return np.random.default_rng(seed).permutation(np.repeat(range(len(SIZES)), SIZES)).tolist()


def privacy(**changes: Any) -> dict[str, Any]:
    """run.json's privacy section."""
    return {
        "unit": "sample",
        "adjacency": "zero-out",
        "trust": "untrusted-server",
        "epsilon": 5.0,
        "delta": 1e-4,
        "accountant": "pld",
        "noise_multiplier": {"min": 1.26876, "max": 1.26876},
        "epsilon_spent": 4.98,
        "epsilon_replace_one": 10.87,
        "claim_of_paper": "epsilon 5 by a subtracted selection budget",
        "ledger_scope": "run",
        "covered": ["model updates of every round", "cluster selections", "identifiers"],
        "not_covered": [
            "floating-point effects beyond the stated grid",
            "hyper-parameter search",
            "public test evaluation by the observer",
        ],
        "insecure": False,
        **changes,
    }


def run_json(**changes: Any) -> dict[str, Any]:
    """run.json of a finished R-DPCFL run."""
    final = {
        "accuracy_mean": 0.712,
        "accuracy_worst": 0.655,
        "accuracy_minority": 0.698,
        "accuracy_by_cluster": [0.698, 0.71, 0.72, 0.715],
        "clusters_recovered": True,
        "minority_recovered": True,
        "ari": 1.0,
        "diagnostics": {"MSS": 31.4, "uncorrected MSS": 52.0, "MPO": 0.0},
        "clusters": 4,
    }
    return {
        "name": "fmnist-r-dpcfl",
        "algorithm": "r-dpcfl",
        "state": "finished",
        "rounds_done": 40,
        "wall_s": 168.2,
        "processes": 23,
        "bytes_up": 97_000_000,
        "bytes_down": 110_000_000,
        "privacy": privacy(),
        "final": final,
        "versions": {},
        "seed": 0,
        **changes,
    }


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    """Append lines to a JSON-lines file."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def phase(at: int, rounds: int) -> str:
    """The phase of an R-DPCFL round."""
    return "first" if at == 1 else "soft" if at <= rounds // 2 else "window" if at <= rounds // 2 + rounds // 10 else "frozen"


def write_round(folder: Path, at: int, rounds: int, missing: tuple[int, ...] = ()) -> None:
    """Append all lines of one round."""
    true, rng = true_clusters(), np.random.default_rng(at)
    clients, begin = len(true), START + 5 * at
    reached = 0.75 * (1 - np.exp(-at / 9)) + 0.1
    by_cluster = [reached - 0.015 * (3 - cluster) + rng.normal(0, 0.006) for cluster in range(4)]
    by_client = [float(by_cluster[cluster] + rng.normal(0, 0.015)) for cluster in true]
    write_lines(
        folder / "metrics.jsonl",
        [
            {
                "view": "server",
                "round": at,
                "time": begin + 4.2,
                "seconds": 4.1,
                "bytes_up": 21 * 116_000,
                "bytes_down": 21 * 116_000 * (4 if phase(at, rounds) == "window" else 1),
                "answered": clients - len(missing),
                "missing": list(missing),
            },
            {
                "view": "observer",
                "round": at,
                "time": begin + 4.8,
                "accuracy_mean": float(np.mean(by_client)),
                "accuracy_minority": by_cluster[0],
                "accuracy_worst": min(by_client),
                "accuracy_p10": min(by_client),
                "accuracy_by_cluster": by_cluster,
                "accuracy_by_client": by_client,
                "loss_mean": 0.9,
            },
        ],
    )
    assignment: list[int | None] = [(cluster + 1) % 4 for cluster in true]
    if phase(at, rounds) == "soft" and at % 4 == 0:
        assignment[5] = (true[5] + 2) % 4
    if phase(at, rounds) == "first":
        assignment = [None] * clients
    write_lines(
        folder / "clusters.jsonl",
        [
            {
                "view": "server",
                "round": at,
                "assignment": assignment,
                "clusters": 4,
                "diagnostics": {
                    "phase": phase(at, rounds),
                    "sizes": [assignment.count(group) for group in range(4)],
                    "MSS": 31.4,
                    "uncorrected MSS": 52.0,
                    "MPO": 0.0,
                },
            },
            {"view": "observer", "round": at, "ari": 1.0, "recovered": True, "minority_recovered": True},
        ],
    )
    for client in range(clients):
        slot = begin + 0.02 + 0.18 * client
        write_lines(
            folder / "messages.jsonl",
            [
                {
                    "time": slot,
                    "direction": "down",
                    "peer": f"client {client}",
                    "kind": "TASK",
                    "round": at,
                    "bytes": 116_200,
                    "id": f"{at}-{client}",
                }
            ],
        )
        if client in missing:
            continue
        write_lines(
            folder / "messages.jsonl",
            [
                {
                    "time": slot + 0.4,
                    "direction": "up",
                    "peer": f"client {client}",
                    "kind": "RESULT",
                    "round": at,
                    "bytes": 116_180,
                    "id": f"{at}-{client}r",
                }
            ],
        )
        write_lines(
            folder / "spans.jsonl",
            [
                {"who": f"client {client}", "what": what, "round": at, "start": slot + a, "end": slot + b}
                for what, a, b in (("train", 0.03, 0.35), ("send", 0.35, 0.4), ("wait", 0.4, 4.9 - 0.18 * client))
            ],
        )
    write_lines(
        folder / "spans.jsonl",
        [{"who": "observer", "what": "evaluate", "round": at, "start": begin + 4.4, "end": begin + 4.8}],
    )


def write_many(folder: Path, clients: int, rounds: int) -> list[int]:
    """Write a run folder with many clients, each of which differs from the others; returns their true clusters."""
    write_start(folder, rounds)
    true = [min(3, client % 40) for client in range(clients)]  # sizes 1, 1, 1, 37 of 40
    (folder / "experiment.json").write_text(json.dumps({"true_clusters": true, "data": {}}), encoding="utf-8")
    for at in range(1, rounds + 1):
        accuracy = [(client * at * 7919 % 1000) / 1000 for client in range(clients)]
        spent = [at / rounds * (1 + client / clients) for client in range(clients)]
        seen = {
            "view": "observer", "round": at, "accuracy_mean": 0.5, "accuracy_worst": 0.0, "accuracy_by_cluster": [0.5] * 4,
            "accuracy_by_client": accuracy, "loss_by_client": accuracy,
        }  # fmt: skip
        lines = [seen, {"view": "server", "round": at, "epsilon_spent_by_client": spent}]
        write_lines(folder / "metrics.jsonl", lines)
        shown = {"sizes": [1, 2, at], "distance": accuracy}
        write_lines(
            folder / "clusters.jsonl",
            [{"view": "server", "round": at, "assignment": true, "clusters": 4, "diagnostics": shown}],
        )
    (folder / "run.json").write_text(json.dumps(run_json(rounds_done=rounds)), encoding="utf-8")
    return true


def write_run(folder: Path, rounds: int = 40, **run: Any) -> Path:
    """A whole finished run folder; `run` changes keys of run.json."""
    write_start(folder, rounds)
    for at in range(1, rounds + 1):
        write_round(folder, at, rounds, missing=(7,) if at == 12 else ())
    write_lines(
        folder / "metrics.jsonl",
        [
            {"view": "server", "round": at, "epsilon_spent_by_client": [4.98 * (at / rounds) ** 0.5] * 21}
            for at in range(1, rounds + 1)
        ],
    )
    _write_first_round(folder)
    (folder / "run.json").write_text(json.dumps(run_json(rounds_done=rounds, **run)), encoding="utf-8")
    return folder


def write_start(folder: Path, rounds: int = 40) -> Path:
    """Write the files of a run folder before the first round."""
    folder.mkdir(parents=True, exist_ok=True)
    true = true_clusters()
    (folder / "config.yaml").write_text(
        f"name: fmnist-r-dpcfl\nrounds: {rounds}\nalgorithm: {{name: r-dpcfl}}\n", encoding="utf-8"
    )
    roster = [{"id": client, "public_key": "", "records": 2000, "noise_multiplier": 1.26876} for client in range(len(true))]
    (folder / "protocol.json").write_text(
        json.dumps({"name": "fmnist-r-dpcfl", "algorithm": "r-dpcfl", "rounds": rounds, "roster": roster}), encoding="utf-8"
    )
    data = {
        "dataset": "fashion-mnist",
        "clients": list(SIZES),
        "shift": "rotation",
        "train_per_client": 2000,
        "test_per_client": 500,
    }
    (folder / "experiment.json").write_text(json.dumps({"true_clusters": true, "data": data}), encoding="utf-8")
    started = run_json(state="running", rounds_done=0, privacy=privacy(epsilon_spent=None))
    del started["final"]
    (folder / "run.json").write_text(json.dumps(started), encoding="utf-8")
    return folder


def _write_first_round(folder: Path) -> None:
    true, rng = np.array(true_clusters()), np.random.default_rng(1)
    centres = np.array([[3.0, 1.0], [-2.0, 3.0], [-3.0, -2.0], [2.5, -2.5]])
    labels = (true + 1) % 4
    moved = np.roll(centres, 1, axis=0)
    np.savez(
        folder / "first_round.npz",
        coordinates=centres[true] + rng.normal(0, 0.35, (len(true), 2)),
        posteriors=np.eye(4)[labels],
        labels=labels,
        centres=moved,
        deviations=np.full(4, 0.38),
        candidates=np.arange(2, 9),
        scores=np.array([21.0, 26.0, 31.4, 1.9, 1.2, 0.4, -np.inf]),
        mss=31.4,
        mss_plain=52.0,
        mpo=0.0,
        clusters=4,
    )
