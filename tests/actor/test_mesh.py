"""Process groups, heads and the collectives for Python objects, on real ranks."""

import pytest

from megatron_meds.actor.mesh import Coordinates, coordinates, pick_device, replicas_of
from megatron_meds.actor.settings import LayoutSettings

BODIES = "tests.distributed.bodies_actor"


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"tensor": 2},
        {"pipeline": 2},
        {"pipeline": 4},
        {"tensor": 2, "pipeline": 2},
        {"pipeline": 2, "virtual": 2},
    ],
    ids=str,
)
def test_coordinates_are_those_of_megatron(ranks, layout):
    places = ranks(4).run(f"{BODIES}:describe", layout=layout)
    for place in places:
        assert place["ours"] == place["megatron"]
    size = layout.get("tensor", 1) * layout.get("pipeline", 1)
    assert all(place["sizes"][2] == 4 // size for place in places)


@pytest.mark.parametrize(
    "layout", [{}, {"tensor": 2}, {"pipeline": 2}, {"tensor": 2, "pipeline": 2}], ids=str
)
def test_each_replica_has_one_head_on_its_last_stage(ranks, layout):
    places = ranks(4).run(f"{BODIES}:describe", layout=layout)
    heads = [place for place in places if place["head"]]
    assert sorted(head["ours"][2] for head in heads) == list(range(places[0]["sizes"][2]))
    assert all(head["last"] and head["ours"][0] == 0 for head in heads)
    assert [place["ours"][2] for place in places if place["first_head"]] == [0]


@pytest.mark.parametrize("layout", [{}, {"tensor": 2}, {"pipeline": 2}], ids=str)
def test_objects_reach_the_replica_the_heads_and_all(ranks, layout):
    settings = LayoutSettings(**layout)
    answers = ranks(4).run(f"{BODIES}:exchange", layout=layout)
    places = [coordinates(rank, settings, 4) for rank in range(4)]
    heads = [
        rank
        for rank, place in enumerate(places)
        if (place.tensor, place.pipeline) == (0, settings.pipeline - 1)
    ]
    names = [f"rank {head}" for head in heads]
    for rank, answer in enumerate(answers):
        assert answer["from_head"] == {"sent by": names[answer["replica"]]}
        assert answer["heads"] == (names if rank in heads else None)
        assert answer["all"] == [f"rank {number}" for number in range(4)]


def test_gathering_from_heads_refuses_other_ranks(ranks):
    head, other = ranks(2).run(f"{BODIES}:refusal_to_gather", layout={"tensor": 2})
    assert head == ""
    assert "rank 1 is not the head of replica 0" in other


def test_tensor_ranks_are_neighbours_and_stages_are_far_apart():
    layout = LayoutSettings(tensor=2, pipeline=2)
    assert coordinates(1, layout, 8) == Coordinates(tensor=1, context=0, replica=0, pipeline=0)
    assert coordinates(2, layout, 8) == Coordinates(tensor=0, context=0, replica=1, pipeline=0)
    assert coordinates(4, layout, 8) == Coordinates(tensor=0, context=0, replica=0, pipeline=1)


def test_ranks_that_make_no_whole_replicas_are_refused():
    with pytest.raises(ValueError, match=r"layout\.tensor 2.*multiple of 4"):
        replicas_of(LayoutSettings(tensor=2, pipeline=2), 6)
    with pytest.raises(ValueError, match=r"layout\.data is 3.*set layout\.data to 2.*start 6 ranks"):
        replicas_of(LayoutSettings(tensor=2, data=3), 4)


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert pick_device("auto") == "cpu"
    with pytest.raises(ValueError, match=r"actor\.device=cpu"):
        pick_device("cuda")
