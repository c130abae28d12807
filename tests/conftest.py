"""What every test may ask for, each fixture in a file of its own; and how two processes share the tests."""

from functools import cache
from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile("shared machine", deadline=None)  # its clock says nothing here
hypothesis.settings.load_profile("shared machine")

pytest_plugins = ["tests.fixtures_ranks", "tests.fixtures_tiny", "tests.fixtures_vllm"]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """With `-n 2` (`make test`): the files that use the session's ranks go to one process, those that use
    its vLLM server to one, and no file to both."""
    from xdist.scheduler import LoadScopeScheduling

    @cache
    def group(file: str) -> str:
        text = (config.rootpath / Path(file)).read_text()
        if "vllm_server" in text:  # a file that uses ranks too goes with the server
            return "vLLM server"
        return "ranks" if "ranks(" in text else file

    class ByFixture(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid.partition("::")[0])

    return ByFixture(config, log)
