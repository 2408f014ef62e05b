"""Threads that stay between calls: errors, references, affinity, forks and the end of the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import weakref

import pytest

from cuflash import workers

ATTEND = """
import numpy as np
from cuflash import numpy_backend
from cuflash.problem import check_options, make_problem
q = np.random.default_rng(0).standard_normal((1, 600, 1, 16), np.float32)
problem = make_problem(q.shape, q.shape, q.shape, "float32", check_options(False, None, 0.0, None, "bshd"))
def attend():
    out = np.zeros_like(q)
    numpy_backend.forward(q, q, q, out, None, problem, threads=2)
    return out
want = attend()
"""


def python(code):
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_worker_calls_once_and_the_caller_is_one(count):
    barrier, seen = threading.Barrier(count), []

    def work():
        barrier.wait(10)  # all at the same time
        seen.append(threading.get_ident())

    for _ in range(3):
        workers.run(work, count)
        assert len(set(seen)) == len(seen) == count and threading.get_ident() in seen
        seen.clear()


def test_threads_are_used_again():
    workers.run(lambda: None, 4)
    before = threading.active_count()
    for count in (4, 2, 3, 4):
        workers.run(lambda: None, count)
        time.sleep(0.01)  # asleep at the next call
    assert threading.active_count() == before


@pytest.mark.parametrize("fails", ["caller", "helper", "both"])
def test_errors_arrive_after_all_are_done(fails):
    me, ended = threading.get_ident(), []

    def work():
        mine = threading.get_ident() == me
        time.sleep(0 if mine else 0.05)
        ended.append(mine)
        if fails == "both" or mine == (fails == "caller"):
            raise KeyError("no")

    with pytest.raises(KeyError, match="no"):
        workers.run(work, 3)
    assert sorted(ended) == [False, False, True]
    workers.run(lambda: ended.append(True), 3)  # and the threads go on
    assert len(ended) == 6


def test_work_is_forgotten():
    class Work:
        def __call__(self):
            pass

    work = Work()
    gone = weakref.ref(work)
    workers.run(work, 2)
    del work
    assert gone() is None


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity here")
@pytest.mark.parametrize("fails", [False, True])
def test_each_worker_has_cpus_of_its_own_and_the_caller_gets_its_own_back(fails):
    before, seen = os.sched_getaffinity(0), []
    count = len(before)

    def work():
        seen.append(os.sched_getaffinity(0))
        if fails and count > 1:
            raise KeyError("no")

    try:
        workers.run(work, count)
    except KeyError:
        pass
    assert os.sched_getaffinity(0) == before
    assert sum(map(len, seen)) == len(before) and set().union(*seen) == before
    seen.clear()
    fails = False
    workers.run(work, count + 3)  # more than CPUs
    assert all(cpus and cpus <= before for cpus in seen)
    assert os.sched_getaffinity(0) == before


def test_calls_from_several_threads():
    counts, lock = [0] * 6, threading.Lock()

    def call(i):
        def work():
            with lock:
                counts[i] += 1

        for _ in range(50):
            workers.run(work, 1 + i % 3)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert counts == [50 * (1 + i % 3) for i in range(6)]


@pytest.mark.parametrize("pause", ["", "import time; time.sleep(0.05)"], ids=["awake", "asleep"])
def test_the_interpreter_exits(pause):
    assert python(f"{ATTEND}\n{pause}\nprint('end')") == "end\n"


def test_the_interpreter_exits_while_a_thread_works():
    started = time.monotonic()
    code = """
import threading, time
from cuflash import workers
me = threading.get_ident()
threading.Thread(target=workers.run, args=(lambda: time.sleep(30), 2), daemon=True).start()
time.sleep(0.2)
"""
    assert python(code) == "" and time.monotonic() - started < 20


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("pause", ["", "import time; time.sleep(0.05)"], ids=["awake", "asleep"])
def test_fork_leaves_parent_and_child_able_to_attend(pause):
    code = f"""{ATTEND}
import os, signal, sys, threading
{pause}
child = os.fork()
assert threading.active_count() == 1
signal.alarm(30)  # ends whoever hangs
for _ in range(3):
    assert (attend() == want).all()
if child:
    assert os.waitpid(child, 0)[1] == 0
    print("end")
"""
    assert python(code) == "end\n"


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinity here")
def test_calls_side_by_side_do_not_take_the_same_cpus():
    """Only one call at a time divides the CPUs; the threads of another may use all."""
    before, inside, outside = os.sched_getaffinity(0), threading.Event(), threading.Event()
    seen = []

    def first():
        inside.set()
        outside.wait(10)

    caller = threading.Thread(target=workers.run, args=(first, 2))
    caller.start()
    inside.wait(10)
    workers.run(lambda: seen.append(os.sched_getaffinity(0)), 2)
    outside.set()
    caller.join()
    assert seen == [before, before]
