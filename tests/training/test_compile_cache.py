"""The files of compiled code in a run's folder: who reads them, and what happens if they cannot be read or written.
tests/nullcuda/test_compile_cache.py shows what they are for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._inductor.runtime.autotune_cache  # registers this kind of result
from torch._inductor.utils import fresh_cache
from torch.compiler._cache import CacheArtifactManager

from harness.runs.directory import CACHE_SECRET
from harness.training.compile_cache import KEPT_KEYS, CompileCache

# A result of autotuning is the simplest thing that torch keeps. Loading puts it into a file of torch's own cache.
KEY, LATER_KEY, CONTENT = "ab/tuned.best_config", "ab/later.best_config", {"XBLOCK": 8}


@pytest.fixture(autouse=True)
def compiled() -> Iterator[None]:
    """Let torch have compiled something in this process, while its own cache is an empty folder."""
    with CacheArtifactManager.with_fresh_cache(), fresh_cache():
        CacheArtifactManager.record_artifact("autotune", KEY, CONTENT)
        yield


def cache_of(folder: Path, key: str = "key", device_index: int = 0) -> CompileCache:
    return CompileCache(folder / "compile-cache", key, device_index, writes=True)


def is_loaded(cache: CompileCache, key: str = KEY) -> bool:
    """Load a cache. Return True if torch has it now."""
    cache.load()
    return (Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / key).exists()


def test_what_was_saved_is_loaded_and_what_is_compiled_later_is_added(tmp_path: Path) -> None:
    cache = cache_of(tmp_path)
    cache.save()
    cache.save()  # nothing new
    CacheArtifactManager.record_artifact("autotune", LATER_KEY, CONTENT)
    cache.save()
    assert len([*(tmp_path / "compile-cache").iterdir()]) == 2
    assert is_loaded(cache_of(tmp_path))
    assert is_loaded(cache_of(tmp_path), LATER_KEY)


@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "flipped in the signature", "flipped", "renamed"])
def test_a_file_that_is_not_whole_is_not_read(
    tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    cache_of(tmp_path).save()
    path = tmp_path / "compile-cache" / "key-0-0.bin"
    content = path.read_bytes()
    flipped = {"flipped in the signature": 3, "flipped": len(content) // 2}
    if damage == "missing":
        path.unlink()
    elif damage == "renamed":
        path.rename(path.with_name("key-1-0.bin"))
    elif damage in flipped:
        at = flipped[damage]
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    else:
        path.write_bytes(content[: 0 if damage == "empty" else -1])
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda _: pytest.fail("torch has read it"))
    cache_of(tmp_path, device_index=int(damage == "renamed")).load()
    assert capfd.readouterr() == ("", "")


def test_a_file_of_another_user_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user is known by a secret: a file that only the user can read, or a variable, which is for machines that do not
    share the file."""
    homes = {name: str(tmp_path / name) for name in ("own", "other")}
    monkeypatch.setenv("XDG_CACHE_HOME", homes["own"])
    cache_of(tmp_path).save()
    (secret,) = (tmp_path / "own" / "ddp-pretrain").iterdir()
    assert secret.stat().st_mode & 0o777 == 0o600
    monkeypatch.setenv("XDG_CACHE_HOME", homes["other"])
    assert not is_loaded(cache_of(tmp_path))
    monkeypatch.setenv(CACHE_SECRET, "shared")
    CacheArtifactManager.record_artifact("autotune", KEY, CONTENT)
    cache_of(tmp_path).save()
    monkeypatch.setenv("XDG_CACHE_HOME", homes["own"])
    assert is_loaded(cache_of(tmp_path))


def test_a_secret_that_is_not_whole_signs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With an empty secret, everybody could sign."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "ddp-pretrain").mkdir()
    (tmp_path / "ddp-pretrain" / "compile-cache-secret").touch()
    cache_of(tmp_path).save()
    assert "is not 32 bytes long; remove it" in capfd.readouterr().err
    assert not is_loaded(cache_of(tmp_path))


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "compile-cache").touch()  # a file in its place: not even root can write into it
    cache = cache_of(tmp_path)
    assert not is_loaded(cache)
    cache.save()
    CacheArtifactManager.record_artifact("autotune", LATER_KEY, CONTENT)
    cache.save()
    (line,) = capfd.readouterr().err.splitlines()
    assert line == f"warning: compiled code is not kept for the next start: {tmp_path / 'compile-cache'}: File exists"


def test_a_few_keys_are_kept(tmp_path: Path) -> None:
    (tmp_path / "compile-cache").mkdir()
    (tmp_path / "compile-cache" / "not-of-it.bin").touch()
    keys = [f"{number:016x}" for number in range(KEPT_KEYS + 1)]
    for time, key in enumerate(keys):
        for index in (1, 0):  # rank 0 removes old keys
            CacheArtifactManager.record_artifact("autotune", KEY, CONTENT)
            cache = cache_of(tmp_path, key, index)
            path = cache.path
            cache.save()
            os.utime(path, ns=(time, time))
    names = {path.name for path in (tmp_path / "compile-cache").iterdir()}
    assert names == {"not-of-it.bin", *(f"{key}-{index}-0.bin" for key in keys[1:] for index in (0, 1))}
