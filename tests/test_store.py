import os
import pathlib
import zlib

import pytest
from stores import Killed, either_store

import jaxkv

PARTS = [b"first layer" * 10, b"second layer"]
store = either_store


def files(store):
    return sorted(p.name for p in store.path.iterdir() if p.suffix in (".jaxkv", ".tmp"))


def reopened(store, **options):
    store.close()
    return jaxkv.BlockStore(store.path, **options)


def test_what_is_put_comes_back(store):
    store.put_sequence(3, {"length": 5, "columns": [0, -3]}, PARTS)
    first, second = store.put_blocks({"geometry": "g"}, [PARTS, PARTS[::-1]])
    assert store.read_sequence(3) == PARTS
    assert store.sequence(3) == {"length": 5, "columns": [0, -3]}
    assert store.read_block(first, 0) == store.read_block(second, 1) == PARTS[0]
    assert (store.keys, store.num_blocks, store.handles()) == ((3,), 2, {first, second})
    assert store.handles_of_sequences() == {1}
    assert 3 in store and "3" not in store
    store.delete(3)
    store.delete_blocks([first, second])
    assert store.nbytes == 0 and not store.keys and store.num_blocks == 0


def test_a_key_is_used_once_and_numbers_are_not_text(store):
    store.put_sequence(3, {}, PARTS)
    store.put_sequence("3", {}, PARTS[:1])
    store.put_sequence("a/b ü", {}, PARTS[:1])
    assert set(store.keys) == {3, "3", "a/b ü"}
    with pytest.raises(jaxkv.CacheError, match="key 3: the store holds"):
        store.put_sequence(3, {}, PARTS)
    with pytest.raises(jaxkv.CacheError, match=r"swapped sequence 4.*no such entry"):
        store.read_sequence(4)
    for bad, error in ((True, TypeError), (1.0, TypeError), (-1, ValueError), ("", ValueError)):
        with pytest.raises(error, match="key"):
            store.put_sequence(bad, {}, PARTS)


def test_a_full_store_refuses_and_changes_nothing(store):
    store.put_sequence(0, {}, PARTS)
    store.max_bytes = 2 * store.nbytes
    store.put_sequence(1, {}, PARTS)
    before = store.nbytes
    assert before == store.max_bytes
    for put in (
        lambda: store.put_sequence(2, {}, [b""]),
        lambda: store.put_blocks({}, [[b""], PARTS]),
    ):
        with pytest.raises(jaxkv.CacheError, match="full"):
            put()
    assert (store.nbytes, set(store.keys), store.num_blocks) == (before, {0, 1}, 0)
    assert store.read_sequence(1) == PARTS


def test_another_process_finds_what_was_stored_and_handles_are_never_used_twice(tmp_path):
    store = jaxkv.BlockStore(tmp_path)
    handles = store.put_blocks({"geometry": "g"}, [PARTS, PARTS])
    store.put_sequence("talk", {"length": 1}, PARTS)
    with pytest.raises(jaxkv.CacheError, match="has it open"):
        jaxkv.BlockStore(tmp_path)
    size = store.nbytes
    store.delete_blocks(handles[1:])
    store = reopened(store)
    assert store.keys == ("talk",) and store.read_sequence("talk") == PARTS
    assert store.handles() == {handles[0]} and store.read_block(handles[0], 1) == PARTS[1]
    assert store.nbytes < size
    assert min(store.put_blocks({}, [PARTS])) > max(handles)
    assert sum(p.stat().st_size for p in tmp_path.glob("*.jaxkv")) == store.nbytes


@pytest.mark.parametrize("where", ["replace", "fsync"])
def test_a_killed_process_leaves_whole_entries_or_none(tmp_path, monkeypatch, where):
    store = jaxkv.BlockStore(tmp_path)
    store.put_sequence("old", {}, PARTS)

    def kill(*_):
        raise Killed

    # The counter of handles is written first; it is not what is tested.
    store.put_blocks({}, [PARTS])
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, where, kill)
        store.put_sequence("new", {}, PARTS)
    assert any(name.endswith(".tmp") for name in files(store))
    store = reopened(store)
    assert store.keys == ("old",) and store.read_sequence("old") == PARTS
    assert not any(name.endswith(".tmp") for name in files(store))


def test_a_disk_that_fails_before_the_first_handle_changes_nothing(tmp_path, monkeypatch):
    store = jaxkv.BlockStore(tmp_path)

    def fail(_):
        raise OSError("no space left")

    with monkeypatch.context() as patch, pytest.raises(jaxkv.CacheError, match="no space left"):
        patch.setattr(os, "fsync", fail)
        store.put_blocks({}, [PARTS])
    assert files(store) == [] and store.nbytes == 0
    assert len(store.put_blocks({}, [PARTS])) == 1


def test_a_failing_disk_changes_nothing(tmp_path, monkeypatch):
    store = jaxkv.BlockStore(tmp_path)
    store.put_blocks({}, [PARTS])
    before, size = files(store), store.nbytes
    real, calls = os.replace, []

    def fail_second(source, target):
        calls.append(target)
        if len(calls) == 2:
            raise OSError("no space left")
        real(source, target)

    monkeypatch.setattr(os, "replace", fail_second)
    with pytest.raises(jaxkv.CacheError, match=r"cannot write.*no space left"):
        store.put_blocks({}, [PARTS, PARTS])
    assert files(store) == before and store.nbytes == size and store.num_blocks == 1


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]), "part 1 is damaged"),
        (lambda raw: raw[:-1], "cut off"),
        (lambda raw: raw[:40] + b"x" + raw[41:], "damaged"),
        (lambda raw: b"", "damaged"),
    ],
)
def test_a_damaged_file_is_refused_and_can_be_deleted(tmp_path, spoil, message):
    store = jaxkv.BlockStore(tmp_path)
    store.put_sequence("bad", {}, PARTS)
    store.put_sequence("good", {}, PARTS)
    (path,) = tmp_path.glob("*bad.jaxkv")
    path.write_bytes(spoil(path.read_bytes()))
    store = reopened(store)
    with pytest.raises(jaxkv.CacheError, match=message):
        store.read_sequence("bad")
    assert store.read_sequence("good") == PARTS
    store.delete("bad")
    assert reopened(store).keys == ("good",)


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_only_what_comes_from_a_file_is_checksummed(tmp_path, monkeypatch, is_on_disk):
    summed = []
    real = zlib.crc32

    def crc32(data):
        summed.append(bytes(data))
        return real(data)

    monkeypatch.setattr(zlib, "crc32", crc32)
    store = jaxkv.BlockStore(tmp_path if is_on_disk else None, memory_bytes=0)
    store.put_sequence(0, {}, PARTS)
    assert [part in summed for part in PARTS] == [is_on_disk] * 2
    summed.clear()
    assert store.read_sequence(0) == PARTS
    assert summed == (PARTS if is_on_disk else [])


def test_an_opening_that_fails_gives_the_directory_back(tmp_path):
    store = jaxkv.BlockStore(tmp_path)
    store.put_blocks({}, [PARTS])
    store.close()
    counter = tmp_path / "handles"
    good = counter.read_text()
    counter.write_text("many")
    # The error is kept, and with it whatever its frames hold.
    with pytest.raises(jaxkv.CacheError, match="cannot use") as failed:
        jaxkv.BlockStore(tmp_path)
    counter.write_text(good)
    assert jaxkv.BlockStore(tmp_path).num_blocks == 1
    assert failed.value is not None


def test_copies_in_memory_go_in_order_of_their_last_use(tmp_path):
    blocks = [[bytes([i]) * 100] for i in range(3)]
    store = jaxkv.BlockStore(tmp_path, memory_bytes=200)
    a, b, c = store.put_blocks({}, blocks)  # a's copy is gone: two fit
    assert store.read_block(b, 0) == blocks[1][0]
    for path in tmp_path.glob("*.jaxkv"):
        pathlib.Path(path).rename(path.with_suffix(".away"))
    with pytest.raises(jaxkv.CacheError, match="cannot be read"):
        store.read_block(a, 0)
    assert store.read_block(b, 0) == blocks[1][0] and store.read_block(c, 0) == blocks[2][0]
    for path in tmp_path.glob("*.away"):
        pathlib.Path(path).rename(path.with_suffix(".jaxkv"))
    store.read_block(b, 0)
    assert store.read_block(a, 0) == blocks[0][0]  # takes the place of c, used before b
    assert list(store._copies) == [(f"block-{b}", 0), (f"block-{a}", 0)]
    store.delete_blocks([a])
    assert store._copied_bytes == 100


def test_a_closed_store_and_bad_limits_say_so(tmp_path):
    store = jaxkv.BlockStore(tmp_path)
    store.put_sequence(0, {}, PARTS)
    assert "0 blocks, 1 sequences" in repr(store)
    assert 0 in store and 1 not in store and -1 not in store and "" not in store
    store.close()
    with pytest.raises(jaxkv.CacheError, match="closed"):
        store.put_sequence(1, {}, PARTS)
    with pytest.raises(ValueError, match="max_bytes: got -1"):
        jaxkv.BlockStore(max_bytes=-1)
    (tmp_path / "file").write_text("x")
    with pytest.raises(jaxkv.CacheError, match="cannot use"):
        jaxkv.BlockStore(tmp_path / "file")
