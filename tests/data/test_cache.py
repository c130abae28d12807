"""A downloaded set is found again without a network, whole, and only by who asks for the same."""

import datasets
import pytest

from megatron_meds.data import cache
from megatron_meds.data.datasets import Counts, DataError, load_rows
from megatron_meds.data.known import Places, find
from megatron_meds.data.settings import DatasetSettings, FieldMap

ROWS = [
    {"question": "1+1", "answer": "2", "level": 1, "tags": ["a", "b"]},
    {"question": "2+2", "answer": "", "level": 2, "tags": []},
    {"question": "é\n6/4", "answer": "1.5", "level": 3, "tags": ["c"]},
]
SETTINGS = DatasetSettings(path="someone/sums", name="sums", incomplete="skip")


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the hub: `asked` counts downloads, `online` says whether it answers."""

    class Hub:
        asked = 0
        online = True

        def load_dataset(self, path, config, split, revision):
            self.asked += 1
            if not self.online:
                raise ConnectionError("no route to host")
            return datasets.Dataset.from_list(ROWS)

    hub = Hub()
    monkeypatch.setattr(datasets, "load_dataset", hub.load_dataset)
    return hub


def file_of(settings, folder):
    return cache.place(find(settings, Places()), folder)


def test_a_second_reading_needs_no_network_and_gives_the_same_rows_and_counts(hub, tmp_path):
    first, second = Counts(), Counts()
    downloaded = load_rows(SETTINGS, first, Places(cache=tmp_path))
    hub.online = False
    found = load_rows(SETTINGS, second, Places(cache=tmp_path))
    assert hub.asked == 1
    assert found == downloaded
    assert [row.extra for row in found] == [row.extra for row in downloaded]
    assert (second.rows, second.incomplete) == (first.rows, first.incomplete) == (3, 1)


def test_the_copy_is_of_the_whole_set_whatever_the_limit_and_label(hub, tmp_path):
    places = Places(cache=tmp_path)
    assert len(load_rows(SETTINGS.model_copy(update={"limit": 1}), places=places)) == 1
    assert len(load_rows(SETTINGS, places=places)) == 2
    assert hub.asked == 1


def test_other_fields_or_another_filter_find_no_copy(hub, tmp_path):
    places = Places(cache=tmp_path)
    load_rows(SETTINGS, places=places)
    load_rows(SETTINGS.model_copy(update={"where": {"level": [1]}}), places=places)
    load_rows(SETTINGS.model_copy(update={"fields": FieldMap(answer="level")}), places=places)
    assert hub.asked == 3
    assert len(list(tmp_path.rglob("*.parquet"))) == 3


@pytest.mark.parametrize("damage", ["cut", "emptied", "other"])
def test_a_damaged_copy_is_said_and_downloaded_again(hub, tmp_path, caplog, damage):
    places = Places(cache=tmp_path)
    good = load_rows(SETTINGS, places=places)
    file = file_of(SETTINGS, tmp_path)
    whole = file.read_bytes()
    if damage == "other":
        datasets.Dataset.from_list(ROWS).to_parquet(file)
    else:
        file.write_bytes(whole[: len(whole) // 2] if damage == "cut" else b"")
    assert load_rows(SETTINGS, places=places) == good
    assert f"{file} is damaged" in caplog.text
    assert hub.asked == 2
    caplog.clear()
    load_rows(SETTINGS, places=places)
    assert hub.asked == 2
    assert not caplog.text


def test_a_copy_appears_whole_or_not_at_all(tmp_path, monkeypatch, caplog):
    import pyarrow.parquet

    def write_half(table, target):
        target.write(b"PAR1half")
        raise OSError("disk full")

    monkeypatch.setattr(pyarrow.parquet, "write_table", write_half)
    cache.write(tmp_path / "set.parquet", cache.Kept([], 0, 0, 0))
    assert "disk full" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_said_and_does_no_harm(hub, tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    assert len(load_rows(SETTINGS, places=Places(cache=tmp_path / "file"))) == 2
    assert "cannot be written" in caplog.text


def test_a_set_that_is_nowhere_is_named_with_the_places_and_the_remedy(hub, tmp_path):
    hub.online = False
    folder, kept = tmp_path / "copies", tmp_path / "cache"
    folder.mkdir()
    with pytest.raises(DataError) as failure:
        load_rows(DatasetSettings(name="aime24"), places=Places(folder, kept))
    message = str(failure.value)
    for part in (
        "data set aime24",
        str(folder),
        str(kept),
        "HuggingFaceH4/aime_2024",
        "no route to host",
        "`path`",
        "data.folder",
        "megatron-meds data get aime24",
    ):
        assert part in message
