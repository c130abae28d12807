"""`megatron-meds evaluate` on a server that answers by seed: whole, killed and gone on, and refusals."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from megatron_meds.cli.main import app
from megatron_meds.data.templates import load_tokenizer
from megatron_meds.errors import UserError
from megatron_meds.rollout.client import ENDPOINT
from megatron_meds.weights.control import INITIAL
from tests.stub_server import StubServer

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny_reasoner"
ROWS = [json.loads(line) for line in (EXAMPLE / "heldout.jsonl").read_text().splitlines()[:6]]


@pytest.fixture(scope="module")
def texts():
    """Per prompt (its ids as a tuple's tail) the right answer, and a way to write text as ids."""
    return load_tokenizer(EXAMPLE / "model")


def answering(tokenizer, pause=0.0):
    """Right where the seed is a multiple of 3, no box at multiples of 5, else wrong; one in 7 cut off."""

    def answer(path, body):
        if path == "/health":
            return 200, {}
        if path == "/weight_info":
            return 200, {"weight_version": INITIAL}
        assert path == ENDPOINT
        time.sleep(pause)
        question = tokenizer.decode(body["token_ids"])
        right = next(row["answer"] for row in ROWS if row["question"] in question)
        wanted = body["sampling_params"]
        choices = []
        for k in range(wanted["n"]):
            seed = wanted["seed"] + k
            said = right if seed % 3 == 0 else "99999"
            text = "no idea" if seed % 5 == 0 else f"\\boxed{{{said}}}"
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            choices.append(
                {
                    "index": k,
                    "token_ids": ids,
                    "logprobs": None,
                    "finish_reason": "length" if seed % 7 == 0 else "stop",
                    "weight_versions": [{"version": INITIAL, "start": 0, "end": len(ids)}],
                }
            )
        return 200, {"choices": choices}

    return answer


@pytest.fixture
def problems(tmp_path):
    file = tmp_path / "six.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


def command(out, problems, url, samples=20, *more):
    return [
        "evaluate", str(EXAMPLE / "model"), "--sets", str(problems), "--samples", str(samples),
        "--max-tokens", "64", "--out", str(out), "--url", url, *more,
    ]  # fmt: skip


def run(*words):
    done = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_every_problem_is_sampled_n_times_and_the_numbers_are_those_of_the_seeds(tmp_path, texts, problems):
    with StubServer(answering(texts)) as server:
        said = run(*command(tmp_path / "out", problems, server.url))
        asked = [body["sampling_params"] for path, body in server.calls if path == ENDPOINT]
    seeds = [p["seed"] + k for p in asked for k in range(p["n"])]
    assert len(seeds) == len(set(seeds)) == 6 * 20
    found = json.loads((tmp_path / "out" / "results.json").read_text())["models"]["model"]["six"]
    right = np.array([s % 3 == 0 and s % 5 != 0 for s in seeds])
    assert found["pass_at"]["1"]["mean"] == pytest.approx(right.mean())
    assert found["boxed"] == pytest.approx(np.mean([s % 5 != 0 for s in seeds]))
    assert found["truncated"] == pytest.approx(np.mean([s % 7 == 0 for s in seeds]))
    assert list(found["pass_at"]) == ["1", "2", "4", "8", "16"]
    assert "pass@16" in said and "6 x 20" in said
    assert all(p["temperature"] == 1.0 and p["max_tokens"] == 64 for p in asked)
    assert (tmp_path / "out" / "table.tex").read_text().startswith("\\begin{tabular}")


def test_a_killed_evaluation_goes_on_where_it_was_and_ends_alike(tmp_path, texts, problems):
    with StubServer(answering(texts)) as server:
        run(*command(tmp_path / "whole", problems, server.url))
    with StubServer(answering(texts, pause=0.3)) as server:
        words = command(tmp_path / "out", problems, server.url, 20, "rollout.concurrency=2")
        process = subprocess.Popen(
            [sys.executable, "-m", "megatron_meds.cli.main", *words], stdout=subprocess.DEVNULL
        )
        file = tmp_path / "out" / "model" / "six.jsonl"
        deadline = time.monotonic() + 120
        while not (file.exists() and len(file.read_bytes().splitlines()) >= 3):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    there = len(file.read_bytes().splitlines())
    with StubServer(answering(texts)) as server:
        run(*command(tmp_path / "out", problems, server.url))
        assert server.paths().count(ENDPOINT) <= 12 - there + 1  # at most one line was cut off
        before = len(server.calls)
        said = run(*command(tmp_path / "out", problems, server.url))
        assert len(server.calls) == before and "120 of them there already" in said
    for name in ("results.json", "table.md"):
        assert (tmp_path / "out" / name).read_text() == (tmp_path / "whole" / name).read_text()


def test_more_samples_are_added_to_those_that_are_there(tmp_path, texts, problems):
    with StubServer(answering(texts)) as server:
        run(*command(tmp_path / "out", problems, server.url, 5))
        run(*command(tmp_path / "out", problems, server.url, 20))
        run(*command(tmp_path / "whole", problems, server.url, 20))
    tables = [(tmp_path / name / "table.md").read_text() for name in ("out", "whole")]
    assert tables[0] == tables[1]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--temperature", "0.5"], "temperature = 1.0, not 0.5"),
        (["--seed", "2"], "seed = 1, not 2"),
        (["data.template.name=raw"], "template"),
    ],
)
def test_answers_of_another_evaluation_are_not_mixed_in(tmp_path, texts, problems, more, words):
    with StubServer(answering(texts)) as server:
        run(*command(tmp_path / "out", problems, server.url, 2))
        with pytest.raises(UserError, match=words):
            run(*command(tmp_path / "out", problems, server.url, 2, *more))


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["nowhere"], "nowhere: no Hugging Face folder"),
        ([str(EXAMPLE / "model"), "--sets", "math5000"], "math5000"),
        ([str(EXAMPLE / "model"), "--sets", str(EXAMPLE / "heldout.jsonl")], "--max-tokens 8192"),
        ([str(EXAMPLE / "model"), "rollout.servers=1"], "rollout.servers"),
        ([str(EXAMPLE / "model"), str(EXAMPLE / "model")], "both called 'model'"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(tmp_path, words, match):
    with pytest.raises(UserError, match=match):
        run("evaluate", *words, "--out", str(tmp_path))


def test_servers_that_are_gone_leave_what_was_answered(tmp_path, texts, problems):
    answered = []
    well = answering(texts)

    def dying(path, body):
        if path == ENDPOINT:
            answered.append(1)
        return well(path, body) if len(answered) <= 3 else None

    with StubServer(dying) as server, pytest.raises(UserError, match="start the command again to go on"):
        run(*command(tmp_path / "out", problems, server.url, 20, "rollout.concurrency=1"))
    assert len((tmp_path / "out" / "model" / "six.jsonl").read_text().splitlines()) == 3
