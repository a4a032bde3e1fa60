"""Open tasks of the coordinator's clients: sent until answered or cancelled; answers are checked, repeated after damage, or set aside."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from dpcfl_net.transport.channel import DAMAGED, REPEATS, Stream, remember
from dpcfl_net.transport.message_log import CLIENT_PREFIX, MessageLog
from dpcfl_net.transport.messages import Header, Template, WireError, encode, match_template
from dpcfl_net.transport.payload import Assembly, Payload, checked
from dpcfl_net.transport.peers import OpenTask, Peer, ServerEvent
from dpcfl_net.transport.timers import Timers

Check = Callable[[int, str, dict[str, np.ndarray]], None] | None


class OpenTasks:
    """Tasks and answers, at most one open task per client.

    Args:
        template: Returns the tensors of a "release" by the name of its task; other answers hold none.
        check: Called with (client, task name, tensors) before a result is accepted; raises Refused to reject it.
        log: Receives failures and messages.
        events: Receives "result", "late" and "failed".
        resend_s: Time without progress after which a task is sent again, seconds.
    """

    def __init__(
        self,
        template: Callable[[str], Template | None],
        check: Check,
        log: MessageLog,
        events: list[ServerEvent],
        resend_s: float,
    ) -> None:
        self._template, self._check, self._log, self._events = template, check, log, events
        self._resend_s, self._looks = resend_s, Timers()

    def open(self, peer: Peer, round: int, task: str, payload: Payload) -> str:
        """Give a client a task in place of its open one; returns its message id."""
        self.cancel(peer)
        stream = Stream({"kind": "TASK", "round": round, "task": task}, payload)
        peer.open = OpenTask(round, task, stream)
        if peer.route is not None:
            peer.channel.push(stream)
            self._looks.set(peer.client, stream.due(self._resend_s))
        return stream.id

    def connected(self, peer: Peer) -> None:
        """Send a client's open task over its new connection."""
        if peer.open is not None:
            peer.open.arrived = False
            peer.channel.push(peer.open.stream)
            self._looks.set(peer.client, peer.open.stream.due(self._resend_s))

    def cancel(self, peer: Peer) -> None:
        """Close the client's open task; a later answer is set aside."""
        if peer.open is not None:
            remember(peer.cancelled, peer.open.id, (peer.open.round, peer.open.task))
            self._close(peer)

    @property
    def next_look(self) -> float:
        """Time at which the next task may have to be sent again, monotonic clock."""
        return self._looks.next

    def look(self, peer: Peer) -> None:
        """Look at a client's open task in the next `repeat`, since the client reports that it is idle."""
        if peer.open is not None:
            self._looks.set(peer.client, time.monotonic())

    def repeat(self, peers: dict[int, Peer], now: float) -> None:
        """Send the tasks again that are overdue, to clients that do not work on them."""
        for client in self._looks.expired(now):
            peer = peers[client]
            task = peer.open
            if task is None or peer.route is None:
                continue
            if task.is_overdue(peer.phase, now, self._resend_s) and peer.channel.was_read(task.stream):
                peer.channel.repeat_overdue(task.stream)
            due = task.stream.due(self._resend_s)
            self._looks.set(client, due if due > now else now + self._resend_s)

    def acknowledged(self, peer: Peer, header: Header) -> None:
        """Note that a client has received its task."""
        peer.channel.drop(header.parent)
        if peer.open is not None and peer.open.id == header.parent:
            peer.open.arrived, peer.open.stream.moved = True, time.monotonic()

    def answer(self, peer: Peer, header: Header) -> None:
        """Begin to receive an answer.

        Raises:
            WireError: "task-closed", "round" or "template", or as `Assembly.tensors` and the check.
        """
        if header.id in peer.delivered:
            peer.channel.ignore(header.id)
            peer.channel.say("ACK", parent=header.id)
            return
        task = peer.open
        if header.parent in peer.cancelled:
            self._set_aside(peer, header)
            return
        if task is None or header.parent != task.id:
            peer.channel.ignore(header.id)
            raise WireError("task-closed", "an answer to a task that is not open")
        peer.answering, task.arrived = header.id, True
        if (header.round, header.task) != (task.round, task.task):
            raise WireError("round", f"an answer for {header.task or 'no task'} in round {header.round}")
        match_template(header.tensors, (self._template(task.task) or {}) if header.code == "release" else {})
        complete = peer.channel.begin(header)
        if complete is not None:
            self.deliver(peer, complete)

    def deliver(self, peer: Peer, complete: Assembly) -> None:
        """Accept a complete answer.

        Raises:
            WireError: "task-closed", or as `Assembly.tensors` and the check.
        """
        header, task = complete.header, peer.open
        if header.parent in peer.cancelled:
            self._set_aside(peer, header)
            return
        if task is None or header.parent != task.id:
            raise WireError("task-closed", "the task was closed while its answer arrived")
        tensors = checked(complete, self._check if header.code == "release" else None, peer.client, task.task)
        self._close(peer)
        peer.phase = "idle"
        remember(peer.delivered, header.id, None)
        peer.channel.say("ACK", parent=header.id)
        self._report("result", peer, header, header.size, tensors=tensors, reason=header.reason)

    def _set_aside(self, peer: Peer, header: Header) -> None:
        """Acknowledge the answer to a cancelled task, so that it is not sent again; its payload is not taken."""
        if (header.round, header.task) != peer.cancelled.pop(header.parent):
            raise WireError("round", f"an answer for {header.task or 'no task'} in round {header.round}")
        remember(peer.delivered, header.id, None)
        peer.channel.ignore(header.id)
        peer.channel.say("ACK", parent=header.id)
        self._report("late", peer, header, 0, blake3=header.blake3)

    def _report(self, kind: Any, peer: Peer, header: Header, taken: int, **more: Any) -> None:
        """Log an answer, with the bytes of its payload that were taken, and add its event."""
        head = len(encode(header))
        self._log.message("up", peer.name, header, head + taken)
        about = peer.client, header.round, header.task, header.parent, header.code
        self._events.append(ServerEvent(kind, *about, bytes=head + header.size, **more))

    def client_refused(self, peer: Peer, header: Header) -> None:
        """Handle a client's ERROR; if it concerns the open task, no answer will come, unless the task arrived damaged."""
        error = WireError(header.code, header.reason)
        self._log.failed(peer.name, WireError(f"{CLIENT_PREFIX}{header.code}"[:64], header.reason))
        concerned = peer.open is not None and peer.open.id == header.parent
        again = concerned and self._once_more(peer, header.code)
        if again and peer.open is not None:
            peer.channel.repeat(peer.open.stream)
        self._fail(peer, error, concerned and not again)

    def refused(self, peer: Peer, about: str, error: WireError) -> None:
        """Note that a message was refused; if it answered the open task, the task is closed unless the message was damaged."""
        concerned = bool(about) and about == peer.answering and peer.open is not None
        self._fail(peer, error, concerned and not self._once_more(peer, error.code))

    def _once_more(self, peer: Peer, code: str) -> bool:
        """Return True if the open task stays open after damage, so that the damaged message is sent again."""
        if peer.open is None or code not in DAMAGED or peer.open.damaged >= REPEATS:
            return False
        peer.open.damaged += 1
        return True

    def _fail(self, peer: Peer, error: WireError, closes: bool) -> None:
        event, task = ServerEvent("failed", peer.client, code=error.code, reason=error.reason), peer.open
        if task is not None and closes:
            self._close(peer)
            event = replace(event, round=task.round, task=task.task, id=task.id)
        self._events.append(event)

    def _close(self, peer: Peer) -> None:
        if peer.open is not None:
            peer.channel.drop(peer.open.id)
        peer.open, peer.answering = None, ""
        self._looks.drop(peer.client)
