"""Step rewards within a run, on real ranks: every prefix asked once and graded by its continuation alone."""

from itertools import chain

import numpy as np
import pytest

from megatron_meds.vsrm import step_rewards
from tests.distributed.bodies_stepwise import EMPTY, STEP, VERSION

BODY = "tests.distributed.bodies_stepwise:step"
LAYOUTS = {"1 replica": (2, {"pipeline": 2}), "2 replicas": (4, {"pipeline": 2})}
TWO = "<think>One and two.\n" + STEP * 2 + "</think>\\boxed{1}"
CUT = "<think>One and \\boxed{1}.\n" + STEP * 3
TEXTS = [TWO, TWO, CUT, EMPTY, TWO, CUT]


def run(ranks, layout, texts=TEXTS, **options):
    size, axes = LAYOUTS[layout]
    return [r for r in ranks(size).run(BODY, layout=axes, texts=texts, **options) if r["head"]]


def join(results, what):
    found = {}
    for r in results:
        found |= r[what]
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_are_rewarded_by_the_accuracies_of_their_prefixes(ranks, layout):
    results = run(ranks, layout)
    steps = join(results, "steps")
    assert set(steps) == {"p0/0", "p0/1", "p1/0", "p2/0", "p2/1"}
    for key, (accuracies, rewards, version) in steps.items():
        # as many continuations are right as the prefix has steps; a box in the reasoning counts for nothing
        assert accuracies == [j / 4 for j in range(4 if key in ("p1/0", "p2/1") else 3)]
        assert rewards == pytest.approx(step_rewards(accuracies).tolist())
        assert version == VERSION
    assert sum(len(r["entries"]) for r in results) == 4 * 2 + 2 * 3 - 2


def test_a_function_of_ones_own_rewards_the_steps(ranks):
    (result,) = run(ranks, "1 replica", reward_function="tests.vsrm.own_steps:halves")
    for accuracies, rewards, _ in result["steps"].values():
        assert rewards == pytest.approx(np.diff(accuracies) / 2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_prefix_is_asked_once_those_of_a_response_together_shortest_first(ranks, layout):
    results = run(ranks, layout)
    asked = list(chain(*(r["asked"] for r in results)))
    assert len({text for text, _ in asked}) == len(asked) == 3 + 4 + 3 + 4
    for result in results:
        groups = [request.group for _, request in result["asked"]]
        assert groups == sorted(groups)
        for group in set(groups):
            lengths = [len(text) for text, request in result["asked"] if request.group == group]
            assert lengths == sorted(lengths)
    metrics = results[0]["metrics"]
    assert metrics["vsrm/prefixes_asked"] == len(asked)
    assert metrics["vsrm/prefixes_reused"] == 3  # two equal responses
    assert metrics["vsrm/cached_share"] == pytest.approx(0.8)
    assert metrics["vsrm/accuracy_first"] == 0


def test_what_is_asked_does_not_depend_on_the_replicas(ranks):
    one, two = (run(ranks, layout) for layout in LAYOUTS)
    assert join(one, "steps") == join(two, "steps")
    seeds = [{text: r.seed for result in results for text, r in result["asked"]} for results in (one, two)]
    assert seeds[0] == seeds[1] and len(set(seeds[0].values())) == len(seeds[0])


def test_a_dead_server_is_mended_and_no_prefix_is_asked_twice(ranks):
    whole, mended = run(ranks, "2 replicas"), run(ranks, "2 replicas", dies_after=2)
    assert join(mended, "steps") == join(whole, "steps")
    assert {r["resyncs"] for r in mended} == {1}
    asked = [text for r in mended for text, _ in r["asked"]]
    assert len(asked) == len(set(asked))


def test_a_step_without_any_steps_asks_nothing(ranks):
    for layout in LAYOUTS:
        results = run(ranks, layout, texts=[EMPTY, "no reasoning"])
        assert all(not r["asked"] and not r["entries"] for r in results)


def test_a_share_of_the_trajectories_is_chosen_by_the_seed_and_the_step(ranks):
    texts = [TWO, CUT] * 20
    first = join(run(ranks, "1 replica", texts=texts, share=0.5), "steps")
    again = join(run(ranks, "2 replicas", texts=texts, share=0.5), "steps")
    other = join(run(ranks, "1 replica", texts=texts, share=0.5, number=2), "steps")
    assert set(first) == set(again) != set(other)
    assert 10 < len(first) < 30


def test_continuations_fit_the_servers_and_prefixes_without_room_are_counted(ranks):
    (result,) = run(ranks, "1 replica", texts=[CUT, EMPTY], limit=len("Q0:" + CUT))
    lengths = [(len(text), request.sampling.max_tokens) for text, request in result["asked"]]
    assert lengths and all(n + room <= len("Q0:" + CUT) and 4 <= room <= 20 for n, room in lengths)
    assert result["metrics"]["vsrm/prefixes_dropped"] == 4 - len(lengths)
    request = result["asked"][0][1]
    assert (request.n, request.sampling.temperature, request.sampling.top_p) == (4, 0.6, 0.95)


def test_a_closing_tag_that_no_response_would_show_is_refused(ranks):
    from tests.ranks import RankError

    with pytest.raises(RankError, match=r"vsrm\.close_tag"):
        run(ranks, "1 replica", close_tag="</done>")


def test_reasoning_may_be_opened_by_the_prompts_template(ranks):
    texts = [text.removeprefix("<think>") for text in (TWO, CUT)]
    assert join(run(ranks, "1 replica", texts=[texts[1]] * 2), "steps") == {}
    opened = run(ranks, "1 replica", texts=texts, prompt_end="<think>\n")
    assert {key: found[0] for key, found in join(opened, "steps").items()} == {
        "p0/0": [0, 1 / 4, 2 / 4], "p0/1": [0, 1 / 4, 2 / 4, 3 / 4],
    }  # fmt: skip
    assert all(text.endswith("</think>") for text, _ in opened[0]["asked"])
