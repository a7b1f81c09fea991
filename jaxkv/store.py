"""`BlockStore`: pages that left the device, in host memory or on disk.

It holds bytes and manifests, never device arrays. An entry is either one block (all layers, both
sides), named by a handle that block tables refer to, or one swapped sequence, named by its key. A
part of an entry is what one layer needs, so a layer reads and checks its own bytes alone.

A disk entry is one file: magic, header length, a JSON header with the size and CRC-32 of every
part, the header's CRC-32, the parts. It is written to a temporary file, synced and renamed, so a
killed process leaves either the whole entry or a temporary file that the next opening removes.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import secrets
import struct
import threading
import urllib.parse
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxkv.faults import CacheError

Key = int | str
Part = bytes

_MAGIC = b"jaxkv store 1\n"
_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
_SUFFIX, _TEMPORARY = ".jaxkv", ".tmp"
_NAME = re.compile(r"(block-\d+|sequence-i\d+|sequence-s\S+)\Z")
# Handles are never used twice; so many are set aside on disk at a time.
_HANDLE_STRIDE = 4096
_MAX_HANDLE = 2**31 - 3
_MAX_KEY = 100


@dataclasses.dataclass
class _Entry:
    """What is known of one entry without reading its parts.

    `parts` holds them where the store has no path. `damage` says why the entry cannot be read.
    """

    manifest: Mapping[str, Any]
    sizes: Sequence[int] = ()
    checksums: Sequence[int] = ()
    nbytes: int = 0
    begin: int = 0
    parts: Sequence[Part] | None = None
    damage: str | None = None


class BlockStore:
    """Blocks and swapped sequences outside the device.

    Whatever is put here stays until it is taken or deleted: a block table or a later `swap_in`
    needs it, so nothing is evicted. What would exceed `max_bytes` raises CacheError before anything
    has changed.

    Without a path all of it lies in host memory. With a path all of it lies on disk, and
    `memory_bytes` of copies stay in host memory too: the most recently used parts. A read takes the
    copy, or reads the file, checks it and keeps it as the newest copy; the copy that has not been
    used for longest goes first. Dropping a copy loses nothing, its file remains.

    One process at a time may open a directory. What it holds survives the process: swapped
    sequences by their keys, blocks by their handles. Methods may be called from several threads.

    Attributes:
      path: the directory, or None.
      max_bytes: most bytes of all entries, headers included; None for no limit.
      memory_bytes: most bytes of copies in memory beside the disk.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        max_bytes: int | None = None,
        *,
        memory_bytes: int = 2**28,
    ):
        """Opens a store, with what an earlier process left at `path`.

        Args:
          path: a directory, made if it is not there; None keeps everything in host memory.
          max_bytes: most bytes of all entries; None for no limit.
          memory_bytes: most bytes of copies in memory; without a path it does nothing.

        Raises:
          ValueError: a negative limit.
          CacheError: the directory cannot be used, or another process has it open.
        """
        for name, value in (("max_bytes", max_bytes), ("memory_bytes", memory_bytes)):
            if value is not None and value < 0:
                raise ValueError(f"{name}: got {value}, expected at least 0 or None")
        self.path = None if path is None else pathlib.Path(path)
        self.max_bytes = max_bytes
        self.memory_bytes = memory_bytes
        self._lock = threading.RLock()
        self._entries: dict[str, _Entry] = {}
        self._copies: collections.OrderedDict[tuple[str, int], Part] = collections.OrderedDict()
        self._copied_bytes = 0
        # At a random place, so that a cache given the wrong store finds nothing there.
        self._next_handle = secrets.randbelow(_MAX_HANDLE // 2)
        self._handles_set_aside = _MAX_HANDLE
        self._nbytes = 0
        self._is_closed = False
        self._release_directory: Callable[[], object] = _nothing
        if self.path is not None:
            self._open(self.path)

    @property
    def nbytes(self) -> int:
        """Bytes of all entries, headers included."""
        return self._nbytes

    @property
    def num_blocks(self) -> int:
        """Stored blocks that are not part of a swapped sequence."""
        with self._lock:
            return sum(name.startswith("block-") for name in self._entries)

    @property
    def keys(self) -> tuple[Key, ...]:
        """Keys of the swapped sequences."""
        with self._lock:
            return tuple(_key_of(name) for name in self._entries if name.startswith("sequence-"))

    def __contains__(self, key: object) -> bool:
        """Whether a swapped sequence has this key."""
        return not isinstance(key, bool) and key in self.keys

    def __repr__(self) -> str:
        where = "host memory" if self.path is None else f"{str(self.path)!r}"
        limit = "" if self.max_bytes is None else f" of {self.max_bytes / 2**20:.1f}"
        return (
            f"BlockStore({where}, {self.num_blocks} blocks, {len(self.keys)} sequences, "
            f"{self.nbytes / 2**20:.1f}{limit} MiB)"
        )

    def delete(self, key: Key) -> None:
        """Forgets a swapped sequence that nobody will swap in.

        Args:
          key: the key it was swapped out under.

        Raises:
          TypeError: the key is neither an int nor a str.
          ValueError: a negative number, or a text that is empty or too long for a key.
          CacheError: no sequence has this key, or the store is closed.
        """
        with self._opened():
            name = _sequence_name(key)
            if name not in self._entries:
                self._entry(name)
            self._forget([name])

    def close(self) -> None:
        """Lets another process open the directory; a store in memory loses what it holds."""
        with self._lock:
            self._is_closed = True
            self._entries.clear()
            self._copies.clear()
            self._copied_bytes = self._nbytes = 0
            self._release_directory()

    # What follows is for `jaxkv.swap` and the attention that reads stored blocks.

    def put_sequence(self, key: Key, manifest: Mapping[str, Any], parts: Sequence[Part]) -> None:
        """Stores a swapped sequence. Raises CacheError, with nothing changed, if it cannot."""
        with self._opened():
            name = _sequence_name(key)
            if name in self._entries:
                raise CacheError(
                    f"key {key!r}: the store holds a sequence of this key already; swap it in, "
                    "delete it, or choose another key"
                )
            self._put({name: (manifest, parts)})

    def put_blocks(
        self, manifest: Mapping[str, Any], blocks: Sequence[Sequence[Part]]
    ) -> list[int]:
        """Stores blocks, all or none of them, and returns their handles."""
        with self._opened():
            if not blocks:
                return []
            first = self._set_handles_aside(len(blocks))
            handles = list(range(first, first + len(blocks)))
            self._put({f"block-{h}": (manifest, parts) for h, parts in zip(handles, blocks)})
            return handles

    def sequence(self, key: Key) -> Mapping[str, Any]:
        """The manifest of a swapped sequence."""
        with self._opened():
            return self._entry(_sequence_name(key)).manifest

    def read_sequence(self, key: Key) -> list[Part]:
        """All parts of a swapped sequence, checked where they come from a file."""
        with self._opened():
            name = _sequence_name(key)
            return [self._read(name, i) for i in range(len(self._entry(name).sizes))]

    def block(self, handle: int) -> Mapping[str, Any]:
        """The manifest of a stored block."""
        with self._opened():
            return self._entry(f"block-{handle}").manifest

    def read_block(self, handle: int, part: int) -> Part:
        """One layer of a stored block, checked where it comes from a file."""
        with self._opened():
            return self._read(f"block-{handle}", part)

    def handles(self) -> set[int]:
        """Handles of all stored blocks."""
        with self._opened():
            names = [name for name in self._entries if name.startswith("block-")]
            return {int(name.removeprefix("block-")) for name in names}

    def handles_of_sequences(self) -> set[int]:
        """Handles that swapped sequences name."""
        with self._opened():
            found: set[int] = set()
            for name, entry in self._entries.items():
                if name.startswith("sequence-"):
                    if entry.damage is not None:
                        raise CacheError(f"{self._where(name)}: {entry.damage}")
                    found.update(-2 - c for c in entry.manifest.get("columns", ()) if c <= -2)
            return found

    def delete_blocks(self, handles: Sequence[int]) -> None:
        """Forgets blocks that nobody names any more."""
        with self._opened():
            self._forget([f"block-{handle}" for handle in handles])

    @contextlib.contextmanager
    def _opened(self) -> Iterator[None]:
        with self._lock:
            if self._is_closed:
                raise CacheError("the block store is closed")
            yield

    def _entry(self, name: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise CacheError(f"{self._where(name)}: the store holds no such entry")
        if entry.damage is not None:
            raise CacheError(f"{self._where(name)}: {entry.damage}")
        return entry

    def _where(self, name: str) -> str:
        kind, _, rest = name.partition("-")
        what = f"block handle {rest}" if kind == "block" else f"swapped sequence {_key_of(name)!r}"
        return what if self.path is None else f"{what} ({self._file(name)})"

    def _file(self, name: str) -> pathlib.Path:
        assert self.path is not None
        return self.path / (name + _SUFFIX)

    def _put(self, entries: Mapping[str, tuple[Mapping[str, Any], Sequence[Part]]]) -> None:
        """Stores entries, all or none."""
        new = {
            name: _described(name, manifest, parts, is_on_disk=self.path is not None)
            for name, (manifest, parts) in entries.items()
        }
        wanted = sum(entry.nbytes for entry, _ in new.values())
        if self.max_bytes is not None and self._nbytes + wanted > self.max_bytes:
            raise CacheError(
                f"the block store is full: {wanted} more bytes beside {self._nbytes} exceed "
                f"max_bytes = {self.max_bytes}; swap sequences in, delete some, or raise max_bytes"
            )
        if self.path is None:
            for name, (entry, _) in new.items():
                self._entries[name] = dataclasses.replace(entry, parts=list(entries[name][1]))
        else:
            self._write_files({name: (head, entries[name][1]) for name, (_, head) in new.items()})
            for name, (entry, _) in new.items():
                self._entries[name] = entry
                for i, part in enumerate(entries[name][1]):
                    self._keep_copy(name, i, part)
        self._nbytes += wanted

    def _write_files(self, files: Mapping[str, tuple[bytes, Sequence[Part]]]) -> None:
        written: list[pathlib.Path] = []
        try:
            for name, (head, parts) in files.items():
                temporary = self._file(name).with_suffix(_TEMPORARY)
                written.append(temporary)
                with open(temporary, "wb") as file:
                    file.write(head)
                    for part in parts:
                        file.write(part)
                    file.flush()
                    os.fsync(file.fileno())
            for name in files:
                final = self._file(name)
                os.replace(final.with_suffix(_TEMPORARY), final)
                written.append(final)
            assert self.path is not None
            _sync_directory(self.path)
        except OSError as error:
            for path in written:
                with contextlib.suppress(OSError):
                    path.unlink(missing_ok=True)
            raise CacheError(f"the block store cannot write to {self.path}: {error}") from error

    def _read(self, name: str, part: int) -> Part:
        entry = self._entry(name)
        if entry.parts is not None:
            return entry.parts[part]
        copy = self._copies.get((name, part))
        if copy is not None:
            self._copies.move_to_end((name, part))
            return copy
        size = entry.sizes[part]
        try:
            with open(self._file(name), "rb") as file:
                file.seek(entry.begin + sum(entry.sizes[:part]))
                data = file.read(size)
        except OSError as error:
            raise CacheError(f"{self._where(name)}: cannot be read: {error}") from error
        if len(data) != size or zlib.crc32(data) != entry.checksums[part]:
            raise CacheError(f"{self._where(name)}: part {part} is damaged (checksum or length)")
        self._keep_copy(name, part, data)
        return data

    def _keep_copy(self, name: str, part: int, data: Part) -> None:
        if len(data) > self.memory_bytes:
            return
        self._copies[name, part] = data
        self._copied_bytes += len(data)
        while self._copied_bytes > self.memory_bytes:
            _, oldest = self._copies.popitem(last=False)
            self._copied_bytes -= len(oldest)

    def _forget(self, names: Sequence[str]) -> None:
        for name in names:
            entry = self._entries.pop(name)
            self._nbytes -= entry.nbytes
            for i in range(len(entry.sizes)):
                self._copied_bytes -= len(self._copies.pop((name, i), b""))
            if self.path is not None:
                # A file that stays behind is found again, as an entry, by the next opening.
                with contextlib.suppress(OSError):
                    self._file(name).unlink(missing_ok=True)

    def _set_handles_aside(self, count: int) -> int:
        """The first of `count` handles that no process has used or will use for something else."""
        first = self._next_handle
        if first + count > _MAX_HANDLE:
            raise CacheError("the block store has run out of handles; open a new directory")
        if first + count > self._handles_set_aside:
            assert self.path is not None
            self._handles_set_aside = _set_aside(self.path, first + count + _HANDLE_STRIDE)
        self._next_handle = first + count
        return first

    def _open(self, path: pathlib.Path) -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._release_directory = weakref.finalize(self, _unlock, _lock_directory(path))
            try:
                self._read_directory(path)
            except BaseException:
                # Whoever keeps the error keeps this store too.
                self._release_directory()
                raise
        except (OSError, ValueError) as error:
            raise CacheError(f"the block store cannot use {path}: {error}") from error

    def _read_directory(self, path: pathlib.Path) -> None:
        for leftover in path.glob(f"*{_TEMPORARY}"):
            leftover.unlink()
        for file in sorted(path.glob(f"*{_SUFFIX}")):
            if _NAME.match(file.stem):
                self._entries[file.stem] = _described_by_file(file)
        counter = path / "handles"
        used = int(counter.read_text()) if counter.exists() else self._next_handle
        self._nbytes = sum(entry.nbytes for entry in self._entries.values())
        self._next_handle = self._handles_set_aside = used


def _nothing() -> None:
    """What a store without a directory has to release."""


def _sequence_name(key: Key) -> str:
    """The entry name of a swapped sequence, which is also its file's name."""
    if isinstance(key, bool) or not isinstance(key, int | str):
        raise TypeError(f"key: got {key!r} of type {type(key).__name__}, expected an int or str")
    if isinstance(key, str):
        quoted = urllib.parse.quote(key, safe="")
        if not 0 < len(quoted) <= _MAX_KEY:
            raise ValueError(f"key: got {key!r}, expected 1 to {_MAX_KEY} characters once quoted")
        return f"sequence-s{quoted}"
    if key < 0:
        raise ValueError(f"key: got {key}, expected at least 0")
    return f"sequence-i{key}"


def _key_of(name: str) -> Key:
    text = name.removeprefix("sequence-")
    return int(text[1:]) if text[0] == "i" else urllib.parse.unquote(text[1:])


def _described(
    name: str, manifest: Mapping[str, Any], parts: Sequence[Part], *, is_on_disk: bool
) -> tuple[_Entry, bytes]:
    """An entry and the head of its file; what stays in memory has no checksums."""
    sizes = [len(p) for p in parts]
    checksums = [zlib.crc32(p) for p in parts] if is_on_disk else []
    fields = {"name": name, "sizes": sizes, "checksums": checksums, "manifest": manifest}
    header = json.dumps(fields).encode()
    head = _MAGIC + _LENGTH.pack(len(header)) + header + _CHECKSUM.pack(zlib.crc32(header))
    entry = _Entry(
        manifest=json.loads(header)["manifest"],
        sizes=sizes,
        checksums=checksums,
        nbytes=len(head) + sum(sizes),
        begin=len(head),
    )
    return entry, head


def _described_by_file(file: pathlib.Path) -> _Entry:
    """The entry of a file that an earlier process wrote; one that cannot be one says so."""
    size = file.stat().st_size
    broken = _Entry(
        manifest={}, nbytes=size, damage="the file is damaged, or of another version; delete it"
    )
    with open(file, "rb") as stream:
        lead = stream.read(len(_MAGIC) + _LENGTH.size)
        if len(lead) != len(_MAGIC) + _LENGTH.size or not lead.startswith(_MAGIC):
            return broken
        (length,) = _LENGTH.unpack(lead[len(_MAGIC) :])
        if length > size:
            return broken
        header, checksum = stream.read(length), stream.read(_CHECKSUM.size)
    if _CHECKSUM.pack(zlib.crc32(header)) != checksum:
        return broken
    fields = json.loads(header)
    begin = len(lead) + len(header) + len(checksum)
    if fields["name"] != file.stem or size != begin + sum(fields["sizes"]):
        return dataclasses.replace(broken, damage="the file was renamed or cut off; delete it")
    return _Entry(
        manifest=fields["manifest"],
        sizes=fields["sizes"],
        checksums=fields["checksums"],
        nbytes=size,
        begin=begin,
    )


def _set_aside(path: pathlib.Path, until: int) -> int:
    """Writes down that handles below `until` may be in use; returns `until`."""
    temporary = path / f"handles{_TEMPORARY}"
    try:
        with open(temporary, "w") as file:
            file.write(str(until))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path / "handles")
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise CacheError(f"the block store cannot write to {path}: {error}") from error
    return until


def _lock_directory(path: pathlib.Path) -> int:
    """Takes the directory for this process; a killed process gives it back."""
    descriptor = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # no such lock on this system
        pass
    except OSError as error:
        os.close(descriptor)
        raise CacheError(f"{path}: another process or store has it open") from error
    return descriptor


def _unlock(descriptor: int) -> None:
    os.close(descriptor)


def _sync_directory(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
