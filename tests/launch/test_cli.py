"""The command line: exit codes, sentences instead of tracebacks, and heavy imports only where they are needed."""

from __future__ import annotations

import json
import os
import pty
import re
import shlex
import shutil
import stat
import subprocess
import sys

import pytest
from cli_cases import call
from conftest import DPCFL, ROOT, SMALL, dpcfl, only_run, write_config
from doc_commands import program
from engines import until

from dpcfl_net.core.errors import ConfigError
from dpcfl_net.core.extras import advice
from dpcfl_net.core.locks import is_held
from dpcfl_net.core.roster import MOST_EPSILON
from dpcfl_net.data.settings import MOST_CLIENTS
from dpcfl_net.experiment import config_schema
from dpcfl_net.experiment.config import load
from dpcfl_net.experiment.packaged import packaged
from dpcfl_net.launch.cli import main
from dpcfl_net.launch.cli.commands import parameters
from dpcfl_net.launch.new_run import new_folder
from dpcfl_net.launch.sweep_axes import MOST_CELLS
from dpcfl_net.transport.keys import make_keys


def test_help_and_import_load_nothing_heavy():
    code = (
        "import sys, dpcfl_net.launch.cli.commands, dpcfl_net\n"
        "from typer.testing import CliRunner\n"
        "assert CliRunner().invoke(dpcfl_net.launch.cli.commands.app, ['--help']).exit_code == 0\n"
        "heavy = {'torch', 'opacus', 'torchvision', 'sklearn', 'scipy', 'plotly', 'dp_accounting', 'zmq', 'numpy', 'pydantic', 'ray'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_options_have_the_limits_of_the_configuration_and_of_sweeps():
    assert parameters.MOST_CLIENTS == MOST_CLIENTS
    assert parameters.MOST_EPSILON == MOST_EPSILON
    assert parameters.MOST_CELLS == MOST_CELLS
    for name in ("MOST_SECONDS", "MOST_ROUNDS", "MOST_AGGREGATORS"):
        assert getattr(parameters, name) == getattr(config_schema, name)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["run", "nowhere.yaml"], 2, "no such configuration file"),
        (["run", "configs/quickstart.yaml", "privacy.epsilon=0", "rounds=1"], 2, "rounds is 1"),
        (["run", "configs/quickstart.yaml", "--resume", "x"], 2, "takes no configuration"),
        (["run", "--resume", "nowhere"], 2, "is not a run folder"),
        (["run"], 2, "give a configuration"),
        (["fly"], 2, "No such command"),
        (["verify", "nowhere"], 2, "not a run folder"),
        (["inspect", "nowhere"], 2, "is not a run folder"),
        (["account", "--json", "nowhere.json"], 2, "cannot read"),
        (["data", "fetch", "imagenet"], 2, "unknown data set"),
        (["bench", "flying"], 2, "must be"),
        (["coordinator", "protocol.json", "--transcript", "half"], 2, "'off', 'headers', 'full'"),
        (["coordinator", "protocol.json", "--quorum", "7"], 2, "--quorum"),
        (["coordinator", "protocol.json", "--quorum", "0"], 2, "'--quorum': 0 is not above 0"),
    ],
)
def test_a_users_mistake_is_a_sentence_and_an_exit_code(arguments, code, words, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    done = call(capsys, *arguments)
    assert done.code == code, done.err
    assert words in done.err
    assert "Traceback" not in done.err


def test_account_reads_events_and_solves_for_noise(tmp_path):
    path = tmp_path / "events.json"
    path.write_text(
        json.dumps(
            {"events": [{"type": "SampledGaussian", "noise_multiplier": 2.0, "sampling_rate": 1.0, "steps": 1}], "delta": 1e-5}
        )
    )
    assert json.loads(dpcfl("account", "--json", path).stdout)["epsilon"] == pytest.approx(
        1.9964, rel=0.005
    )  # analytic Gaussian
    path.write_text('{"events": [], "delta": 2}')
    assert dpcfl("account", "--json", path).returncode == 2


def test_keygen_and_job_write_a_signed_job_with_private_keys(tmp_path):
    assert dpcfl("keygen", tmp_path / "keys", "--clients", 8).returncode == 0
    for secret in (tmp_path / "keys").glob("*/*.secret"):
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    again = dpcfl("keygen", tmp_path / "keys", "--clients", 8)
    assert (again.returncode, "not overwritten" in again.stderr) == (2, True)
    made = dpcfl("job", write_config(tmp_path / "c"), "--out", tmp_path / "job", "--keys", tmp_path / "keys")
    assert made.returncode == 0, made.stderr
    assert "noise multiplier" in made.stdout
    names = {path.name for path in (tmp_path / "job").iterdir()}
    assert names == {
        "protocol.json", "protocol.json.sig", "roster.jsonl", "experiment.json", "experiment.json.sig", "operator.pub", "config.yaml",
    }  # fmt: skip


@pytest.mark.parametrize("noise", ["seeded", "os"])
def test_seeds_and_salt_of_a_job_are_for_its_owner_only(tmp_path, capsys, noise):
    """Any user of the machine could read the noise of a seeded run, and which client has which slice."""
    before = os.umask(0o022)
    try:
        config = write_config(tmp_path / "c", privacy={"epsilon": 5, "delta": 1e-4, "noise": noise})
        assert call(capsys, "job", config, "--out", tmp_path / "job").code == 0
    finally:
        os.umask(before)
    files = {path.name: path for path in (tmp_path / "job").iterdir() if path.is_file()}
    closed = {name for name, path in files.items() if stat.S_IMODE(path.stat().st_mode) == 0o600}
    assert closed == {"experiment.json", *(["config.yaml"] if noise == "seeded" else [])}
    assert {stat.S_IMODE(files[name].stat().st_mode) for name in files.keys() - closed} == {0o644}
    secrets = [json.loads(files["experiment.json"].read_text())[name] for name in ("salt", "noise_seed")]
    assert [name for name in files.keys() - closed if any(word and word in files[name].read_text() for word in secrets)] == []


@pytest.fixture(scope="module")
def made_job(tmp_path_factory):
    """A job as `dpcfl job` leaves it, made once."""
    out = tmp_path_factory.mktemp("job")
    done = dpcfl("job", write_config(out / "c"), "--out", out)
    assert done.returncode == 0, done.stderr
    return out


def test_a_worker_without_its_keys_makes_no_ledger(made_job, tmp_path, capsys):
    """An empty ledger on a wrong host replaced that of the client where the ledgers of all hosts were copied together."""
    (tmp_path / "keys").mkdir()
    stranger = call(
        capsys, "worker", made_job, "--client", 0, "--connect", "tcp://127.0.0.1:1", "--keys", tmp_path / "keys",
        "--operator-key", made_job / "operator.pub", "--ledgers", tmp_path / "ledgers",
    )  # fmt: skip
    assert stranger.code == 2
    assert "client_0000.public: no such file" in stranger.err
    assert not (tmp_path / "ledgers").exists()


@pytest.mark.parametrize("keys", [True, False], ids=["its keys", "no keys"])
def test_a_second_job_does_not_overwrite_the_first(made_job, tmp_path, capsys, keys):
    shutil.copytree(made_job, tmp_path, dirs_exist_ok=True)
    if not keys:
        shutil.rmtree(tmp_path / "keys")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    done = call(capsys, "job", tmp_path / "c/config.yaml", "rounds=3", "--out", tmp_path)
    assert done.code == 2
    assert "holds another job, which workers may serve" in done.err
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_the_same_job_can_be_written_again(tmp_path, capsys):
    config = write_config(tmp_path / "c")
    job = ("job", config, "--out", tmp_path / "job")  # its noise seed is given, so that all of its secrets are too
    assert [call(capsys, *job).code for _ in range(2)] == [0, 0]


@pytest.mark.parametrize(("arguments", "after"), [(("run", ""), "run"), (("run", "quickstart", "--out", ""), "--out")])
def test_an_empty_argument_is_refused(capsys, arguments, after):
    done = call(capsys, *arguments)
    assert done.code == 2
    assert f"argument {len(arguments)} is empty, after {after}: is a variable of the shell unset?" in done.err


def test_an_argument_that_is_not_unicode_is_refused(capsys, tmp_path):
    """As a run folder its name could be in no file of the run: the observer and the report failed at it."""
    out = tmp_path / os.fsdecode(b"a\xff")
    done = call(capsys, "run", "quickstart", "--out", out)
    assert done.code == 2
    assert re.search(r"argument 4 is b'.*a\\xff', which is not UTF-8", done.err)
    for path, shown in ((out, r"b'.*a\\xff'"), (tmp_path / "a\ud800", r"'.*a\\ud800'")):
        with pytest.raises(ConfigError, match=f"out is {shown}, which is not UTF-8"):
            new_folder(load(ROOT / "configs" / "quickstart.yaml"), path)
    assert not out.exists()


def test_a_run_whose_standard_streams_are_closed_ends_well(tmp_path):
    """As after `>&-`: it failed at its end. No file of it may get the numbers of these streams, to which libraries print."""
    small = {"data": {**SMALL["data"], "clients": [2, 2], "train_per_client": 50}, "model": {"name": "linear"}, "rounds": 2}
    config = write_config(
        tmp_path / "c",
        **small,
        algorithm={"name": "global"},
        runtime={"federation": "in-process"},
        output={"transcript": "off"},
    )
    run = shlex.join([sys.executable, "-m", "dpcfl_net", "run", str(config), "--out", str(tmp_path / "runs")])
    done = subprocess.run(["sh", "-c", f"exec {run} <&- >&- 2>&-"], cwd=ROOT, check=False, timeout=120)
    assert done.returncode == 0
    folder = only_run(tmp_path / "runs")
    assert json.loads((folder / "run.json").read_text())["state"] == "finished"
    assert (folder / "report.html").exists()
    code = (
        "import os, sys; from dpcfl_net.launch.cli.terminal import open_closed_streams; open_closed_streams()\n"
        "with open(sys.argv[1], 'w') as file: print('x', flush=True); os.write(2, b'y'); file.write(str(file.fileno()))"
    )
    words = shlex.join([sys.executable, "-c", code, str(tmp_path / "file")])
    subprocess.run(["sh", "-c", f"exec {words} <&- >&- 2>&-"], cwd=ROOT, check=True, timeout=60)
    assert int((tmp_path / "file").read_text()) > 2


def test_a_worker_refuses_a_job_that_its_operator_did_not_sign(made_job, tmp_path, capsys):
    make_keys(tmp_path / "others", 1)
    done = call(
        capsys, "worker", made_job, "--client", 0, "--connect", "tcp://127.0.0.1:1", "--keys", made_job / "keys",
        "--operator-key", tmp_path / "others/operator/operator.public", "--ledgers", tmp_path / "ledgers",
    )  # fmt: skip
    assert done.code == 3
    assert "operator-signature" in done.err
    assert not (tmp_path / "ledgers").exists()


def test_an_open_secret_key_is_refused(made_job, tmp_path, capsys):
    shutil.copytree(made_job, tmp_path, dirs_exist_ok=True)
    (tmp_path / "keys/client_0000/client_0000.secret").chmod(0o644)
    done = call(
        capsys, "worker", tmp_path, "--client", 0, "--connect", "tcp://127.0.0.1:1", "--keys", tmp_path / "keys",
        "--operator-key", tmp_path / "operator.pub", "--ledgers", tmp_path / "ledgers",
    )  # fmt: skip
    assert done.code == 3
    assert "key-permissions" in done.err
    assert "chmod 600" in done.err


def test_the_folder_of_a_coordinator_that_was_started_manually_is_in_use(made_job, tmp_path, capsys):
    """It was verified while it ran, and a second coordinator wrote into it, too."""
    run = shutil.copytree(made_job, tmp_path / "run")
    command = [
        "coordinator", made_job / "protocol.json", "--bind", "tcp://127.0.0.1:*", "--keys", made_job / "keys",
        "--operator-key", made_job / "operator.pub", "--out", run,
    ]  # fmt: skip
    with subprocess.Popen([*DPCFL, *map(str, command)], cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        try:
            until((run / "addresses" / "coordinator").exists, 60, "the coordinator does not listen")
            assert f"error: {run} is running: verify it after it has ended" in call(capsys, "verify", run).err
            assert call(capsys, *command).err == f"error: {run} is being run by another process\n"
        finally:
            process.kill()
    assert is_held(run) is False


def test_an_orphan_leaves_by_itself(made_job, tmp_path):
    shutil.copytree(made_job, tmp_path, dirs_exist_ok=True)
    done = dpcfl(
        "worker", tmp_path, "--client", 0, "--connect", "tcp://127.0.0.1:9", "--keys", tmp_path / "keys", "--orphan-timeout", 1,
        "--operator-key", tmp_path / "operator.pub", "--ledgers", tmp_path / "ledgers", timeout=60,
    )  # fmt: skip
    assert done.returncode in (3, 4)
    assert "Traceback" not in done.stderr


def test_a_command_without_arguments_shows_its_help():
    for arguments in ((), ("data",)):
        done = dpcfl(*arguments)
        assert (done.returncode, done.stderr) == (2, "")
        assert done.stdout.lstrip().startswith("Usage: ")


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (["run"], "CONFIG KEY=VALUE"),
        (["sweep"], "CONFIG KEY=VALUE,VALUE"),
        (["compare"], "RUN|SWEEP"),
        (["reproduce"], "FIGURE"),
        (["conformance"], "FUNCTION CLAIM"),
        (["worker"], "JOB"),
        (["diff"], "MINE THEIRS"),
        (["data", "fetch"], "NAME"),
    ],
)
def test_help_names_arguments_in_capitals_with_one_pair_of_brackets(command, arguments, capsys):
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    usage = capsys.readouterr().out.partition("\n")[0]
    said = [re.sub(r"^[\[{](.*)[\]}](\.\.\.)?$", r"\1", word) for word in usage.partition(" [OPTIONS] ")[2].split()]
    assert " ".join(said) == arguments, usage


@pytest.mark.parametrize("group", [(), ("attack",)])
def test_every_summary_of_a_command_fits_into_its_line(group, capsys):
    with pytest.raises(SystemExit):
        main([*group, "--help"])
    listed = capsys.readouterr().out.partition("\n")[2]
    assert [line for line in listed.splitlines() if line.endswith("...")] == []


def test_no_help_names_a_file_that_a_wheel_lacks():
    groups = [program()]
    texts = [dpcfl("schema").stdout, *packaged().values(), advice("ray")]
    for group in groups:
        for command in group.commands.values():
            texts += [str(command.help), *(str(getattr(parameter, "help", "")) for parameter in command.params)]
            groups += [command] if hasattr(command, "commands") else []
    assert len(texts) > 300
    assert [text for text in texts if "docs/how-to" in text or ".md" in text.replace("README.md", "")] == []


@pytest.mark.parametrize(("command", "word"), [(("attack", "invert"), b"attacking"), (("verify",), b"checking")])
def test_a_command_shows_in_a_terminal_that_it_computes(tmp_path, command, word):
    shown, terminal = pty.openpty()
    command = [sys.executable, "-m", "dpcfl_net", *command, tmp_path]
    environment = {**os.environ, "TERM": "xterm"}
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=terminal, env=environment, timeout=120
    )
    os.close(terminal)
    said = os.read(shown, 1 << 16)
    os.close(shown)
    assert (done.returncode, done.stdout) == (2, b"")
    assert word + b": 0 s" in said
    assert dpcfl(*command[3:]).stderr == f"error: {tmp_path} is not a run folder: it holds no protocol.json\n"


def test_the_version_is_printed():
    import dpcfl_net

    done = subprocess.run([*DPCFL, "--version"], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == f"dpcfl_net {dpcfl_net.__version__}\n"


@pytest.mark.parametrize("name", ["quickstart.yaml", "configs/quickstart.yaml"])
def test_a_packaged_configuration_in_place_of_a_file_is_named(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = call(capsys, "run", name, "privacy.epsilon=0")
    assert done.err.startswith(f"note: there is no file {name} here: using the packaged configuration quickstart\nerror: ")
    assert call(capsys, "run", "quickstart", "privacy.epsilon=0").err.startswith("error: ")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text((ROOT / "configs" / "quickstart.yaml").read_text())
    assert call(capsys, "run", name, "privacy.epsilon=0").err.startswith("error: ")


def test_a_dry_run_starts_nothing(tmp_path):
    done = dpcfl("run", write_config(tmp_path / "c"), "--dry-run", "--out", tmp_path / "runs")
    assert done.returncode == 0
    assert "SelectionSlot" in done.stdout
    assert not (tmp_path / "runs").exists()


def test_schema_is_json():
    assert json.loads(dpcfl("schema").stdout)["title"] == "Config"
