"""The stream of a live actor's weights: order, lock-step, freshness, dtype."""

from collections import defaultdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_meds.weights.files import TensorInfo

BODIES = "tests.distributed.bodies_weights"
LAYOUTS = {
    "tp2-dp2": {"tensor": 2},
    "pp4": {"pipeline": 4},
    "tp2-pp2": {"tensor": 2, "pipeline": 2},
    "pp2-vpp2-dp2": {"pipeline": 2, "virtual": 2},
}
by_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@by_layout
@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_a_second_export_holds_what_changed_since_the_first(kind, layout, ranks, tiny):
    folder = tiny(kind, kv_heads=4, heads=8)
    results = ranks(4).run(f"{BODIES}:export_twice", layout=layout, folder=folder, factor=3.0)
    weights = stored(folder)
    (sender,) = [result for result in results if result["sender"]]
    assert sender["first"].keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(sender["first"][name], tensor), name
        assert torch.equal(sender["second"][name], 3.0 * tensor), name
        assert torch.equal(sender["fresh"][name], 3.0 * tensor), name


@by_layout
def test_the_stream_is_the_manifest_on_every_rank_and_tensors_are_on_the_sender_only(layout, ranks, tiny):
    folder = tiny("qwen3", kv_heads=4, heads=8)
    results = ranks(4).run(f"{BODIES}:export_twice", layout=layout, folder=folder, factor=2.0)
    manifest = results[0]["manifest"]
    assert {info.name for info in manifest} == stored(folder).keys()
    for result in results:
        assert result["manifest"] == manifest
        if result["replica"]:
            assert result["first"] == {}
            continue
        assert list(result["first"]) == [info.name for info in manifest]
        if result["sender"]:
            got = [TensorInfo(n, tuple(t.shape), t.dtype) for n, t in result["first"].items()]
            assert got == manifest
        else:
            assert set(result["first"].values()) == {None}


def test_the_order_is_that_of_the_layers(ranks, tiny):
    folder = tiny("qwen2_untied", layers=12, kv_heads=4, heads=8)
    manifest = ranks(4).run(f"{BODIES}:export_twice", layout={"pipeline": 4}, folder=folder, factor=1.0)[0][
        "manifest"
    ]
    names = [info.name for info in manifest]
    assert names[0] == "model.embed_tokens.weight"
    assert names[-2:] == ["model.norm.weight", "lm_head.weight"]
    layers = [int(name.split(".")[2]) for name in names if ".layers." in name]
    assert layers == sorted(layers)
    assert set(layers) == set(range(12))


@by_layout
def test_ranks_that_share_a_group_meet_in_the_same_collectives_in_the_same_order(layout, ranks, tiny):
    results = ranks(4).run(
        f"{BODIES}:record_collectives", layout=layout, folder=tiny("qwen2", kv_heads=4, heads=8)
    )
    by_group: dict[tuple, dict[int, list]] = defaultdict(lambda: defaultdict(list))
    for rank, result in enumerate(results):
        for operation, members, elements, after in result["log"]:
            assert rank in members
            by_group[operation, members][rank].append((elements, after))
    assert by_group
    for (operation, members), logs in by_group.items():
        assert set(logs) == set(members), (operation, members)
        first, *others = logs.values()
        assert all(log == first for log in others), (operation, members)


@by_layout
def test_ranks_step_the_stream_together_and_other_replicas_stay_out(layout, ranks, tiny):
    results = ranks(4).run(
        f"{BODIES}:record_collectives", layout=layout, folder=tiny("qwen2", kv_heads=4, heads=8)
    )
    taking_part = [result for result in results if result["takes_part"]]
    assert len(taking_part) == layout.get("tensor", 1) * layout.get("pipeline", 1)
    assert all(result["names"] == taking_part[0]["names"] for result in taking_part)
    for result in results:
        if not result["takes_part"]:
            assert result["names"] == []
            assert result["log"] == []


@pytest.mark.parametrize(
    ("precision", "dtype", "want"),
    [
        ("bf16", None, torch.bfloat16),
        ("fp32", torch.bfloat16, torch.bfloat16),
        ("bf16", torch.float32, torch.float32),
    ],
)
def test_tensors_leave_as_held_or_as_asked_for(precision, dtype, want, ranks, tiny):
    folder = tiny("llama", kv_heads=4, heads=8)
    layout = {"tensor": 2, "pipeline": 2}
    results = ranks(4).run(
        f"{BODIES}:export_as", layout=layout, folder=folder, precision=precision, dtype=dtype
    )
    assert all(info.dtype == want for result in results for info in result["manifest"])
    (tensors,) = [r["tensors"] for r in results if all(t is not None for t in r["tensors"].values())]
    for name, tensor in stored(folder).items():
        assert torch.equal(tensors[name], tensor.to(torch.bfloat16).to(want)), name


def test_vllm_can_drive_the_stream_by_tensor_and_by_layer(ranks, tiny):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    folder = tiny("qwen3", kv_heads=4, heads=8)
    results = ranks(4).run(f"{BODIES}:drive_vllm_source", layout={"tensor": 2, "pipeline": 2}, folder=folder)
    for result in results:
        names = [name for name, _, _ in result["metadata"]]
        assert [name for name, _ in result["streamed"]] == names
        assert [name for group in result["groups"] for name in group] == names
        assert len(result["groups"]) == 6  # embedding, four layers, norm and head
        if result["sender"]:
            assert [shape for _, shape in result["streamed"]] == [shape for _, _, shape in result["metadata"]]


@pytest.mark.parametrize(
    "layout",
    [*LAYOUTS.values(), {"tensor": 4}],
    ids=[*LAYOUTS, "tp4, fewer key/value heads than ranks"],
)
def test_the_ranks_runs_are_every_element_of_every_tensor_once(layout, ranks, tiny):
    folder = tiny("qwen2", kv_heads=2, heads=8)
    results = ranks(4).run(f"{BODIES}:runs", layout=layout, folder=folder)
    weights = stored(folder)
    times = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    for name, dim, start, part in (run for result in results for run in result):
        assert torch.equal(weights[name].narrow(dim, start, part.shape[dim]), part), name
        times[name].narrow(dim, start, part.shape[dim]).add_(1)
    for name, count in times.items():
        assert (count == 1).all(), name
