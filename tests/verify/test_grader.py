"""The grader against real verdicts, hostile answers, and functions that never come back."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from pathlib import Path

import pytest

from megatron_meds.verify import GoldError, Grader, Verdict
from megatron_meds.verify.pool import WorkerError

DATA = Path(__file__).parents[3] / "shared" / "data" / "verify"
OWN = "tests.verify.own_functions"
TIMEOUT = 30.0  # far above an honest comparison, even on a crowded machine


@pytest.fixture(scope="module")
def grader():
    with Grader(workers=2, timeout=TIMEOUT) as running:
        yield running


def _rows(name):
    if not (DATA / name).is_file():
        pytest.skip(f"no {DATA / name}: real verdicts are not part of the repository")
    return [json.loads(line) for line in (DATA / name).read_text().splitlines()]


def _box(answer):
    return f"Therefore \\boxed{{{answer}}}."


def _judge(grader, answer, gold):
    return grader.grade([(_box(answer), gold)])[0]


# -- what is right


def test_real_responses_are_graded_as_recorded_but_for_the_one_row_that_is_recorded_wrongly(grader):
    rows = _rows("qwen25_math_responses.jsonl")
    verdicts = grader.grade([(r["response"], r["gold"]) for r in rows])
    assert len(verdicts) == 185
    different = [r for r, v in zip(rows, verdicts, strict=True) if v.correct != r["expected"]]
    assert [(r["gold"], r["extracted"]) for r in different] == [("10{,}000", "10000")]


def test_plain_final_answers_of_a_thousand_solutions_are_graded_as_recorded(grader):
    rows = _rows("gsm8k_model_solutions_sample.jsonl")
    pairs = [(_box(r["response"].rpartition("A:")[2].strip()), r["gold"]) for r in rows]
    verdicts = grader.grade(pairs)
    assert [v.correct for v in verdicts] == [r["expected"] for r in rows]


RIGHT = [
    (r"\frac{1}{2}", "0.5"),
    (r"\dfrac{1}{2}", r"\frac12"),
    ("1/2", r"\frac{1}{2}"),
    ("10000", "10{,}000"),
    ("27", "27.0"),
    ("x=5", "5"),
    ("12.", "12"),
    ("12", "$12$."),
    (r"12\text{ cm}", "12"),
    (r"\text{Evelyn}", "Evelyn"),
    (r"(x+1)^2", "x^2+2x+1"),
    (r"\{2, 1\}", r"\{1,2\}"),
    (r"7", r"The answer is \boxed{7}"),
    ("0.333333", r"\frac13"),
    (r"1.60 \times 10^{-19}", r"1.6\times 10^{-19}"),
    (r"62.5\%", "62.5%"),
    ("8.24", r"\approx 8.24 \text{ mph}"),
    (r"1/29322216", r"\dfrac{1}{29,\!322,\!216}"),
    ("c+b+a", "a + b + c"),
    ("E", r"\text{(E)},"),
    (r"\begin{pmatrix}1&-1\\1&1\end{pmatrix}", r"\begin{pmatrix} 1 & -1 \\ 1 & \phantom -1 \end{pmatrix}"),
    (r"\frac{\pi}{2} + 2007", r"2007 + \frac\pi 2"),
    (r"\sin^2(t)", r"\sin^2 t"),
    (r"8 \%", "0.08"),
    (r"-\frac{1}{3}", "-1./3"),
    (r"\sin^{-1}\left(\frac{10}{13}\right)", "np.arcsin(10/13)"),
    (r"n^2-n-1", r"m_{\max }=n^{2}-n-1"),
    (r"\frac{1}{2}E_0^2", r"\frac{E_{0}^{2}}{2}"),
    (r"E_2, E_1", "E_{1},E_{2}"),
    (r"M_{\odot}^2 M^{-2}", r"\frac{M_{\odot}^{2}}{M^{2}}"),
]
WRONG = [
    ("41", "42"),
    (r"\frac{1}{3}", "0.5"),
    ("(1,2]", "[1,2]"),
    ("0.33", r"\frac13"),
    ("x", "y"),
    ("0.0", r"1.6\times 10^{-19}"),
    ("0", "0.0000001"),
    (r"9 \%", "0.08"),
    ("a + b", "a + b + c"),
    (r"\cos^2 t", r"\sin^2 t"),
    (r"E_1^2", "E_{0}^{2}"),
    ("E_1", "E_{1},E_{2}"),
    ("np.arccos(10/13)", "np.arcsin(10/13)"),
    (r"1.7 \times 10^{-19}", r"1.6\times 10^{-19}"),
]


@pytest.mark.parametrize(("answer", "gold"), RIGHT)
def test_equal_values_are_right(grader, answer, gold):
    verdict = _judge(grader, answer, gold)
    assert verdict == Verdict(True, "right", answer)


@pytest.mark.parametrize(("answer", "gold"), WRONG)
def test_other_values_are_wrong_tiny_ones_included(grader, answer, gold):
    verdict = _judge(grader, answer, gold)
    assert (verdict.correct, verdict.reason) == (False, "wrong")


def test_only_the_last_box_counts(grader):
    verdicts = grader.grade(
        [
            (r"\boxed{41} no, \boxed{42}", "42"),
            (r"\boxed{42} no, \boxed{41}", "42"),
            (r"\boxed{42} and \boxed{4", "42"),
            (r"\boxed{42} and \boxed{}", "42"),
            ("it is 42", "42"),
            (r"\fbox{42}", "42"),
            (r"$\boxed 42$", "42"),
        ]
    )
    assert [v.reason for v in verdicts] == ["right", "wrong", "no box", "no box", "no box", "right", "right"]
    assert verdicts[4].answer is None


def test_verdicts_keep_their_order_and_copies_are_graded_once(grader):
    before = grader.counts.total()
    pairs = [(_box(rf"\frac{{{i % 5}}}{{7}}"), rf"{2 * (i % 3)}/14") for i in range(300)]
    verdicts = grader.grade(pairs)
    assert [v.correct for v in verdicts] == [i % 5 == i % 3 for i in range(300)]
    assert grader.counts.total() == before + 300
    assert grader.grade([]) == []


# -- what a model may write


def test_hostile_answers_end_in_bounded_time_and_spoil_no_other_verdict(caplog):
    hostile = [
        "9^{9^{9^{9}}}",
        r"\frac{" * 300 + "1" + "}{2}" * 300,
        r"\operatorname{ones}(100000,100000)",
        "9" * 20_000,
    ]
    pairs = [(_box(a), "5") for a in hostile]
    mixed = [pair for bad in pairs for pair in (bad, (_box(r"\frac{10}{2}"), "5"))]
    with Grader(workers=2, timeout=4.0) as grader, caplog.at_level(logging.WARNING):
        begin = time.monotonic()
        verdicts = grader.grade(mixed)
        took = time.monotonic() - begin
    assert not any(v.correct for v in verdicts[::2])
    assert {v.reason for v in verdicts[::2]} <= {"wrong", "timeout", "crash"}
    assert verdicts[0].reason == "timeout"
    assert all(v.correct for v in verdicts[1::2])
    assert took < 120.0
    assert any("timeout (limit 4 s)" in message for message in caplog.messages)


EXECUTES = [
    r"\text{__import__('os').system('touch FILE')}",
    r"\sum_{n=1}^{\infty} \frac{\variable{__import__('os').system('touch FILE')}}{n!}",
    r"\operatorname{eval}(\operatorname{chr}(49))",
    r"\sum_{n=1}^{\infty} \frac{\operatorname{exit}(n)}{n!}",
    r"$__import__('os').system('touch FILE')$",
    "lambda: __import__('os').system('touch FILE')",
]


def test_nothing_that_an_answer_says_is_run(grader, tmp_path):
    file = tmp_path / "made"
    verdicts = grader.grade([(_box(a.replace("FILE", str(file))), "5") for a in EXECUTES])
    assert not any(v.correct for v in verdicts)
    assert not file.exists()


def test_a_grading_process_can_start_and_write_nothing(tmp_path):
    # Straight into the confined process: what an answer would do if it were run after all.
    code = f"""
import os, subprocess, socket
from megatron_meds.verify.confine import forbid
attempts = forbid()
def refused(action):
    try:
        action()
    except PermissionError:
        return True
    return False
assert refused(lambda: os.system("true"))
assert refused(lambda: subprocess.run(["true"]))
assert refused(lambda: os.fork())
assert refused(lambda: open({str(tmp_path / "file")!r}, "w"))
assert refused(lambda: os.remove({str(tmp_path)!r}))
assert refused(lambda: socket.create_connection(("127.0.0.1", 9)))
assert refused(lambda: exec(compile("1", "<lambdifygenerated-1>", "exec")))
assert not refused(lambda: open(os.devnull).read())
assert len(attempts) == 7, attempts
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# -- a user's own function


def test_a_users_function_that_loops_exits_or_raises_costs_its_own_verdict_only(caplog):
    told = ["loop", "x", "exit", "raise", "quit", "x", "sleep", "score", "print", "x"]
    with (
        Grader(workers=2, timeout=3.0, function=f"{OWN}:behaves_as_told") as grader,
        caplog.at_level(logging.WARNING),
    ):
        verdicts = grader.grade([(response, f"{response}") for response in told])
        reasons = [v.reason for v in verdicts]
        assert reasons == [
            "timeout",
            "right",
            "crash",
            "error",
            "crash",
            "right",
            "timeout",
            "error",
            "right",
            "right",
        ]
        assert "no such thing" in verdicts[3].detail
        assert "0.7" in verdicts[7].detail
        assert grader.counts == {"timeout": 2, "right": 4, "crash": 2, "error": 2}
        assert [v.correct for v in grader.grade([("x", "x"), ("x", "y")])] == [True, False]
    warnings = " ".join(caplog.messages)
    assert "2 of 10 answers ended in a timeout" in warnings
    assert "2 of 10 answers ended in a crash" in warnings
    assert "2 of 10 answers ended in an error" in warnings


def test_failures_are_a_warning_when_they_rise_and_not_while_they_stay(caplog):
    with (
        Grader(workers=1, timeout=TIMEOUT, function=f"{OWN}:behaves_as_told") as grader,
        caplog.at_level(logging.WARNING),
    ):
        quiet = [("x", "x")] * 90
        grader.grade(quiet)
        assert not caplog.messages
        grader.grade(quiet + [("raise", "x")] * 10)
        assert len(caplog.messages) == 1
        grader.grade(quiet + [("raise", "x")] * 10)
        assert len(caplog.messages) == 1


def test_a_users_function_sees_whole_responses_and_may_return_a_bool_of_numpy():
    for name in ("says_yes", "numpy_bool"):
        with Grader(workers=1, timeout=TIMEOUT, function=f"{OWN}:{name}") as grader:
            verdicts = grader.grade([("forty-two, no box", "forty"), (_box("1"), "2")])
            assert [(v.reason, v.answer) for v in verdicts] == [("right", None), ("wrong", "1")]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (f"{OWN}:absent", "has no 'absent'"),
        ("no_such_module_anywhere:f", "no_such_module_anywhere"),
        ("just_a_name", "module:name"),
        (f"{OWN}:NOT_A_FUNCTION", "not a function"),
    ],
)
def test_a_function_that_cannot_be_found_fails_at_the_start_naming_the_setting(path, message):
    with pytest.raises(WorkerError, match=message) as caught, Grader(workers=1, function=path):
        pass
    assert "verify.function" in str(caught.value)


# -- processes


def test_threads_may_share_a_grader(grader):
    found = {}

    def work(number):
        pairs = [(_box(rf"\frac{{{number}}}{{{i}}}"), f"{2 * number}/{2 * i}") for i in range(1, 20)]
        found[number] = grader.grade(pairs)

    threads = [threading.Thread(target=work, args=(n,)) for n in (3, 5, 7, 11)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(v.correct for n in (3, 5, 7, 11) for v in found[n])
    assert all(len(v) == 19 for v in found.values())


def test_grading_outside_of_the_context_is_refused():
    grader = Grader(workers=1)
    with pytest.raises(RuntimeError, match="context manager"):
        grader.grade([(_box("1/2"), "0.5")])


def _alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_grading_processes_end_when_their_parent_is_killed():
    code = """
import sys, time
from megatron_meds.verify import Grader
if True:  # no __main__ guard is needed
    grader = Grader(workers=2).__enter__()
    print(*(w.process.pid for w in grader._pool._workers), flush=True)
    time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(workers) == 2
    assert all(_alive(pid) for pid in workers)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while any(_alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_alive(pid) for pid in workers)


def test_memory_beyond_the_limit_is_refused_and_costs_one_verdict():
    with Grader(workers=1, timeout=TIMEOUT, function=f"{OWN}:behaves_as_told", memory_mib=1024) as grader:
        verdicts = grader.grade([("hoard", "x"), ("x", "x")])
    assert [v.reason for v in verdicts] == ["error", "right"]
    assert "MemoryError" in verdicts[0].detail


def test_a_process_that_is_stuck_when_its_parent_is_gone_ends_itself():
    ours, theirs = Pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron_meds.verify.worker", str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    theirs.close()
    setup = {"function": f"{OWN}:behaves_as_told", "memory_mib": None, "alarm_seconds": 1.0}
    ours.send_bytes(json.dumps(setup).encode())
    assert json.loads(ours.recv_bytes()) == {"ready": True}
    ours.send_bytes(json.dumps([("call", "loop", "")]).encode())
    ours.close()
    assert process.wait(timeout=60) == -signal.SIGALRM


# -- reference answers


def test_references_that_do_not_parse_are_refused_with_their_rows(grader):
    golds = ["42", r"\frac{1}{2}", "t(0,4]", "", "27.0", r"\frac{1}{", "a}b", r"\text{Monday}"]
    with pytest.raises(GoldError) as caught:
        grader.check_golds(golds, [f"train.jsonl:{i + 1}" for i in range(len(golds))])
    message = str(caught.value)
    assert "4 of 8" in message
    for row in (3, 4, 6, 7):
        assert f"train.jsonl:{row}: " in message
    for row in (1, 2, 5, 8):
        assert f"train.jsonl:{row}: " not in message


def test_references_that_do_not_parse_may_be_compared_as_text_with_a_warning(grader, caplog):
    with caplog.at_level(logging.WARNING):
        grader.check_golds(["t(0,4]", "5"], as_text=True)
    assert "row 0: 't(0,4]'" in caplog.text
    assert _judge(grader, "t(0, 4]", "t(0, 4]").correct
    assert not _judge(grader, "t(0,5]", "t(0,4]").correct


def test_references_that_parse_pass(grader):
    grader.check_golds(["42", "-1.5", "10{,}000", "(1,2]", r"x^2+1", r"$\frac{1}{2}$."])
