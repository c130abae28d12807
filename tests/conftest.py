"""What every test may ask for. Each fixture lives in a plugin file of its own."""

import pytest

pytest_plugins = ["tests.fixtures_ranks", "tests.fixtures_tiny", "tests.fixtures_vllm"]


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Two processes run the tests (`make test`): the files that use the session's ranks in one, those that
    use its vLLM server together in the other, and never a file in both."""
    groups = {
        _file(item): fixture
        for fixture in ("ranks", "vllm_server")  # a file that uses both goes with the server
        for item in items
        if fixture in item.fixturenames  # type: ignore[attr-defined]
    }
    for item in items:
        item.add_marker(pytest.mark.xdist_group(groups.get(_file(item), _file(item))))


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]
