"""`megatron-meds memory show` on shards as a run leaves them, in the terminal and as a page."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from typer.testing import CliRunner

from megatron_meds.cli.main import app
from megatron_meds.errors import UserError
from megatron_meds.meds import MistakeMemory, Note, Visit, save_memory
from megatron_meds.trajectory import prompt_id

QUESTIONS = ["what is 1 + 1?", "what is <b>2 & 3</b>?"]
IDS = [prompt_id(q) for q in QUESTIONS]


def checkpoint(run, step, serial):
    """A whole checkpoint that holds a memory of two shards: a large mode, a small one, and right answers."""
    folder = run / "checkpoints" / f"step_{step:06d}"
    for replica in range(2):
        memory = MistakeMemory()
        for number, question in enumerate(QUESTIONS):
            middles = np.random.default_rng(number).normal(size=(3, 8)) * 5
            kinds = np.repeat([0, 1], [6 + 3 * number, 3])
            noise = np.random.default_rng(step).normal(size=(len(kinds), 8)) * 0.1
            notes = [Note(f"answer <{kind}>", f"because\nof [red]{kind}[/red]") for kind in kinds]
            layers = np.tile(middles[kinds] + noise, 2)
            if number == replica:
                memory.visit_many(
                    [Visit(IDS[number], middles[kinds] + noise, False, None, notes, layers, question)], step
                )
                memory.visit_many([Visit(IDS[number], noise[:2], True, question=question)], step)
        save_memory(memory, folder / "memory", replica, 2)
    files = {str(p.relative_to(folder)): p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    (folder / "manifest.json").write_text(json.dumps({"serial": serial, "step": step, "files": files}))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    run = tmp_path_factory.mktemp("there") / "a_run"
    checkpoint(run, 4, serial=1)
    newest = checkpoint(run, 8, serial=2)
    half = run / "checkpoints" / "step_000009"
    half.mkdir()
    (half / "manifest.json").write_text('{"serial": 3, "step": 9, "files": {"gone": 1}}')
    assert newest.is_dir()
    return run


def show(*arguments):
    result = CliRunner(env={"COLUMNS": "120"}).invoke(app, ["memory", "show", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_prompts_are_listed_with_the_largest_clusters_first(run):
    lines = show(run).splitlines()
    places = [next(i for i, line in enumerate(lines) if key[:12] in line) for key in IDS]
    assert places[1] < places[0]
    assert "<b>2 & 3</b>" in lines[places[1]] and "answer <0>" in lines[places[1]]
    assert re.findall(r"\d+", lines[places[1]].split("answer <0>")[1])[0] == "12"


def test_one_prompt_shows_its_clusters_with_answers_and_responses_of_the_newest_whole_checkpoint(run):
    text = show(run, "--prompt", IDS[1][:6])
    assert IDS[1] in text and QUESTIONS[1] in text
    assert re.search(r"9 x +answer <0>", text) and re.search(r"3 x +answer <1>", text)
    assert "of [red]0[/red]" in text  # responses are shown as they are
    assert "step 8, sample" in text and "step 4" not in text


def test_a_checkpoint_or_its_memory_may_be_named_instead_of_the_run(run):
    older = run / "checkpoints" / "step_000004"
    assert "step 4, sample" in show(older, "--prompt", IDS[0])
    assert "step 4, sample" in show(older / "memory", "--prompt", IDS[0])
    assert "12 answers" not in show(run, "--right") and IDS[0][:12] in show(run, "--right")


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.text = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.links += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_is_self_contained_and_holds_a_map_with_a_cell_per_layer_and_response(run, tmp_path):
    file = tmp_path / "new" / "page.html"
    show(run, "--prompt", IDS[1], "--html", file)
    text = file.read_text(encoding="utf-8")
    page = Page(text)
    cells = [
        attrs for tag, attrs in page.tags if tag == "rect" and "width" in attrs and attrs["width"] == "18"
    ]
    assert len(cells) == 2 * 12 * 16  # deviation and plain, 12 responses, 16 layers
    assert not page.links and "http" not in text and "<script" not in text
    assert "prefers-color-scheme:dark" in text
    shown = "".join(page.text)
    assert QUESTIONS[1] in shown and "answer <0>" in shown and "of [red]0[/red]" in shown
    assert "<b>2 & 3" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere/at/all"], "no such folder"),
        (["{run}", "--prompt", "zz"], "no prompt that begins so"),
        (["{run}", "--prompt", ""], "2 prompts begin so"),
        (["{empty}"], "holds no whole checkpoint"),
    ],
)
def test_what_cannot_be_shown_is_said(run, tmp_path, arguments, message):
    with pytest.raises(UserError, match=message):
        show(*[a.format(run=run, empty=tmp_path) for a in arguments])
