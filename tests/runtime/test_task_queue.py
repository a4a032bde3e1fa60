"""A server that sends task after task holds the memory of one."""

import queue
import threading
import weakref

import numpy as np
import pytest

from dpcfl_net.runtime.task_queue import TaskQueue
from dpcfl_net.transport.endpoint import ClientEvent


def task(number: int) -> ClientEvent:
    return ClientEvent("task", f"{number:032x}", number, "train", {"w": np.zeros(4, np.float32)})


def test_a_thousand_tasks_leave_the_newest_and_free_the_others():
    tasks, models = TaskQueue(), []
    for number in range(1000):
        event = task(number)
        models.append(weakref.ref(event.tensors["w"]))
        tasks.put(event)
    del event
    assert len(tasks) == 1
    assert sum(model() is not None for model in models) == 1
    assert tasks.get().round == 999


TASK, NEWER, SENT, GONE = task(20), task(21), ClientEvent("sent", "c", 19, "train"), ValueError("the socket is gone")


@pytest.mark.parametrize(
    ("put", "taken"),
    [
        ([TASK], [TASK]),
        (
            [TASK, SENT],
            [TASK, SENT],
        ),  # the receipt of round 19 came late: without the task the round would wait for its timeout
        ([SENT, TASK], [SENT, TASK]),
        ([TASK, NEWER], [NEWER]),
        ([TASK, SENT, NEWER, SENT], [NEWER, SENT, SENT]),
        ([TASK, None], [None]),  # the coordinator said goodbye
        ([TASK, GONE], [GONE]),
    ],
)
def test_a_task_is_replaced_by_a_later_task_and_by_no_receipt(put, taken):
    tasks = TaskQueue()
    for event in put:
        tasks.put(event)
    assert [id(tasks.get()) for _ in range(len(tasks))] == list(map(id, taken))
    with pytest.raises(queue.Empty):
        tasks.get(0.001)


def test_get_waits_for_the_other_thread():
    tasks = TaskQueue()
    threading.Timer(0.05, lambda: tasks.put(task(7))).start()
    assert tasks.get(10).round == 7
