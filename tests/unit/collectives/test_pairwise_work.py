"""A swap's works are waited for once each, by the first who waits or, for those who are called back, by a thread."""

import threading
import time

import pytest

from thinwire.core.collectives.exchange import PairwiseWork


class Work:
    def __init__(self, error=None):
        self.gate, self.waits, self.error = threading.Event(), 0, error

    def wait(self):
        self.waits += 1
        assert self.gate.wait(10)
        if self.error:
            raise self.error


def watchers():
    return [thread for thread in threading.enumerate() if thread.name == "thinwire-pairwise"]


def test_who_waits_costs_no_thread():
    work = Work()
    swap = PairwiseWork([work])
    assert not watchers()
    work.gate.set()
    swap.wait()
    swap.wait()
    assert work.waits == 1
    assert not watchers()


def test_waiters_and_callbacks_share_one_wait():
    works, called = [Work(), Work()], []
    swap = PairwiseWork(works)
    done = threading.Semaphore(0)

    def call_back(number):
        called.append(number)
        done.release()

    swap.then(lambda: call_back(0))
    assert len(watchers()) == 1
    waiters = [threading.Thread(target=swap.wait) for _ in range(3)]
    for thread in waiters:
        thread.start()
    swap.then(lambda: call_back(1))
    assert not called
    for work in works:
        work.gate.set()
    for thread in waiters:
        thread.join(10)
        assert not thread.is_alive()
    for _ in range(2):
        assert done.acquire(timeout=10)
    swap.then(lambda: call_back(2))  # at once
    assert called == [0, 1, 2]
    assert [work.waits for work in works] == [1, 1]
    while watchers():  # it ends after its last call
        time.sleep(0.01)


def test_a_callback_beside_a_waiter_needs_no_thread():
    work, called = Work(), threading.Event()
    swap = PairwiseWork([work])
    waiter = threading.Thread(target=swap.wait)
    waiter.start()
    while not work.waits:
        pass
    swap.then(called.set)
    assert not watchers()
    work.gate.set()
    assert called.wait(10)
    waiter.join(10)


def test_all_are_waited_for_and_everybody_sees_the_first_error():
    works = [Work(RuntimeError("first")), Work(RuntimeError("second")), Work()]
    for work in works:
        work.gate.set()
    swap, called = PairwiseWork(works), threading.Event()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="first"):
            swap.wait()
    swap.then(called.set)
    assert called.is_set()
    assert [work.waits for work in works] == [1, 1, 1]
