"""The on-disk store: layout, permissions, verification on read, fallbacks, and races."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import threading
import warnings
from pathlib import Path

import pytest

from cuflash import cache

KEY = hashlib.sha256(b"a kernel").hexdigest()
CUBIN = bytes(range(256)) * 16
META = {"registers": 32, "seconds": 0.25, "log": "ptxas info"}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No store, private directory or environment of another test."""
    monkeypatch.setattr(cache, "_private", None)
    monkeypatch.setattr(cache, "_stores", {})
    for name in ("CUFLASH_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_round_trip(tmp_path: Path) -> None:
    store = cache.Store(tmp_path / "root")
    assert store.lookup(KEY) is None
    store.publish(KEY, CUBIN, META)
    entry = cache.Store(tmp_path / "root").lookup(KEY)
    assert entry is not None
    assert entry.path == tmp_path / "root" / KEY[:2] / KEY / "kernel.cubin"
    assert entry.path.read_bytes() == CUBIN
    assert {name: entry.meta[name] for name in META} == META
    assert entry.meta["sha256"] == hashlib.sha256(CUBIN).hexdigest()
    assert [path.name for path in (tmp_path / "root" / "tmp").iterdir()] == []


def test_a_lookup_alone_creates_nothing(tmp_path: Path) -> None:
    cache.Store(tmp_path / "root").lookup(KEY)
    assert list(tmp_path.iterdir()) == []


def test_everything_is_private_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        cache.Store(tmp_path / "root").publish(KEY, CUBIN, META)
    finally:
        os.umask(old)
    for path in [tmp_path / "root", *(tmp_path / "root").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("file", ["kernel.cubin", "meta.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "missing"])
def test_a_damaged_entry_is_moved_away_with_one_warning(tmp_path: Path, file: str, damage: str) -> None:
    store = cache.Store(tmp_path)
    path = store.publish(KEY, CUBIN, META).path.parent / file
    if damage == "flip":
        _flip(path)
    elif damage == "missing":
        path.unlink()
    else:
        os.truncate(path, 0 if damage == "empty" else path.stat().st_size // 2)
    with pytest.warns(RuntimeWarning, match="corrupt") as seen:
        assert store.lookup(KEY) is None
    assert len(seen) == 1
    assert not path.parent.exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.publish(KEY, CUBIN, META).path.read_bytes() == CUBIN
        assert store.lookup(KEY) is not None


def test_numbers_in_the_meta_are_covered_by_the_checksum(tmp_path: Path) -> None:
    store = cache.Store(tmp_path)
    path = store.publish(KEY, CUBIN, META).path.parent / "meta.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "registers": 33}))
    with pytest.warns(RuntimeWarning, match="checksum"):
        assert store.lookup(KEY) is None


def test_an_entry_under_another_key_is_refused(tmp_path: Path) -> None:
    store = cache.Store(tmp_path)
    other = hashlib.sha256(b"another kernel").hexdigest()
    entry = store.publish(KEY, CUBIN, META).path.parent
    (tmp_path / other[:2]).mkdir()
    entry.rename(tmp_path / other[:2] / other)
    with pytest.warns(RuntimeWarning, match="corrupt"):
        assert store.lookup(other) is None


def test_publish_keeps_the_entry_of_the_first_writer(tmp_path: Path) -> None:
    first = cache.Store(tmp_path).publish(KEY, CUBIN, META)
    inode = first.path.stat().st_ino
    second = cache.Store(tmp_path).publish(KEY, b"later", {**META, "registers": 99})
    assert second.path.stat().st_ino == inode
    assert second.meta["registers"] == META["registers"]
    assert list((tmp_path / "tmp").iterdir()) == []


def test_publish_replaces_a_damaged_entry(tmp_path: Path) -> None:
    store = cache.Store(tmp_path)
    _flip(store.publish(KEY, CUBIN, META).path)
    assert store.publish(KEY, CUBIN, META).path.read_bytes() == CUBIN


def test_racing_writers_and_vandals_never_show_a_broken_entry(tmp_path: Path) -> None:
    """Eight threads with a store each (so no shared lock) publish and read while one of them damages the entry."""
    failures: list[object] = []
    barrier = threading.Barrier(8)

    def work(index: int) -> None:
        store = cache.Store(tmp_path)
        barrier.wait()
        for _ in range(15):
            entry = store.publish(KEY, CUBIN, META)
            if entry.meta["registers"] != META["registers"]:
                failures.append(entry)
            if index == 0:
                try:
                    os.truncate(entry.path, 7)
                except FileNotFoundError:
                    pass
            store.lookup(KEY)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*corrupt")
        threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        cache.Store(tmp_path).lookup(KEY)
    assert cache.Store(tmp_path).publish(KEY, CUBIN, META).path.read_bytes() == CUBIN


def test_an_unwritable_root_falls_back_to_a_private_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")  # a root below a file cannot be made, not even by the superuser
    store = cache.Store(tmp_path / "file" / "root")
    with pytest.warns(RuntimeWarning, match="cannot be written.*CUFLASH_CACHE_DIR") as seen:
        entry = store.publish(KEY, CUBIN, META)
        store.publish(hashlib.sha256(b"2").hexdigest(), CUBIN, META)
    assert len(seen) == 1
    assert entry.path.read_bytes() == CUBIN
    base = entry.path.parents[2]
    assert base == cache.private_directory() and stat.S_IMODE(base.stat().st_mode) == 0o700
    again = store.lookup(KEY)
    assert again is not None and again.path == entry.path
    cache._remove_private(base, os.getpid() + 1)
    assert base.exists(), "a forked child must leave its parent's directory alone"
    cache._remove_private(base, os.getpid())
    assert not base.exists()


def test_a_read_only_root_is_still_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = cache.Store(tmp_path).publish(KEY, CUBIN, META).path
    write = cache._write

    def refuse(base: Path, *rest: object) -> cache.Entry:
        if base == tmp_path:
            raise PermissionError("read-only file system")
        return write(base, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(cache, "_write", refuse)
    store = cache.Store(tmp_path)
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        store.publish(hashlib.sha256(b"2").hexdigest(), CUBIN, META)
    entry = store.lookup(KEY)
    assert entry is not None and entry.path == path


def test_old_work_directories_are_swept(tmp_path: Path) -> None:
    dead, live = tmp_path / "tmp" / "dead", tmp_path / "tmp" / "live"
    dead.mkdir(parents=True)
    live.mkdir()
    os.utime(dead, (0, 0))
    cache.Store(tmp_path).publish(KEY, CUBIN, META)
    assert not dead.exists() and live.exists()


def test_default_root_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.default_root() == tmp_path / ".cache" / "cuflash"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.default_root() == tmp_path / ".cache" / "cuflash"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.default_root() == tmp_path / "xdg" / "cuflash"
    monkeypatch.setenv("CUFLASH_CACHE_DIR", "~/mine")
    assert cache.default_root() == tmp_path / "mine"
    assert cache.default_store() is cache.default_store()
    assert cache.default_store().root == tmp_path / "mine"
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "other"))
    assert cache.default_store().root == tmp_path / "other"


def test_no_home_means_a_temporary_store_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "gone"))
    assert cache.default_root() is None
    with pytest.warns(RuntimeWarning, match="no home directory.*CUFLASH_CACHE_DIR") as seen:
        store = cache.default_store()
        assert cache.default_store() is store
    assert len(seen) == 1
    assert store.publish(KEY, CUBIN, META).path.is_relative_to(cache.private_directory())
    cache._remove_private(store.root, os.getpid())
