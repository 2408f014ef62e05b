"""On-disk store of compiled kernels: content-addressed, atomic, verified on every read, private to the user.

An entry is the directory ``<root>/<key[:2]>/<key>/`` with ``kernel.cubin`` and ``meta.json``. It is written under
``<root>/tmp`` and renamed into place, so that a reader sees a whole entry or none, whoever else is writing.
"""

# A store of our own because cuda.core's FileStreamProgramCache keeps bare bytes: no public path for
# cupy.RawModule(path=...), no hash to verify on read, no room for the compiler's report.

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CUBIN = "kernel.cubin"
META = "meta.json"
_STALE_SECONDS = 24 * 3600.0  # work directories older than this belong to a writer that died


@dataclass(frozen=True, slots=True)
class Entry:
    """One verified kernel on disk.

    Attributes
    ----------
    path : Path
        The cubin file.
    meta : mapping of str to Any
        What was given to :meth:`Store.publish`, with ``key``, ``sha256`` (of the cubin) and ``checksum`` (of the rest).
    """

    path: Path
    meta: Mapping[str, Any]


class CorruptEntry(Exception):
    """An entry on disk is not what was written; the message says in which way."""


class KeyedLocks:
    """One lock per key, made on first use."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[Hashable, threading.Lock] = {}

    def __call__(self, key: Hashable) -> threading.Lock:
        with self._guard:
            return self._locks.setdefault(key, threading.Lock())


class Store:
    """A directory of compiled kernels, safe for many threads and processes.

    Nothing is touched until the first lookup or publish. Where `root` cannot be written, a private temporary directory
    takes the new entries (with a warning) and what `root` already holds is still used.

    Parameters
    ----------
    root : path
        Created with mode 0700 when it is not there; an existing directory keeps its mode.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()
        self.lock = KeyedLocks()
        self._warned: set[str] = set()
        self._swept = False

    def lookup(self, key: str) -> Entry | None:
        """The verified entry of a key (64 hex digits), or None; a corrupt entry is moved away with a warning."""
        for base in self._bases():
            try:
                entry = _read(base, key)
            except CorruptEntry as problem:
                self._warn_once(key, f"the cached kernel {_directory(base, key)} is corrupt ({problem}); rebuilding it")
                _discard(base, key)
                continue
            if entry is not None:
                return entry
        return None

    def publish(self, key: str, cubin: bytes, meta: Mapping[str, Any]) -> Entry:
        """Write an entry; when another writer was first, return theirs.

        Parameters
        ----------
        key : str
            64 hex digits.
        cubin : bytes
        meta : mapping
            JSON-serialisable; stored beside the cubin.

        Raises
        ------
        OSError
            When not even a temporary directory can be written.
        """
        try:
            if not self._swept:
                self._swept = True
                _sweep(self.root / "tmp")
            return _write(self.root, key, cubin, meta)
        except OSError as error:
            self._warn_once(
                "unwritable",
                f"the kernel cache {self.root} cannot be written ({error}); what this process compiles is kept in a "
                "temporary directory and lost at exit; set CUFLASH_CACHE_DIR to a writable directory",
            )
            return _write(private_directory(), key, cubin, meta)

    def _bases(self) -> list[Path]:
        return [self.root] if _private is None or _private == self.root else [self.root, _private]

    def _warn_once(self, topic: str, message: str) -> None:
        if topic not in self._warned:
            self._warned.add(topic)
            warnings.warn(message, RuntimeWarning, stacklevel=_caller_level())


def _caller_level() -> int:
    """The stacklevel with which the calling function's warning shows the line of the user that led to it."""
    package = os.path.dirname(__file__) + os.sep
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
        level, frame = level + 1, frame.f_back
    return level


def _directory(base: Path, key: str) -> Path:
    return base / key[:2] / key


def _read(base: Path, key: str) -> Entry | None:
    """The entry if it is there and intact; None if it is not there or not readable; CorruptEntry otherwise."""
    directory = _directory(base, key)
    try:
        raw = (directory / META).read_bytes()
        cubin = (directory / CUBIN).read_bytes()
    except FileNotFoundError as error:
        # A whole entry can be moved away between the two reads; only a directory that lacks a file is corrupt.
        if directory.is_dir():
            raise CorruptEntry(f"{Path(error.filename).name} is missing") from None
        return None
    except OSError:
        return None
    try:
        meta = json.loads(raw)
    except (ValueError, RecursionError):
        raise CorruptEntry(f"{META} is not JSON") from None
    if not isinstance(meta, dict) or meta.get("checksum") != _checksum(meta) or meta.get("key") != key:
        raise CorruptEntry(f"{META} does not match its checksum")
    if meta.get("sha256") != hashlib.sha256(cubin).hexdigest():
        raise CorruptEntry(f"{CUBIN} ({len(cubin)} bytes) does not match its hash")
    return Entry(directory / CUBIN, meta)


def _checksum(meta: Mapping[str, Any]) -> str:
    payload = json.dumps({name: meta[name] for name in meta if name != "checksum"}, sort_keys=True)
    return hashlib.sha256(payload.encode()).hexdigest()


def _write(base: Path, key: str, cubin: bytes, meta: Mapping[str, Any]) -> Entry:
    _make_private(base)
    _make_private(base / "tmp")
    full = {**meta, "key": key, "sha256": hashlib.sha256(cubin).hexdigest()}
    full["checksum"] = _checksum(full)
    work = Path(tempfile.mkdtemp(prefix=f"{key[:8]}-", dir=base / "tmp"))  # mkdtemp makes it 0700
    try:
        _write_file(work / CUBIN, cubin)
        _write_file(work / META, json.dumps(full, indent=1, sort_keys=True).encode())
        _sync_directory(work)
        target = _directory(base, key)
        _make_private(target.parent)
        theirs = _rename_into_place(work, target, base, key)
        return Entry(target / CUBIN, full) if theirs is None else theirs
    finally:
        shutil.rmtree(work, ignore_errors=True)  # gone already when the rename won


def _rename_into_place(work: Path, target: Path, base: Path, key: str) -> Entry | None:
    """Make `work` the entry; return the good entry of another writer when one is there, None when ours is."""
    for _ in range(5):
        try:
            os.rename(work, target)
            _sync_directory(target.parent)
            return None
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        try:
            entry = _read(base, key)
        except CorruptEntry:
            _discard(base, key)
            continue
        if entry is not None:
            return entry
    raise OSError(f"{target} could not be replaced by a good entry")


def _discard(base: Path, key: str) -> None:
    """Move a corrupt entry out of the way and delete it; do nothing where that is not allowed."""
    with contextlib.suppress(OSError), _repair_lock(base):
        # Another process may have repaired it while we waited: a good entry must stay where its readers expect it.
        try:
            _read(base, key)
        except CorruptEntry:
            grave = Path(tempfile.mkdtemp(prefix="corrupt-", dir=base / "tmp"))
            os.rename(_directory(base, key), grave / key)
            shutil.rmtree(grave, ignore_errors=True)


@contextlib.contextmanager
def _repair_lock(base: Path) -> Iterator[None]:
    _make_private(base / "tmp")
    descriptor = os.open(base / "tmp" / "repair.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _make_private(directory: Path) -> None:
    """Create a directory of mode 0700 (its parents get the default mode) unless it is there."""
    if not directory.is_dir():
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)


def _write_file(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sweep(directory: Path) -> None:
    """Delete the work directories of writers that died long ago."""
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            if path.is_dir() and path.stat().st_mtime < time.time() - _STALE_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


_private: Path | None = None
_stores: dict[Path, Store] = {}
_guard = threading.Lock()


def private_directory() -> Path:
    """A 0700 temporary directory of this process, deleted at exit."""
    global _private
    with _guard:
        if _private is None:
            _private = Path(tempfile.mkdtemp(prefix="cuflash-"))
            atexit.register(_remove_private, _private, os.getpid())
        return _private


def _remove_private(directory: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked child must not delete what its parent still uses
        shutil.rmtree(directory, ignore_errors=True)


def default_root() -> Path | None:
    """Where kernels are kept: ``CUFLASH_CACHE_DIR``, else ``cuflash`` under ``XDG_CACHE_HOME`` or ``~/.cache``.

    Returns
    -------
    Path or None
        None when no variable is set and there is no home directory.
    """
    chosen = os.environ.get("CUFLASH_CACHE_DIR")
    if chosen:
        return Path(os.path.expanduser(chosen)).absolute()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg):  # the XDG specification says to ignore a relative path
        return Path(xdg) / "cuflash"
    home = os.path.expanduser("~")
    if os.path.isabs(home) and os.path.isdir(home):
        return Path(home) / ".cache" / "cuflash"
    return None


def default_store() -> Store:
    """The store at :func:`default_root`, one object per directory; without a home, a temporary one with a warning."""
    root = default_root()
    if root is None:
        root = private_directory()
        if root not in _stores:
            warnings.warn(
                "there is no home directory for the kernel cache, so compiled kernels are lost at exit; "
                "set CUFLASH_CACHE_DIR to a writable directory",
                RuntimeWarning,
                stacklevel=_caller_level(),
            )
    with _guard:
        return _stores.setdefault(root, Store(root))
