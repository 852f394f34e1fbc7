"""Processes that hang, starve and die, and the ones beside them that go on."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator

import pytest

from tstar.errors import UserError
from tstar.rewards.workers import Call, Failure, WorkerPool

OBEY = "misbehaving_rewards:obey"
TIME_LIMIT = 1.5
MEMORY_LIMIT = 256 << 20


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    pool = WorkerPool([(OBEY, {}), (OBEY, {"bonus": 0.5})], 2, TIME_LIMIT, MEMORY_LIMIT)
    yield pool
    pool.close()


def call(text: str, function: int = 0, level: int | None = None) -> Call:
    return Call(function, {"question": "", "answer": "1", "level": level}, {"text": text})


def run(pool: WorkerPool, *texts: str) -> list[float | Failure]:
    return pool.run([call(text) for text in texts])


def test_results_stand_in_the_order_of_the_calls(pool: WorkerPool) -> None:
    texts = [f"sleep {0.1 if i == 0 else 0}" if i % 5 == 0 else str(i) for i in range(40)]
    assert run(pool, *texts) == [1.0 if i % 5 == 0 else float(i) for i in range(40)]
    assert pool.run([call("2", function=i % 2) for i in range(4)]) == [2.0, 2.5, 2.0, 2.5]
    assert pool.run([call("level", level=7)]) == [7.0]
    assert pool.run([]) == []


def test_the_same_processes_serve_run_after_run(pool: WorkerPool) -> None:
    pids = {reward for _ in range(3) for reward in run(pool, *["pid"] * 20)}
    assert len(pids) <= 2


@pytest.mark.parametrize(
    ("text", "cause", "detail"),
    [
        ("spin", "timeout", "1.5 s"),
        ("power 9", "timeout", "1.5 s"),
        ("sleep 60", "timeout", "1.5 s"),
        ("stop", "timeout", "1.5 s"),
        ("allocate 1000000000", "memory", "memory limit"),
        ("hoard", "memory", "memory limit"),
        ("segfault", "crash", "SIGSEGV"),
        ("exit 3", "crash", "exit code 3"),
        ("exit 0", "crash", "exit code 0"),
        ("raise no idea", "error", "RuntimeError: no idea"),
        ("nan", "error", "finite"),
        ("inf", "error", "finite"),
    ],
)
def test_one_answer_fails_and_the_rest_go_on(pool: WorkerPool, text: str, cause: str, detail: str) -> None:
    began = time.monotonic()
    before, *failed, after = run(pool, "3", text, "4")
    assert (before, after) == (3.0, 4.0)
    (failure,) = failed
    assert isinstance(failure, Failure)
    assert failure.cause == cause
    assert detail in failure.detail
    assert time.monotonic() - began < TIME_LIMIT + 10  # a start of the replacement, on a busy machine
    assert run(pool, "5", "6", "7") == [5.0, 6.0, 7.0]


def test_memory_is_bounded_by_the_limit(pool: WorkerPool) -> None:
    """Under the limit it is granted: the limit counts from what the imports took."""
    assert run(pool, "allocate 100000000") == [1e8]


def test_printing_does_not_disturb_the_replies(pool: WorkerPool) -> None:
    assert run(pool, 'print {"reward": 7}', "2") == [1.0, 2.0]


def test_a_long_answer_passes_whole(pool: WorkerPool) -> None:
    text = "length " + "\ud800é\n" * 1_000_000  # 3 MB, with what UTF-8 cannot hold
    assert run(pool, text) == [float(len(text))]


def test_a_worker_that_died_between_runs_is_no_answers_fault(pool: WorkerPool) -> None:
    for pid in {int(reward) for reward in run(pool, *["pid"] * 20) if isinstance(reward, float)}:
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.1)
    assert run(pool, "1", "2", "3") == [1.0, 2.0, 3.0]


def test_many_failures_do_not_use_up_the_pool(pool: WorkerPool) -> None:
    results = run(pool, *["exit 1", "5"] * 4)
    assert [isinstance(each, Failure) for each in results] == [True, False] * 4


def test_an_interrupted_run_leaves_nothing_behind(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(results: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(pool, "_collect", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(pool, "sleep 60", "sleep 60")
    assert run(pool, "8", "9") == [8.0, 9.0]


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("no_such_module:f", {}, "'no_such_module:f' cannot be imported"),
        ("misbehaving_rewards:no_such", {}, "'misbehaving_rewards:no_such' cannot be imported"),
        (OBEY, {"malus": 1}, "options do not fit"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_named(
    function: str, options: dict[str, object], message: str
) -> None:
    pool = WorkerPool([(function, options)], 1)
    with pytest.raises(UserError, match=message):
        pool.run([call("1")])


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("num_workers", {"num_workers": 0}),
        ("time_limit", {"time_limit": 0.0}),
        ("memory_limit", {"memory_limit": 9}),
    ],
)
def test_impossible_limits_are_named(field: str, change: dict[str, object]) -> None:
    with pytest.raises(UserError, match=f"^{field}: "):
        WorkerPool([(OBEY, {})], **change)  # type: ignore[arg-type]


def test_closing_ends_the_processes(pool: WorkerPool) -> None:
    own = WorkerPool([(OBEY, {})], 1, TIME_LIMIT)
    (pid,) = run(own, "pid")
    own.close()
    gc.collect()  # nothing open is left to be warned of
    assert isinstance(pid, float)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_workers_end_with_a_parent_that_is_killed() -> None:
    """One that waits sees the closed socket; one that computes is ended by the kernel."""
    script = textwrap.dedent(
        f"""
        import os, threading
        from tstar.rewards.workers import Call, WorkerPool
        pool = WorkerPool([({OBEY!r}, {{}})], 2, 0.5)
        problem = {{"question": "", "answer": ""}}
        def calls(*texts): return [Call(0, problem, {{"text": text}}) for text in texts]
        # Both workers have answered before one of them is given work without end.
        pids = set()
        while len(pids) < 2:
            pids |= set(pool.run(calls(*["pid"] * 8)))
        print(*[int(pid) for pid in pids], flush=True)
        pool.time_limit = 60  # the parent would wait; the kernel does not
        threading.Timer(0.3, os.kill, (os.getpid(), 9)).start()
        pool.run(calls("spin"))
        """
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 20
    while any(_is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123
        return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
