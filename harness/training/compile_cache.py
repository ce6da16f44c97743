"""Files of compiled code in the run's folder, for later starts, also on another machine.

Loading a file can execute any code, and a run's folder may come from somebody else. So files are loaded only if they
are signed with this user's secret. Another machine needs the same secret.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import zlib
from contextlib import suppress
from pathlib import Path

import torch
from torch.compiler._cache import CacheArtifactManager, CacheInfo  # private: nothing public clears what torch recorded

import gpt
from harness.common.files import atomic_file, sha256, user_cache
from harness.common.messages import tell
from harness.common.program import program_versions
from harness.distributed.world import World
from harness.model import cross_entropy
from harness.model.kernels import attention_in_use
from harness.planning.experiment import Experiment
from harness.runs.directory import CACHE_SECRET
from harness.runs.throughput import BATCH_KEYS, KERNEL_KEYS
from harness.runs.train_config import TrainConfig

SECRET_FILE = "compile-cache-secret"  # holds the secret if the environment variable (see `_secret`) is not set
SECRET_BYTES = SIGNATURE_BYTES = 32
KEY_CHARACTERS = 16
MOST_PARTS = 8  # files of one rank with one key
KEPT_KEYS = 3  # number of newest keys whose files are kept; a key stands for versions, GPU and settings


class CompileCache:
    """Compiled code of one rank, in files in `folder`. `key` stands for the versions, the GPU and the settings that the
    code depends on. What torch compiles later, such as the code for validation, is added as a further file."""

    def __init__(self, folder: Path, key: str, device_index: int, *, writes: bool) -> None:
        # Compiled code has the GPU's index in it, so each rank of a machine has files of its own.
        self.folder, self.key, self.name = folder, key, f"{key}-{device_index}"
        self.writes, self.is_main = writes, writes and device_index == 0
        self.parts = 0  # files that were read or written
        self.known: set[tuple[str, str]] = set()  # kinds and keys of the results in these files

    @classmethod
    def of(cls, experiment: Experiment, config: TrainConfig, world: World) -> CompileCache:
        """Return the cache of this rank. `config` is the experiment's train.json with its precision resolved. On a CPU
        nothing is kept. Only ranks of the first machine write files."""
        folder = experiment.run.compile_cache
        if world.device.type != "cuda":
            # torch's artifacts do not contain what the C++ compiler makes.
            return cls(folder, "cpu", 0, writes=False)
        parts = {
            "versions": [program_versions().get(name) for name in ("python", "torch", "triton", "cuda")],
            "device": [world.device_name, torch.cuda.get_device_capability(world.device)],
            "model": experiment.model.model_dump(mode="json"),
            "train": config.model_dump(mode="json", include={*BATCH_KEYS, *KERNEL_KEYS}),
            "attention": attention_in_use(config.attention, world.device),
            "is_parallel": world.size > 1,
            "sources": [sha256(Path(str(module.__file__))) for module in (gpt, cross_entropy)],
        }
        key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:KEY_CHARACTERS]
        return cls(folder, key, world.local_rank, writes=world.rank == world.local_rank)

    def load(self) -> None:
        """Give the files' contents to torch, up to the first file that is missing, damaged or not signed by this user.
        Must be called before the model is compiled. Raises no error."""
        with suppress(Exception):  # whatever is wrong with a file, this run can do without it
            while self.parts < MOST_PARTS:
                content = self.path.read_bytes()
                signature, packed = content[:SIGNATURE_BYTES], content[SIGNATURE_BYTES:]
                if not hmac.compare_digest(signature, self._sign(packed)):
                    return
                self.known |= _names(torch.compiler.load_cache_artifacts(zlib.decompress(packed)))
                self.parts += 1

    def save(self) -> None:
        """Write a file with what torch has compiled since the last one. On rank 0, also remove files of old keys. If
        writing fails, only warn."""
        if not self.writes or self.parts == MOST_PARTS or not CacheArtifactManager.need_serialize():
            return
        artifacts = torch.compiler.save_cache_artifacts()
        # Otherwise the next file would hold these artifacts, too, in lists of their own, and load_cache_artifacts reads
        # only the last list of each kind.
        CacheArtifactManager.clear()
        if artifacts is None or _names(artifacts[1]) <= self.known:
            return
        self.known |= _names(artifacts[1])
        try:
            packed = zlib.compress(artifacts[0], 1)
            self.folder.mkdir(exist_ok=True)
            with atomic_file(self.path) as draft:
                draft.write_bytes(self._sign(packed) + packed)
            self.parts += 1
            if self.is_main:
                self._remove_old_keys()
        except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home directory
            self.writes = False
            if self.is_main:
                reason = f"{error.filename or self.path}: {error.strerror}" if isinstance(error, OSError) else error
                tell(f"warning: compiled code is not kept for the next start: {reason}")

    @property
    def path(self) -> Path:
        """Path of the file that is to be read or written next."""
        return self.folder / f"{self.name}-{self.parts}.bin"

    def _sign(self, packed: bytes) -> bytes:
        """Return the signature for the file `self.path` with the contents `packed`."""
        return hmac.digest(_secret(), self.path.name.encode() + b"\0" + packed, "sha256")

    def _remove_old_keys(self) -> None:
        """Remove the files of all but KEPT_KEYS keys: this cache's own key and the newest others are kept."""
        # The pattern matches only files of such caches, because the folder may be a link to one with other files.
        files = self.folder.glob(f"{'[0-9a-f]' * KEY_CHARACTERS}-*-*.bin")
        newest = sorted(files, key=lambda path: path.stat().st_mtime_ns, reverse=True)
        keys = [*dict.fromkeys([self.key, *(path.name[:KEY_CHARACTERS] for path in newest)])]
        for path in newest:
            if path.name[:KEY_CHARACTERS] not in keys[:KEPT_KEYS]:
                path.unlink()


def _names(found: CacheInfo | None) -> set[tuple[str, str]]:
    """Return (kind, key) of each result of compilation that `found` lists."""
    return {(kind, key) for kind, keys in (found.artifacts if found else {}).items() for key in keys}


def _secret() -> bytes:
    """Return the secret in the environment variable that CACHE_SECRET names, else the one in SECRET_FILE in the user's
    cache. A missing file is made. Raises OSError if it cannot be used, and RuntimeError without a home directory."""
    if given := os.environ.get(CACHE_SECRET):
        return given.encode()
    path = user_cache() / SECRET_FILE
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            draft.touch(mode=0o600)
            draft.write_bytes(secrets.token_bytes(SECRET_BYTES))
            with suppress(FileExistsError):  # another rank was first
                os.link(draft, path)
        finally:
            draft.unlink(missing_ok=True)
    secret = path.read_bytes()
    if len(secret) != SECRET_BYTES:
        raise OSError(0, f"is not {SECRET_BYTES} bytes long; remove it", str(path))
    return secret
