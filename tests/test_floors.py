"""The house: a room imports only from floors below its own, and the coordinator's room never from the data's."""

from __future__ import annotations

import ast

import pytest
from conftest import ROOT

FLOORS = {
    "dpcfl_net.types": 0, "dpcfl_net.errors": 0, "dpcfl_net.tensors": 0, "dpcfl_net.vision": 0, "dpcfl_net.runlog": 0, "dpcfl_net.plugins": 0,
    "dpcfl_net.devices": 0, "dpcfl_net.nvidia_smi": 0, "dpcfl_net.files": 0, "dpcfl_net.names": 0, "dpcfl_net.yaml_file": 0, "dpcfl_net.config_messages": 0,
    "dpcfl_net.signing": 0, "dpcfl_net.run_lock": 0, "dpcfl_net.clock": 0,
    "dpcfl_net.wire": 1, "dpcfl_net.privacy": 1, "dpcfl_net.clustering": 1, "dpcfl_net.data": 1, "dpcfl_net.models": 1, "dpcfl_net.protocol": 1,
    "dpcfl_net.slots": 1, "dpcfl_net.checkpoint": 1, "dpcfl_net.losses": 0, "dpcfl_net.layers": 0, "dpcfl_net.sgd": 1,
    "dpcfl_net.federation": 2,
    "dpcfl_net.algorithms": 3,
    "dpcfl_net.config": 4, "dpcfl_net.config_options": 4, "dpcfl_net.experiment": 4, "dpcfl_net.build": 4, "dpcfl_net.statement": 4, "dpcfl_net.expectations": 4, "dpcfl_net.coordinator": 4, "dpcfl_net.worker": 4, "dpcfl_net.worker_spec": 4, "dpcfl_net.worker_group": 4, "dpcfl_net.observer": 4,
    "dpcfl_net.simulate": 4, "dpcfl_net.one_process": 4, "dpcfl_net.fairness": 4, "dpcfl_net.compare": 4, "dpcfl_net.summary": 4, "dpcfl_net.verify": 4, "dpcfl_net.bench": 4, "dpcfl_net.report": 4,
    "dpcfl_net.reproduce": 4, "dpcfl_net.threats": 4,
    "launch": 5,
}  # fmt: skip


def room(module: str) -> str | None:
    parts = module.split(".")
    names = [".".join(parts[: k + 1]) for k in range(len(parts))]
    return next((name for name in reversed(names) if name in FLOORS), None)


def imports(path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("dpcfl_net", "launch")
    for path in (ROOT / package).rglob("*.py")
}


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"dpcfl_net"}))
def test_a_room_imports_from_floors_below_its_own(module):
    own = room(module)
    assert own is not None, f"{module} stands on no floor"
    others = {other for name in imports(MODULES[module]) if (other := room(name)) and other != own}
    same_floor_is_open = FLOORS[own] in (0, 4, 5)
    assert not [o for o in others if FLOORS[o] > FLOORS[own] or (FLOORS[o] == FLOORS[own] and not same_floor_is_open)]


def test_no_pickle_and_no_eval_anywhere():
    for path in MODULES.values():
        assert not {"pickle", "dill", "cloudpickle", "shelve"} & imports(path), path
