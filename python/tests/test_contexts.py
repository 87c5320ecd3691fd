"""Threads, signals, forks, and the cost of a call and of the import."""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import ouzel


def arrays(shape):
    return [np.random.default_rng(seed).standard_normal(shape, dtype=np.float32) for seed in range(3)]


def run(code, **keywords):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
                          **keywords)


def test_contexts_say_what_they_are():
    context = ouzel.Context(threads=3, isa="portable")
    assert (context.threads, context.isa) == (3, "portable")
    assert repr(context) == "ouzel.Context(threads=3, isa='portable')"
    assert ouzel.Context().isa in ouzel.isas()
    assert "portable" in ouzel.isas()
    with pytest.raises(ouzel.InvalidArgumentError, match="'mmx'"):
        ouzel.Context(isa="mmx")
    with pytest.raises(ouzel.InvalidArgumentError, match="1 to 1024 threads"):
        ouzel.Context(threads=-1)


@pytest.mark.parametrize("isa", ouzel.isas())
def test_the_number_of_threads_changes_nothing(isa):
    q, k, v = arrays((1, 200, 4, 16))
    results = [ouzel.retention(q, k, v, context=ouzel.Context(threads=n, isa=isa))[0] for n in (1, 3)]
    assert np.array_equal(*results)


@pytest.mark.parametrize("shared", [True, False])
def test_threads_of_python_compute_at_once(shared):
    q, k, v = arrays((1, 300, 4, 32))
    expected = ouzel.retention(q, k, v)[0]
    wrong = []

    def work():
        context = None if shared else ouzel.Context(threads=2)
        for _ in range(20):
            if not np.array_equal(ouzel.retention(q, k, v, context=context)[0], expected):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_other_threads_run_meanwhile():
    q, k, v = arrays((1, 1 << 14, 8, 64))
    steps, during, done = 0, [], threading.Event()

    def work():
        begin = steps
        ouzel.retention(q, k, v, context=ouzel.Context(threads=1, isa="portable"))
        during.append(steps - begin)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not done.is_set():
        steps += 1
        time.sleep(0.001)
    thread.join()
    assert during[0] > 3


LONG = """
import sys, time
import numpy as np
import ouzel
x = np.ones((1, 1024, 512, 64), np.float32)
context = ouzel.Context(threads=1, isa="portable")
ouzel.retention(x[:, :1], x[:, :1], x[:, :1], context=context)
print("ready", flush=True)
begin = time.perf_counter()
try:
    for _ in range(1000):
        ouzel.retention(x, x, x, context=context)
except KeyboardInterrupt:
    print(ouzel.retention(x[:, :2], x[:, :2], x[:, :2], context=context)[0].shape)
"""


def test_an_interrupt_ends_a_call():
    process = subprocess.Popen([sys.executable, "-c", LONG], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.3)
    begin = time.perf_counter()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert out == "(1, 2, 512, 64)\n" and process.returncode == 0
    assert time.perf_counter() - begin < 3  # the process's end included


def test_a_signal_handler_that_calls_gets_an_error():
    code = """
import signal
import numpy as np
import ouzel
x = np.ones((1, 512, 512, 64), np.float32)
context = ouzel.Context(threads=1, isa="portable")
def handler(*_):
    ouzel.retention(x[:, :1], x[:, :1], x[:, :1], context=context)
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.2)
try:
    for _ in range(1000):
        ouzel.retention(x, x, x, context=context)
except ouzel.InvalidArgumentError as error:
    print(error)
"""
    assert "in the middle of a call of this very thread" in run(code, check=True).stdout


def test_a_forked_process_has_threads_of_its_own():
    code = """
import os
import numpy as np
import ouzel
x = np.ones((1, 64, 8, 16), np.float32)
context = ouzel.Context(threads=4)
expected = ouzel.retention(x, x, x)[0], ouzel.retention(x, x, x, context=context)[0]
child = os.fork()
if child == 0:
    got = ouzel.retention(x, x, x)[0], ouzel.retention(x, x, x, context=context)[0]
    del context
    os._exit(0 if all(map(np.array_equal, got, expected)) else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run(code, check=True).stdout == "0\n"


def test_a_call_costs_little():
    q, k, v = arrays((1, 1, 1, 16))
    g = beta = np.zeros((1, 1, 1), np.float32)
    context = ouzel.Context(threads=1)
    best = float("inf")
    for _ in range(200):
        # Of this thread alone: other work of the machine does not count.
        begin = time.thread_time()
        for _ in range(50):
            ouzel.gated_delta_rule(q, k, v, g, beta, output_final_state=True, context=context)
        best = min(best, (time.thread_time() - begin) / 50)
    assert best < 15e-6, f"{best * 1e6:.1f} microseconds"


def test_the_import_is_quick_and_light():
    code = """
import sys, time
begin = time.process_time()
import ouzel
print(time.process_time() - begin)
assert "numpy" not in sys.modules
"""
    assert min(float(run(code, check=True).stdout) for _ in range(3)) < 0.1
