"""dpcfl serve over HTTP: who may read, what can be read, pages of growing and broken runs, comparisons, start and end."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import socketserver
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import pytest
from cli_cases import call
from conftest import DPCFL, ROOT
from run_folder import run_json, write_round, write_start
from served import Client, admitted, serving, write_comparable

from dpcfl_net.core.locks import run_lock
from dpcfl_net.launch.serve import page_cache, server
from dpcfl_net.launch.serve.access import Access
from dpcfl_net.launch.serve.page_cache import PageCache
from dpcfl_net.launch.serve.server import MOST_REQUESTS, PageServer
from dpcfl_net.launch.serve.site import Site

METHODS = ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT")


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Three finished runs, one of them at another epsilon, and a sweep over two of them."""
    root = tmp_path_factory.mktemp("served")
    write_comparable(root / "alpha")
    write_comparable(root / "deep" / "er" / "beta", seed=1)
    write_comparable(root / "gamma", epsilon=3.0)
    write_sweep(root / "grid", ["../alpha", "../deep/er/beta", "../not-yet"])
    return root


def write_sweep(folder: Path, cells: list[str]) -> None:
    folder.mkdir()
    lines = [{"values": {}, "folder": cell, "state": "waiting"} for cell in cells]
    (folder / "sweep.json").write_text(json.dumps({"config": {}, "axes": {"seed": [0, 1, 2]}, "cells": lines}))


@pytest.fixture(scope="module")
def stranger(runs: Path):
    """A client without token and cookie."""
    with serving(runs) as client:
        yield client


@pytest.fixture(scope="module")
def reader(stranger: Client) -> Client:
    return admitted(stranger)


@pytest.fixture
def follower(tmp_path: Path):
    """A reader of an own, empty folder."""
    with serving(tmp_path) as client:
        yield admitted(client)


# Access.


def test_no_page_without_token_or_cookie(stranger: Client, reader: Client) -> None:
    addresses = ("/", f"/run/{reader.id('alpha')}", "/state", "/compare", "/?token=wrong", "/?token=", "/nothing")
    for address in addresses:
        got = stranger.get(address)
        assert (got.status, "Set-Cookie" in got.headers) == (403, False), address
        assert "alpha" not in got.text
    assert "Open the whole address" in stranger.get("/state").json["said"]
    assert stranger.get("/", Cookie=f"dpcfl-{stranger.server.server_port}=guess").status == 403
    assert stranger.get("/", Cookie='"; broken=[').status == 403


def test_the_token_gives_a_cookie_and_leaves_the_address(stranger: Client) -> None:
    token = stranger.server.access.token
    got = stranger.get(f"/run/abc?token={token}&filter=x")
    assert (got.status, got.headers["Location"]) == (303, "/run/abc?filter=x")
    cookie = got.headers["Set-Cookie"]
    assert {"HttpOnly", "SameSite=Lax", "Path=/"} <= {part.strip() for part in cookie.split(";")}
    assert token not in cookie
    assert stranger.get("/", Cookie=cookie.split(";")[0]).status == 200


def test_a_token_differs_from_start_to_start_and_is_long() -> None:
    tokens = {Access().token for _ in range(20)}
    assert len(tokens) == 20
    assert min(map(len, tokens)) >= 43  # 256 bits


def test_a_code_for_the_browser_works_once(stranger: Client) -> None:
    code = stranger.server.access.once()
    assert code != stranger.server.access.token
    assert [stranger.get(f"/?token={code}").status for _ in range(2)] == [303, 403]


@pytest.mark.parametrize("path", ["//evil.example/", "/\\evil.example/", "///evil.example", "http://evil.example//x"])
def test_the_way_after_the_token_stays_on_this_machine(stranger: Client, path: str) -> None:
    place = stranger.get(f"{path}?token={stranger.server.access.token}").headers["Location"]
    assert place.startswith("/")
    assert place[1:2] not in ("/", "\\")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", "localhost.evil", "[", "a b"]
)
def test_another_hosts_name_is_refused_also_with_a_cookie(reader: Client, host: str) -> None:
    got = reader.get("/", Host=host)
    assert got.status == 403
    assert "alpha" not in got.text


def test_own_names_are_accepted_with_the_port_of_a_tunnel(reader: Client) -> None:
    for host in ("localhost", "localhost:9999", "127.0.0.1", "127.0.0.1:9999", "[::1]:9999"):
        assert reader.get("/", Host=host).status == 200, host
    assert reader.send("/", "GET", [("Cookie", reader.cookie)]).status == 403
    own = [("Cookie", reader.cookie), ("Host", "localhost")]
    assert reader.send("/", "GET", own).status == 200
    assert reader.send("/", "GET", [*own, ("Host", "evil.example")]).status == 403


@pytest.mark.parametrize("method", METHODS)
def test_only_get_and_head(reader: Client, method: str) -> None:
    got = reader.get("/", method)
    assert (got.status, got.headers["Allow"]) == (405, "GET, HEAD")


def test_head_is_get_without_body(reader: Client) -> None:
    for path in ("/", f"/run/{reader.id('alpha')}", "/run/none"):
        got, head = reader.get(path), reader.get(path, "HEAD")
        assert (head.status, head.text) == (got.status, "")
        for name in ("Content-Length", "ETag", "Content-Type"):
            assert head.headers[name] == got.headers[name]


def test_policy_allows_only_the_pages_own_scripts(reader: Client) -> None:
    got = reader.get(f"/run/{reader.id('alpha')}")
    policy = got.headers["Content-Security-Policy"]
    assert len(got.nonces) == 1
    assert f"script-src 'nonce-{got.nonces.pop()}';" in policy
    assert "<script>" not in got.text
    for part in ("default-src 'none'", "connect-src 'self'", "frame-ancestors 'none'", "base-uri 'none'"):
        assert part in policy
    assert got.headers["Cache-Control"] == "no-store"
    assert got.headers["Referrer-Policy"] == "no-referrer"
    assert not [name for name in got.headers if name.lower().startswith("access-control")]


# Addresses.


@pytest.mark.parametrize(
    "path",
    [
        "/run/..", "/run/../../etc/passwd", "/run/%2e%2e%2f%2e%2e%2fetc%2fpasswd", "/first/run.json", "/run/first", "/etc/passwd", "/run/",
        "/run/0000000000000000", "/sweep/0000000000000000/state", "/run/a/b/c", "/%00", "/run/%00", "/" + "a/" * 500,
    ],
)  # fmt: skip
def test_no_address_names_a_file(reader: Client, path: str) -> None:
    got = reader.get(path)
    assert got.status == 404
    assert "root:" not in got.text


def test_an_id_names_its_own_kind_only(reader: Client) -> None:
    assert reader.get(f"/sweep/{reader.id('alpha')}").status == 404
    assert reader.get(f"/run/{reader.id('grid')}").status == 404


def test_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    secret = write_comparable(tmp_path / "secret", name="hidden-name")
    root = tmp_path / "root"
    inner = write_comparable(root / "run")
    write_comparable(root / "linked")
    (root / "linked" / "run.json").unlink()
    (root / "linked" / "run.json").symlink_to(secret / "run.json")
    (root / "away").symlink_to(secret)
    (root / "again").symlink_to(inner)
    write_sweep(root / "far", ["../../secret"])
    write_sweep(tmp_path / "grid", ["hidden-cell"])
    (root / "link").mkdir()
    (root / "link" / "sweep.json").symlink_to(tmp_path / "grid" / "sweep.json")
    with serving(root) as client:
        reader = admitted(client)
        page = reader.get("/").text
        assert "hidden-name" not in page
        assert "away is a link that leads out of" in page
        assert page.count('data-key="') == 4  # run, linked, far, link
        for path in (f"/run/{reader.id('linked')}", f"/sweep/{reader.id('far')}", f"/sweep/{reader.id('link')}"):
            got = reader.get(path)
            assert got.status == 404
            assert "hidden-" not in got.text
        assert "is a link that leads out of" in reader.get(f"/run/{reader.id('linked')}").text
        assert "has runs outside of" in reader.get(f"/sweep/{reader.id('far')}").text


# The list.


def test_the_list_has_every_run_and_sweep(reader: Client) -> None:
    page = reader.get("/").text
    for words in ("deep/er/beta", "r-dpcfl", "2 of 2", "5 of 5", "3 of 3", "71.2 %", "65.5 %", "69.8 %", "2 of 3 runs"):
        assert words in page
    assert reader.get("/state").facts == {"runs": "3", "finished": "3"}


def test_runs_are_sorted_newest_first_and_new_ones_appear(follower: Client, tmp_path: Path) -> None:
    assert "There are no runs here yet." in follower.get("/").text
    before = follower.get("/state")
    for name, hours in (("older", 2), ("newest", 0), ("old", 1)):
        folder = write_start(tmp_path / name)
        os.utime(folder / "protocol.json", (time.time() - 3600 * hours,) * 2)
    page = follower.listing(">newest<", ">old<", ">older<")
    assert page.index(">newest<") < page.index(">old<") < page.index(">older<")
    after = follower.get("/state", If_None_Match=before.headers["ETag"])
    assert after.status == 200
    assert after.json["version"] != before.json["version"]
    assert follower.get("/state", If_None_Match=after.headers["ETag"]).status == 304


def test_runs_of_the_same_name_are_told_apart_by_their_settings(follower: Client, tmp_path: Path) -> None:
    for name, seed, rate in (("one", 0, 0.1), ("two", 0, 0.2), ("three", 1, 0.2)):
        folder = write_comparable(tmp_path / name, seed=seed)
        with (folder / "config.yaml").open("a", encoding="utf-8") as file:
            file.write(f"local: {{lr: {rate}, clip: 0.5}}\noutput: {{evaluate_every: {seed + 1}}}\n")
    write_comparable(tmp_path / "another", seed=7, name="of another name")
    page = follower.listing(*(f">{name}<" for name in ("one", "two", "three", "another")))
    said = {place: re.findall("<span>([^<]+)</span>", row) for place, row in re.findall(r'class="place">(\w+)<(.*)', page)}
    assert said == {
        "one": ["local.lr=0.1", "seed=0"], "two": ["local.lr=0.2", "seed=0"], "three": ["local.lr=0.2", "seed=1"], "another": [],
    }  # fmt: skip


def test_no_secret_of_a_run_is_listed_and_long_settings_are_cut(follower: Client, tmp_path: Path) -> None:
    for name, secret in (("one", "ab" * 32), ("two", "cd" * 32)):
        folder = write_comparable(tmp_path / name)
        sizes = [100 + ord(name[0])] * 200
        text = f"privacy: {{noise: seeded, noise_seed: {secret}}}\ndata: {{train_per_client: {sizes}, of {name}: '<b>'}}\n"
        (folder / "config.yaml").write_text(f"name: fmnist-r-dpcfl\n{text}", encoding="utf-8")
    page = follower.listing(">one<", ">two<")
    assert "…</span>" in page
    assert "data.of one=&lt;b&gt;" in page
    assert "data.of one=null" in page
    assert max(len(setting) for setting in re.findall("<span>([^<]+)</span>", page)) < 100
    assert "ab" * 32 not in page
    assert "cd" * 32 not in page


def test_names_from_files_are_escaped(follower: Client, tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    write_comparable(tmp_path / "<b>run", name=evil)
    page = follower.listing("&lt;script&gt;")
    assert evil not in page
    assert "<b>run" not in page


# Runs.


def test_a_page_follows_a_growing_run(follower: Client, tmp_path: Path) -> None:
    folder = write_start(tmp_path / "run", 4)
    with run_lock(folder):
        path = f"/run/{follower.id('run')}"
        first = follower.get(f"{path}/state")
        assert first.facts == {"state": "running", "round": "0 of 4", "epsilon": "at most 5"}
        shown = follower.get(path)
        assert f'data-version="{first.json["version"]}"' in shown.text
        assert shown.headers["ETag"] == f'"{first.json["version"]}"'
        assert follower.get(path, If_None_Match=shown.headers["ETag"]).status == 304
        assert follower.get(f"{path}/state", If_None_Match=first.headers["ETag"]).status == 304
        for at in (1, 2):
            write_round(folder, at, 4)
        with (folder / "metrics.jsonl").open("ab") as file:
            file.write(b'{"view": "observer", "round": 3, "accur')  # a line that is being written
        state = follower.get(f"{path}/state", If_None_Match=first.headers["ETag"])
        assert (state.facts["round"], state.facts["accuracy"][-1]) == ("2 of 4", "%")
        newer = until_newer(follower, path, shown.headers["ETag"])
        assert "2 of 4 rounds" in newer
        assert '"accuracy": {"data"' in newer
        assert "<title>2/4 fmnist-r-dpcfl</title>" in newer
    # The launcher was killed: no file says so.
    assert follower.get(f"{path}/state").facts["state"] == "interrupted"
    (folder / "run.json").write_text(json.dumps(run_json(rounds_done=4)))
    assert follower.get(f"{path}/state").facts["state"] == "finished"
    follower.listing("<dt>finished</dt><dd>1</dd>")


def until_newer(reader: Client, path: str, tag: str) -> str:
    """The page once it is rendered again: a page rests for some time after a rendering."""
    deadline = time.monotonic() + 60
    while (got := reader.get(path, If_None_Match=tag)).status == 304:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert got.status == 200
    return got.text


def test_an_unchanged_page_is_rendered_once(reader: Client) -> None:
    path = f"/run/{reader.id('gamma')}"
    with ThreadPoolExecutor(4) as pool:
        pages = list(pool.map(reader.get, [path] * 6))
    assert len(set.union(*(page.nonces for page in pages))) == 1  # each rendering draws another


def test_one_rendering_at_a_time_and_a_rest_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, busy, most, rendered, now = PageCache(), [0], [0], [], [100.0]
    monkeypatch.setattr(page_cache, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def render(nonce: str) -> str:
        busy[0] += 1
        most[0] = max(most[0], busy[0])
        time.sleep(0.3)
        now[0] += 0.3
        busy[0] -= 1
        rendered.append(nonce)
        return nonce

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: cache.page(number % 2, "1", render), range(8)))
    assert (most[0], len(rendered)) == (1, 2)
    now[0] += 1.1
    assert [cache.page(key, "2", render).version for key in (0, 1)] == ["1", "1"]  # for five times as long as it took
    now[0] += 1.6
    assert cache.page(0, "2", render).version == "2"


def test_broken_and_removed_runs_have_plain_messages(follower: Client, tmp_path: Path) -> None:
    folder = write_comparable(tmp_path / "run")
    (folder / "run.json").write_text('{"name": "half')
    (folder / "first_round.npz").write_bytes(b"PK\3\4 half")
    path = f"/run/{follower.id('run')}"
    got = follower.get(path)
    assert got.status == 200
    assert "run.json is damaged and was left out" in got.text
    shutil.rmtree(folder)
    for words in ("", "There are no runs here yet."):  # at once, and when the list knows
        follower.listing(words)
        gone, state = follower.get(path), follower.get(f"{path}/state")
        assert (gone.status, state.status) == (404, 404)
        assert "removed or moved" in gone.text
        assert "removed or moved" in state.json["said"]
    tmp_path.rmdir()
    follower.listing("cannot list")
    tmp_path.mkdir()


def test_a_folder_that_cannot_be_read_is_named(follower: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_comparable(tmp_path / "good")
    write_comparable(tmp_path / "closed" / "run")
    real = os.scandir

    def scandir(path):  # the tests may run as root, who may read everything
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    page = follower.listing("cannot read closed: permission denied")
    assert page.count('data-key="') == 1


def test_a_bug_in_one_page_leaves_the_server_up(reader: Client, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(reader.server.site, "answer", lambda path, query: 1 / 0)
    got = reader.get("/")
    assert (got.status, "bug in dpcfl serve" in got.text) == (500, True)
    assert "ZeroDivisionError" in capsys.readouterr().err
    monkeypatch.undo()
    assert reader.get("/").status == 200


@pytest.mark.slow
@pytest.mark.parametrize("ends", [True, False], ids=["ended", "open"])
def test_an_error_is_printed_unless_the_server_has_closed_the_connection(reader: Client, capsys, ends: bool) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        if ends:
            reader.server.shutdown_request(ours)
        try:
            raise OSError("Bad file descriptor")
        except OSError:
            reader.server.handle_error(ours, "")
    assert ("Traceback" in capsys.readouterr().err) != ends


def test_silent_connections_do_not_add_up_without_bound(reader: Client) -> None:
    with ExitStack() as stack:
        where = ("127.0.0.1", reader.server.server_port)
        for _ in range(MOST_REQUESTS):
            stack.enter_context(socket.create_connection(where))
        with pytest.raises((ConnectionError, http.client.BadStatusLine)):
            reader.get("/")
    deadline = time.monotonic() + 15  # below the 20 s that each has for its request
    while not answers(reader):
        assert time.monotonic() < deadline


def test_requests_for_which_no_thread_could_start_keep_no_places(reader: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a while at a limit on processes the server refused everything for ever."""

    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refused)
        for _ in range(MOST_REQUESTS):
            assert not answers(reader)
    assert answers(reader)


def test_requests_that_come_byte_by_byte_do_not_keep_others_out(reader: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte restarted the time limit, so that another user of the machine could keep all places."""
    monkeypatch.setattr(server, "READ_S", 0.5)
    with ExitStack() as stack:
        where = ("127.0.0.1", reader.server.server_port)
        slow = [stack.enter_context(socket.create_connection(where)) for _ in range(MOST_REQUESTS)]
        deadline = time.monotonic() + 60
        while not answers(reader):
            assert time.monotonic() < deadline
            for connection in slow:
                with suppress(ConnectionError):
                    connection.sendall(b"G")


def test_an_address_that_is_none_gets_an_answer_and_no_traceback(reader: Client, capsys) -> None:
    """Anyone on this machine could write tracebacks to the terminal, without a token."""
    assert reader.get("http://[").status == 400
    assert capsys.readouterr().err == ""


def answers(reader: Client) -> bool:
    try:
        return reader.get("/").status == 200
    except (ConnectionError, http.client.BadStatusLine):
        return False


# Sweeps and comparisons.


def test_the_page_of_a_sweep_compares_its_finished_runs(reader: Client) -> None:
    path = f"/sweep/{reader.id('grid')}"
    page = reader.get(path).text
    assert "2 of 3 runs have finished" in page
    assert "Mean accuracy" in page
    assert reader.get(f"{path}/state").facts == {"state": "waiting", "runs": "2 of 3"}


def test_a_sweep_without_finished_runs_says_so(follower: Client, tmp_path: Path) -> None:
    write_sweep(tmp_path / "grid", ["../a", "../b"])
    assert "None of its 2 runs has finished" in follower.get(f"/sweep/{follower.id('grid')}").text


def test_comparable_runs_are_compared(reader: Client) -> None:
    got = reader.get(f"/compare?id={reader.id('alpha')}&id={reader.id('deep/er/beta')}")
    assert got.status == 200
    for words in ("Comparison", "2 runs.", "Privacy: epsilon 5", "Accuracy of the worst client", "71.2 +- 0.0"):
        assert words in got.text
    assert "Not comparable" not in got.text
    assert reader.get(f"/compare?id={reader.id('grid')}").status == 200  # a sweep stands for its runs


def test_unequal_runs_are_refused_with_the_reason_until_forced(reader: Client) -> None:
    ids = [reader.id("alpha"), reader.id("deep/er/beta"), reader.id("gamma")]
    got = reader.get("/compare?" + "&".join(f"id={id}" for id in ids))
    assert got.status == 409
    assert "gamma: epsilon is 3, elsewhere 5" in got.text
    assert "--force" not in got.text
    anyway = got.text.partition('href="/compare')[2].partition('"')[0].replace("&amp;", "&")
    assert parse_qs(urlsplit(anyway).query) == {"id": ids, "force": ["1"]}
    forced = reader.get(f"/compare{anyway}")
    assert forced.status == 200
    assert "Not comparable: gamma: epsilon is 3" in forced.text
    assert "NOT COMPARABLE" in forced.text


def test_other_comparisons_say_what_is_missing(follower: Client, tmp_path: Path) -> None:
    write_start(tmp_path / "young")
    got = follower.get(f"/compare?id={follower.id('young')}")
    assert (got.status, "only finished runs can be compared" in got.text) == (409, True)
    for query in ("", "?id=nothing", f"?id={follower.id('young')}&id=nothing"):
        assert follower.get(f"/compare{query}").status == 404
    assert follower.get("/compare?" + "&".join(["id=x"] * 600)).status == 400


# Start and end.


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_other_hosts_are_refused_with_the_way_to_do_it(capsys, tmp_path: Path, host: str) -> None:
    done = call(capsys, "serve", tmp_path, "--host", host)
    assert (done.code, done.out) == (3, "")
    assert done.err.startswith(f"error: --host: {host!r} must be 127.0.0.1, ::1 or localhost, ")
    assert "ssh -L" in done.err


def test_bad_folders_and_a_port_in_use(capsys, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, reason in (("none", "no such file or folder"), ("file", "a part of this path is a file, not a folder")):
        done = call(capsys, "serve", tmp_path / name)
        assert (done.code, reason in done.err) == (2, True)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = call(capsys, "serve", tmp_path, "--port", taken.getsockname()[1])
    assert done.code == 2
    assert "another program uses it" in done.err


def test_a_signal_after_a_request_was_handed_to_its_thread_leaves_no_traceback(tmp_path: Path, monkeypatch) -> None:
    failed, started = [], socketserver.ThreadingMixIn.process_request

    def interrupted(self, request, client_address) -> None:
        started(self, request, client_address)
        raise KeyboardInterrupt

    monkeypatch.setattr(socketserver.ThreadingMixIn, "process_request", interrupted)
    monkeypatch.setattr(threading, "excepthook", failed.append)
    with PageServer(Site(tmp_path), Access(), "127.0.0.1", 0) as server:
        before = {*threading.enumerate()}
        with socket.create_connection(server.server_address) as silent:
            silent.sendall(b"GET / HT")
            with pytest.raises(KeyboardInterrupt):
                server.handle_request()
        deadline = time.monotonic() + 30
        while {*threading.enumerate()} - before:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert failed == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_at_once_with_nothing_left_behind(runs: Path, tmp_path: Path, number: signal.Signals) -> None:
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/opened.part && mv {tmp_path}/opened.part {tmp_path}/opened\n')
    browser.chmod(0o700)
    before = sorted((path, path.stat().st_mtime_ns) for path in runs.rglob("*"))
    process = subprocess.Popen(
        [*DPCFL, "serve", str(runs), "--open"], cwd=ROOT, env={**os.environ, "BROWSER": f"{browser} %s"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        lines = [process.stdout.readline() for _ in range(4)]
        assert lines[0] == f"3 runs and 1 sweep in {runs}\n"
        address = urlsplit(lines[1].removeprefix("open ").strip())
        assert (address.hostname, len(parse_qs(address.query)["token"][0])) == ("127.0.0.1", 43)
        assert f"ssh -L {address.port}:127.0.0.1:{address.port}" in lines[2]
        deadline = time.monotonic() + 60
        while not (tmp_path / "opened").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        opened = urlsplit((tmp_path / "opened").read_text())
        assert (opened.netloc, opened.query != address.query) == (address.netloc, True)  # others can read a command line
        with socket.create_connection(("127.0.0.1", address.port)) as silent:  # a request that never comes
            silent.sendall(b"GET / HT")
            process.send_signal(number)
            start = time.monotonic()
            assert process.wait(60) == 0
            assert time.monotonic() - start < 15  # it has 20 s for its request
        assert process.stdout.read() == "stopped\n"
        assert process.stderr.read() == ""
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", address.port))
    finally:
        process.kill()
        process.wait()
    assert sorted((path, path.stat().st_mtime_ns) for path in runs.rglob("*")) == before
