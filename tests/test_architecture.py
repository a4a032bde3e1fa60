"""Packages in strict order: a package imports only from packages below it, and the coordinator never from data or experiment."""

from __future__ import annotations

import ast
import importlib
import re
import sys
import tomllib
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from conftest import ROOT

from dpcfl_net.core import plugins

ORDER = [
    "core", "clustering", "data", "privacy", "transport", "training", "federation", "algorithms", "experiment", "runtime", "results",
    "report", "attacks", "adversaries", "reproduce", "launch",
]  # fmt: skip
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "dpcfl_net").rglob("*.py")
} | {
    ".".join(("dpcfl_net", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in (ROOT / "launch").rglob("*.py")
}


def package(module: str) -> str:
    first, *rest = module.split(".")
    if rest == ["__main__"]:
        return "launch"
    return rest[0] if rest else first


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path, everywhere: bool = True) -> frozenset[str]:
    """Modules that a file imports, for types only or not; with `everywhere` those that its functions import, too."""
    tree, found = tree_of(path), set()
    for node in ast.walk(tree) if everywhere else tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return frozenset(found)


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"dpcfl_net"}))
def test_a_package_imports_only_from_packages_below_it(module):
    own = package(module)
    assert own in ORDER, f"{module} is in no package of the order"
    packages = {package(name) for name in imports(MODULES[module]) if name in MODULES and name != "dpcfl_net"}
    assert not [other for other in packages - {own} if ORDER.index(other) > ORDER.index(own)]


def test_every_module_is_in_a_package_of_the_order():
    assert {package(module) for module in MODULES} == {*ORDER, "dpcfl_net"}
    assert {path.name for path in (ROOT / "dpcfl_net").glob("*.py")} == {"__init__.py", "__main__.py"}


def test_no_module_imports_itself_through_others():
    """Packages that a module is in are left out: Python imports them first in any case."""
    imported = {
        module: {name for name in imports(path) if name in MODULES and not f"{module}.".startswith(f"{name}.")}
        for module, path in MODULES.items()
    }
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as circle:
        pytest.fail(" -> ".join(reversed(circle.args[1])))


# Where the name of a distribution is not that of its module.
DISTRIBUTIONS = {
    "sklearn": "scikit-learn",
    "zmq": "pyzmq",
    "yaml": "pyyaml",
    "dp_accounting": "dp-accounting",
    "grpc": "grpcio",
    "mlflow": "mlflow-skinny",
    "PIL": "pillow",
}


def test_every_import_is_a_declared_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        *project["dependencies"],
        *(
            name
            for extra in ("ray", "pandas", "bench", "tensorboard", "mlflow", "wandb", "images", "huggingface", "tune")
            for name in project["optional-dependencies"][extra]
        ),
    ]
    declared = {re.split(r"[<>=!~\[; ]", name)[0].lower() for name in wanted}
    used = {name.split(".")[0] for path in MODULES.values() for name in imports(path)}
    foreign = used - set(sys.stdlib_module_names) - {"dpcfl_net"}
    assert "numpy" in foreign
    assert not {name for name in foreign if DISTRIBUTIONS.get(name, name).lower() not in declared}


def test_the_coordinator_imports_neither_data_nor_experiment():
    """What is imported at the top of its modules; tests/threats/test_server_knows.py looks into a running one."""
    seen, left = set(), {"dpcfl_net.runtime.coordinator", "dpcfl_net.runtime.aggregator"}
    while left:
        module = left.pop()
        seen.add(module)
        left |= {name for name in imports(MODULES[module], everywhere=False) if name in MODULES} - seen
    assert "dpcfl_net.federation.network" in seen
    assert not {package(module) for module in seen} & {"data", "experiment", "results", "report", "launch"}


def calls(path: Path) -> list[tuple[str, str]]:
    """Name and text of each call of a file that may execute text or objects of another."""
    if not re.search(r"\b(eval|exec|compile|__import__|load)\(", path.read_text()):
        return []
    found = [(ast.unparse(node.func), node) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
    return [(name, ast.unparse(node)) for name, node in found]


def test_no_pickle_and_no_eval_anywhere():
    for path in MODULES.values():
        assert not {"pickle", "dill", "cloudpickle", "shelve"} & imports(path), path
        for name, text in calls(path):
            assert name not in ("eval", "exec", "compile", "__import__") or text == "exec('')", f"{path}: {text}"
            assert name not in ("np.load", "numpy.load", "torch.load") or "allow_pickle=False" in text, f"{path}: {text}"


@pytest.mark.parametrize("moved", plugins.MOVED.values())
def test_what_jobs_name_by_an_earlier_path_is_there(moved):
    assert importlib.import_module(moved)
