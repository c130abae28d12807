"""The memory on disk: whole or absent, for any number of replicas, readable by others."""

import hashlib

import numpy as np
import pytest

from megatron_meds.meds import (
    MemoryFileError,
    MistakeMemory,
    Note,
    Visit,
    load_memory,
    owner,
    save_memory,
)
from megatron_meds.meds import state as state_module

PROMPTS = [f"prompt {i}" for i in range(30)]


def visits(step, layers=True):
    generator = np.random.default_rng(step)
    found = []
    for number, prompt in enumerate(PROMPTS):
        middles = np.random.default_rng([5, number]).normal(size=(3, 6)) * 4
        n = int(generator.integers(0, 9))
        features = middles[generator.integers(0, 3, n)] + 0.2 * generator.normal(size=(n, 6))
        found.append(
            Visit(
                prompt,
                features,
                correct=number % 3 == 0,
                samples=range(n),
                notes=[Note(f"answer {i} ½", "line\nline") for i in range(n)],
                layers=np.tile(features, 2) if layers else None,
                question=f"what is {number}?",
            )
        )
    return found


def sharded(replicas):
    """A memory per replica after three steps."""
    memories = [MistakeMemory() for _ in range(replicas)]
    for step in range(3):
        for replica, memory in enumerate(memories):
            memory.visit_many([v for v in visits(step) if owner(v.prompt_id, replicas) == replica], step)
    return memories


def next_sizes(memories):
    found = {}
    for replica, memory in enumerate(memories):
        mine = [v for v in visits(7) if owner(v.prompt_id, len(memories)) == replica]
        for visit, sizes in zip(mine, memory.visit_many(mine, 7), strict=True):
            found[visit.key] = sizes.tolist()
    return found


@pytest.mark.parametrize(("saved", "loaded"), [(1, 1), (2, 2), (2, 4), (4, 1), (1, 3)])
def test_the_next_visit_gives_the_sizes_it_would_have_given(tmp_path, saved, loaded):
    before = sharded(saved)
    for replica, memory in enumerate(before):
        save_memory(memory, tmp_path / "memory", replica, saved)
    after = [MistakeMemory() for _ in range(loaded)]
    for replica, memory in enumerate(after):
        load_memory(memory, tmp_path / "memory", replica, loaded)
    assert sum(m.rows for m in after) == sum(m.rows for m in before)
    trees = sum(a.nbytes for m in before for key in m for a in m[key].tree or ())
    assert sum(m.bytes for m in after) == sum(m.bytes for m in before) - trees  # made anew at the next visit
    assert next_sizes(after) == next_sizes(before) == next_sizes(sharded(1))


def test_all_that_is_remembered_comes_back_also_in_small_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(state_module, "_BATCH_ROWS", 7)
    (memory,) = sharded(1)
    memory.visit_many(visits(9, layers=False), 9)  # beside rows with layer logits
    save_memory(memory, tmp_path)
    loaded = MistakeMemory()
    load_memory(loaded, tmp_path)
    assert list(loaded) == list(memory)
    for key in memory:
        old, new = memory[key], loaded[key]
        for name in ("features", "labels", "steps", "samples", "layers"):
            np.testing.assert_array_equal(getattr(new, name), getattr(old, name))
            assert getattr(new, name).dtype == getattr(old, name).dtype
        assert (new.notes, new.question) == (old.notes, old.question)


def test_pandas_and_duckdb_read_the_shards(tmp_path):
    import duckdb
    import pandas

    memories = sharded(2)
    for replica, memory in enumerate(memories):
        save_memory(memory, tmp_path, replica, 2)
    frame = pandas.read_parquet(tmp_path)
    assert len(frame) == sum(m.rows for m in memories)
    one = frame[(frame.prompt_id == "prompt 4") & ~frame.correct]
    kept = next(m["prompt 4", False] for m in memories if ("prompt 4", False) in m)
    assert one.label.tolist() == kept.labels.tolist()
    np.testing.assert_array_equal(np.stack(one.feature.tolist()), kept.features)
    counted = duckdb.sql(
        f"select count(distinct prompt_id), max(step) from '{tmp_path}/*.parquet'"
    ).fetchall()
    assert counted == [(len({key[0] for m in memories for key in m}), 2)]


def test_an_empty_memory_is_saved_and_loaded(tmp_path):
    save_memory(MistakeMemory(), tmp_path)
    memory = MistakeMemory()
    load_memory(memory, tmp_path)
    assert len(memory) == 0


def test_a_missing_or_damaged_shard_is_named(tmp_path):
    for replica, memory in enumerate(sharded(3)):
        save_memory(memory, tmp_path, replica, 3)
    middle = tmp_path / "shard_00001_of_00003.parquet"
    whole = middle.read_bytes()
    flipped = [bytearray(whole) for _ in range(8)]
    for number, copy in enumerate(flipped):
        copy[number * len(whole) // 8] ^= 1
    for damaged in (whole[:-20], whole[: len(whole) // 2], b"", *flipped):
        middle.write_bytes(damaged)
        with pytest.raises(MemoryFileError, match=r"shard_00001_of_00003\.parquet: cannot be read"):
            load_memory(MistakeMemory(), tmp_path)
    middle.unlink()
    with pytest.raises(MemoryFileError, match=r"shard_00001_of_00003\.parquet missing"):
        load_memory(MistakeMemory(), tmp_path)
    save_memory(MistakeMemory(), tmp_path)
    with pytest.raises(MemoryFileError, match=r"\[1, 3\] replicas mixed"):
        load_memory(MistakeMemory(), tmp_path)
    with pytest.raises(MemoryFileError, match="holds no shard"):
        load_memory(MistakeMemory(), tmp_path / "nowhere")


def test_another_parquet_file_under_the_name_is_refused(tmp_path):
    import pandas

    file = save_memory(MistakeMemory(), tmp_path)
    pandas.DataFrame({"prompt_id": ["p"]}).to_parquet(file)
    (tmp_path / f"_{file.stem}.sha256").write_text(hashlib.sha256(file.read_bytes()).hexdigest())
    with pytest.raises(MemoryFileError, match="no column question"):
        load_memory(MistakeMemory(), tmp_path)


def test_a_save_that_fails_leaves_the_file_of_before_and_nothing_else(tmp_path, monkeypatch):
    (memory,) = sharded(1)
    file = save_memory(memory, tmp_path)
    before = file.read_bytes()

    def fails(*_):
        raise OSError("disk full")

    monkeypatch.setattr(state_module, "_table", fails)
    with pytest.raises(OSError, match="disk full"):
        save_memory(memory, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {file.name, f"_{file.stem}.sha256"}
    load_memory(MistakeMemory(), tmp_path)
    assert file.read_bytes() == before


def test_a_memory_that_holds_something_is_not_loaded_over(tmp_path):
    (memory,) = sharded(1)
    save_memory(memory, tmp_path)
    with pytest.raises(ValueError, match="not empty"):
        load_memory(memory, tmp_path)
