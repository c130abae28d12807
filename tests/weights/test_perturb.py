"""Noise on live weights: of every tensor, the same for every layout and for every copy."""

import pytest
import torch
from safetensors.torch import load_file

BODY = "tests.distributed.bodies_weights:export_perturbed"


def perturbed(ranks, folder, layout, seed=3):
    """The sender's tensors and every rank's parameters."""
    results = ranks(4).run(BODY, layout=layout, folder=folder, seed=seed)
    (tensors,) = [r["tensors"] for r in results if r["tensors"] and None not in r["tensors"].values()]
    return tensors, [named for result in results for named in result["parameters"]]


@pytest.mark.parametrize(
    "layout",
    [{"tensor": 2}, {"pipeline": 4}, {"tensor": 2, "pipeline": 2}],
    ids=["tp2-dp2", "pp4", "tp2-pp2"],
)
def test_every_tensor_changes_alike_in_every_layout_and_copy(layout, ranks, tiny):
    folder = tiny("qwen3_tied", heads=8, kv_heads=4)
    before = load_file(folder / "model.safetensors")
    expected, _ = perturbed(ranks, folder, {"tensor": 1})
    found, parameters = perturbed(ranks, folder, layout)
    assert found.keys() == expected.keys() == before.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
        assert (tensor != before[name]).float().mean() > 0.99, name
    first: dict = {}
    for key, parameter in parameters:
        assert torch.equal(first.setdefault(key, parameter), parameter), key


def test_another_seed_is_another_noise(ranks, tiny):
    folder = tiny("qwen3_tied", heads=8, kv_heads=4)
    one, _ = perturbed(ranks, folder, {"pipeline": 4}, seed=1)
    other, _ = perturbed(ranks, folder, {"pipeline": 4}, seed=2)
    assert all((one[name] != other[name]).any() for name in one)
