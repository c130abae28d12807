"""Functions by import path: found, or refused in words that name the setting."""

import math
import sys

import pytest

from megatron_meds.imports import FunctionError, load_function


def test_a_function_and_a_dotted_name_are_found():
    assert load_function("math:sqrt", "reward.function") is math.sqrt
    assert load_function("pathlib:Path.home", "reward.function")() is not None


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("math", "module:name"),
        (":sqrt", "module:name"),
        ("math:", "module:name"),
        ("no_such_module:f", "no module 'no_such_module'"),
        ("json.no_such_part:f", "no module 'json.no_such_part'"),
        ("math:no_such_name", "math has no 'no_such_name'"),
        ("math:pi", "a float, not a function"),
    ],
)
def test_what_leads_nowhere_is_refused_naming_the_setting(path, message):
    with pytest.raises(FunctionError, match=message) as caught:
        load_function(path, "reward.function")
    assert f"reward.function = {path!r}" in str(caught.value)


def test_an_error_inside_of_the_users_module_is_shown_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "users_own_rewards.py").write_text("import a_package_that_is_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_installed"):
        load_function("users_own_rewards:f", "reward.function")
    sys.modules.pop("users_own_rewards", None)
