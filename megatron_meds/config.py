"""The whole settings tree, and how it is read: YAML over typed defaults, dotted overrides on top.

Knows the names, types and bounds of settings. Knows neither torch nor this machine: what has to be
looked up (files, ports, a model's shape) is `checks`.
"""

from __future__ import annotations

import difflib
import os
import re
import types
import typing
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError

from megatron_meds.actor.settings import ActorSettings, CriticSettings, ModelSettings, OptimizerSettings
from megatron_meds.algorithms.settings import AlgorithmSettings
from megatron_meds.data.settings import DatasetSettings, DataSettings
from megatron_meds.errors import UserError
from megatron_meds.meds.settings import MedsSettings
from megatron_meds.rewards.settings import RewardSettings
from megatron_meds.rollout.settings import RolloutSettings
from megatron_meds.section import Section
from megatron_meds.tracking.settings import TrackingSettings
from megatron_meds.verify.settings import VerifySettings
from megatron_meds.vsrm.settings import VsrmSettings
from megatron_meds.weights.settings import WeightsSettings


class SettingsError(UserError):
    """Settings that cannot be: one line per fault, each naming the key and the remedy."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n".join(faults))


class RunSettings(Section):
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Names the run in folders and trackers. A YAML file that gives none lends its own name."""
    folder: Path = Field(default_factory=lambda given: Path.cwd() / "runs" / given["name"])
    """Where all of the run is written. Default: runs/NAME in the working directory."""
    seed: int = Field(default=1, ge=0, lt=2**31)
    """Seed of the data order, of sampling and of random weights."""
    steps: int = Field(default=100, ge=1)
    """Training steps: rollout, score, update, sync."""
    evaluate_every: int = Field(default=0, ge=0)
    """Steps between evaluations on `data.evaluation`; 0: none between start and end."""
    evaluate_at_start: bool = True
    """Evaluate before the first step, if there is `data.evaluation`."""
    evaluate_at_end: bool = True
    """Evaluate after the last step, if there is `data.evaluation`."""
    evaluate_samples: int = Field(default=1, ge=1)
    """Responses per problem in an evaluation; accuracy is their mean."""
    save_every: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0: one after the last step only."""
    keep_last: int | None = Field(default=2, ge=1)
    """Checkpoints that stay on disk, the newest; null: all."""
    export_every: int = Field(default=0, ge=0)
    """Steps between Hugging Face exports; 0: none before the end."""
    export_at_end: bool = True
    """Export to FOLDER/export in Hugging Face format after the last step."""
    resume: Literal["auto", "never"] | Path = "auto"
    """`auto`: go on from the newest whole checkpoint in `folder`, else start afresh; `never`: start afresh,
    refused where `folder` already holds a run; or the folder of a checkpoint."""


class Settings(Section):
    """Everything a run is told."""

    run: RunSettings = RunSettings()
    model: ModelSettings
    actor: ActorSettings = ActorSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    critic: CriticSettings = CriticSettings()
    weights: WeightsSettings = WeightsSettings()
    rollout: RolloutSettings = RolloutSettings()
    verify: VerifySettings = VerifySettings()
    reward: RewardSettings = RewardSettings()
    meds: MedsSettings = MedsSettings()
    vsrm: VsrmSettings = VsrmSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    data: DataSettings = DataSettings()
    tracking: TrackingSettings = TrackingSettings()


def load(path: Path | str, overrides: Sequence[str] = ()) -> Settings:
    """Read a YAML file over the defaults and apply `key.of.a.setting=value` on top.

    `extends: other.yaml` at the top of a file puts it over another one, whose path counts from its
    folder: sections are joined, values and lists replaced.

    Values of overrides are YAML (`null`, `[1, 2]`, `{path: x}`); a number in a key is a place in a
    list (`data.evaluation.0.limit=64`). Relative paths count from the folder of the YAML file; those
    in overrides, from the working directory. The returned paths are absolute.

    Raises:
        SettingsError: every unknown key, wrong value or unreadable file, a line each.
    """
    path = Path(path)
    raw = _read_chain(path)
    run = raw.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("name", path.stem)
    return assemble(raw, path.absolute().parent, overrides)


def assemble(raw: dict[str, Any], base: Path, overrides: Sequence[str] = ()) -> Settings:
    """The settings tree from nested dictionaries with overrides on top; relative paths count from
    `base`. Raises SettingsError as `load` does."""
    raw = _anchored(raw, Settings, base)
    for text in overrides:
        _override(raw, text)
    return parse(raw)


def parse(raw: dict[str, Any]) -> Settings:
    """The settings tree from nested dictionaries; raises SettingsError as `load` does."""
    try:
        return Settings.model_validate(raw)
    except ValidationError as error:
        raise SettingsError(_faults(error)) from None


def dump(settings: Settings) -> str:
    """YAML of the whole tree, defaults included; `load` of it gives equal settings."""
    tree = settings.model_dump(mode="json")
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=100)


def keys(section: type[Section] = Settings, prefix: str = "") -> Iterator[str]:
    """Every dotted key below a section, sections included; members of a list as `[]`."""
    for name, field in section.model_fields.items():
        yield prefix + name
        inner, listed = _inner(field.annotation)
        if inner is not None:
            yield from keys(inner, f"{prefix}{name}{'[]' if listed else ''}.")


# --- reading ---------------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """YAML that takes 1e-6 for a number and refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key.value!r} is given twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def _yaml(text: str, what: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise SettingsError([f"{what}{place}: not valid YAML: {error.problem}"]) from None
    except yaml.YAMLError as error:
        raise SettingsError([f"{what}: not valid YAML: {error}"]) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise SettingsError([f"{path}: cannot read the settings file: {reason}"]) from None
    raw = _yaml(text, str(path))
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise SettingsError([f"{path}: holds a {type(raw).__name__}, not `section:` with settings below it"])
    return raw


def _read_chain(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """A file over those that it extends, every relative path made absolute."""
    path = path.absolute()
    if path in above:
        raise SettingsError([f"{path}: extends itself, by way of {' and '.join(map(str, above))}"])
    raw = _read(path)
    base = raw.pop("extends", None)
    if base is not None and not isinstance(base, str):
        raise SettingsError([f"{path}: extends = {base!r}: should be the path of a settings file"])
    own = _anchored(raw, Settings, path.parent)
    if base is None:
        return own
    return _over(_read_chain(Path(os.path.abspath(path.parent / base)), (*above, path)), own)


def _over(base: Any, top: Any) -> Any:
    """Sections joined key by key; anything else is what stands on top."""
    if not isinstance(base, dict) or not isinstance(top, dict):
        return top
    return base | {key: _over(base.get(key), value) for key, value in top.items()}


def _override(raw: dict[str, Any], text: str) -> None:
    """Write one `a.b=value` into nested dictionaries and lists."""
    key, equals, value_text = text.partition("=")
    parts = key.split(".")
    if not equals or not all(parts):
        raise SettingsError([f"{text!r}: an override reads section.setting=value"])
    value = _yaml(value_text, f"the value of {text!r}")
    annotation, owner = Settings, None
    node: Any = raw
    for depth, part in enumerate(parts):
        owner, annotation = annotation, _member(annotation, part)
        last = depth == len(parts) - 1
        if last:
            value = _anchored_member(owner, part, value, Path.cwd())
        if isinstance(node, list):
            if not part.isdecimal() or int(part) >= len(node):
                place = ".".join(parts[:depth])
                raise SettingsError([f"{key}: {place} has entries 0 to {len(node) - 1}, not {part!r}"])
            index: Any = int(part)
        else:
            index = part
        if last:
            node[index] = value
            return
        if not isinstance(node, list) and node.get(index) is None:
            node[index] = {}
        node = node[index]
        if not isinstance(node, dict | list):
            raise SettingsError(
                [f"{key}: {'.'.join(parts[: depth + 1])} is a value, it has no settings below it"]
            )


# --- types of the tree -----------------------------------------------------------------------------


def _options(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the annotation itself."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return (annotation,)


def _inner(annotation: Any) -> tuple[type[Section] | None, bool]:
    """The section that a setting holds, if any, and whether it holds a list of them."""
    for option in _options(annotation):
        if isinstance(option, type) and issubclass(option, Section):
            return option, False
        if typing.get_origin(option) is list:
            (item,) = typing.get_args(option)
            if isinstance(item, type) and issubclass(item, Section):
                return item, True
    return None, False


def _member(annotation: Any, part: str) -> Any:
    """Type of what lies at `part` below a type; None where nothing can."""
    inner, listed = _inner(annotation)
    if inner is None:
        return None
    if listed:
        return inner
    field = inner.model_fields.get(part)
    return None if field is None else field.annotation


def _is_path(annotation: Any, value: str) -> bool:
    options = _options(annotation)
    words = [w for o in options if typing.get_origin(o) is Literal for w in typing.get_args(o)]
    return Path in options and value not in words


def _is_file(value: str, base: Path) -> bool:
    """Whether a data set's `path` means a file or folder here, rather than the name of a public set."""
    looks_like_one = value.startswith((".", "/", "~")) or value.endswith((".jsonl", ".parquet"))
    return looks_like_one or (base / value).exists()


def _anchored(value: Any, annotation: Any, base: Path) -> Any:
    """`value` with every relative path in it made absolute, counted from `base`."""
    inner, listed = _inner(annotation)
    if inner is not None:
        if listed and isinstance(value, list):
            return [_anchored(item, inner, base) for item in value]
        if not listed and value is None:
            return {}
        if not listed and isinstance(value, dict):
            return {key: _anchored_member(inner, key, item, base) for key, item in value.items()}
        return value
    if isinstance(value, str) and _is_path(annotation, value):
        return os.path.abspath(base / Path(value).expanduser())
    return value


def _anchored_member(owner: Any, name: str, value: Any, base: Path) -> Any:
    section, listed = _inner(owner)
    if section is DatasetSettings and not listed and name == "path" and isinstance(value, str):
        return os.path.abspath(base / Path(value).expanduser()) if _is_file(value, base) else value
    return _anchored(value, _member(owner, name), base)


# --- faults ----------------------------------------------------------------------------------------


def _key(location: tuple[int | str, ...]) -> str:
    """Dotted key of an error's location; what pydantic appends for the members of a union is cut off."""
    parts: list[str] = []
    annotation: Any = Settings
    for part in location:
        if _inner(annotation)[0] is None and not isinstance(part, int):
            break
        parts.append(str(part))
        annotation = _member(annotation, str(part))
    return ".".join(parts)


def _faults(error: ValidationError) -> list[str]:
    """One line per key, in the order of the tree."""
    demands: dict[str, list[str]] = {}
    values: dict[str, Any] = {}
    for detail in error.errors():
        if detail["type"] == "default_factory_not_called":
            continue
        key = _key(detail["loc"])
        values[key] = detail["input"]
        demands.setdefault(key, []).append(_demand(key, detail))
    lines = []
    for key, wanted in demands.items():
        message = " or ".join(dict.fromkeys(wanted))
        given = f" = {values[key]!r}" if message.startswith("should") else ""
        lines.append(f"{key}{given}: {message}")
    return lines


def _demand(key: str, detail: Any) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return f"no such setting. {_suggestion(key)}"
    if kind == "missing":
        return "must be set, it has no default"
    if kind in ("model_type", "model_attributes_type"):
        return "should be a section: settings below it, not a value"
    if kind == "path_type":
        return "should be a path"
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        return f"should be {context['expected']}"
    message = detail["msg"].replace("Input should", "should").replace("String should", "should")
    if kind == "string_type" and isinstance(detail["input"], int | float):
        return f"{message}; put the number in quotes"
    return message


def _suggestion(key: str) -> str:
    """The nearest valid key: a slip of the pen in its section, else the same name elsewhere."""
    valid = [k.replace("[]", "") for k in keys()]
    parent, _, leaf = key.rpartition(".")
    siblings = [k for k in valid if k.rpartition(".")[0] == _without_places(parent)]
    near = difflib.get_close_matches(leaf, [k.rpartition(".")[2] for k in siblings], n=1, cutoff=0.6)
    if near:
        return f"Did you mean {f'{parent}.{near[0]}' if parent else near[0]}?"
    named = [k for k in valid if k.rpartition(".")[2] == leaf]
    if named:
        return f"Did you mean {' or '.join(named)}?"
    near = difflib.get_close_matches(_without_places(key), valid, n=1, cutoff=0.6)
    if near:
        return f"Did you mean {near[0]}?"
    return f"{parent or 'The file'} has: {', '.join(k.rpartition('.')[2] for k in siblings)}"


def _without_places(key: str) -> str:
    return ".".join(part for part in key.split(".") if not part.isdecimal())
