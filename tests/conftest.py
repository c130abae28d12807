"""What every test may ask for. Each fixture lives in a plugin file of its own."""

import pytest

pytest_plugins = ["tests.fixtures_ranks", "tests.fixtures_tiny", "tests.fixtures_vllm"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Two processes run the tests: a file stays in one, and so do all tests that use the vLLM server."""
    for item in items:
        server = "vllm_server" in item.fixturenames  # type: ignore[attr-defined]
        item.add_marker(pytest.mark.xdist_group("vllm server" if server else item.nodeid.partition("::")[0]))
