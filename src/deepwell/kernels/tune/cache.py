"""Keeps proofs and choices of kernels on disk: one JSON file per device, torch, triton and CUDA.

It lies beside the other caches (`hardware.cache.cache_dir`). What it says of a candidate holds for the sources that it
names, by their hash; a choice holds for the very set of candidates that competed. A file that is corrupt, of another
schema or of another machine is logged, ignored and written anew; it is never trusted. So is one that contradicts
itself: that names a kernel which did not compete, or keeps a choice under another problem's name.
"""

import hashlib
import importlib.metadata
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from deepwell.errors import ConfigError
from deepwell.hardware.cache import cache_dir, torch_version, write_cached
from deepwell.kernels.tune.candidate import Candidate, Choice
from deepwell.kernels.tune.out_of_memory import says_shortage
from deepwell.kernels.tune.verify import Proof

# Changed also where what was kept would not pass today: 1 took kernels for proved that wrote into their operands; 2 had
# times of algorithms and linears apart from the choices.
SCHEMA = 3
_log = logging.getLogger("deepwell.kernels")


@lru_cache(maxsize=16)
def identity(device: str) -> tuple[str, ...]:
    """What a measurement depends on besides the kernels: the device's name and size, torch, triton, CUDA."""
    place = torch.device(device)
    if place.type == "cuda":
        found = torch.cuda.get_device_properties(place)
        name = f"{found.name}, {found.multi_processor_count} SMs, sm_{found.major}{found.minor}"
    else:
        name = f"{place.type}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    return name, torch_version(), _triton_version(), str(torch.version.cuda)


def _triton_version() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "none"


@dataclass(slots=True)
class ChoiceCache:
    """The file of one device, read when first asked."""

    device: str
    proofs: dict[str, Any] = field(default_factory=dict)
    choices: dict[str, Any] = field(default_factory=dict)
    is_read: bool = False

    @property
    def path(self) -> Path:
        parts = identity(self.device)
        digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
        label = "".join(c if c.isalnum() else "-" for c in parts[0].lower()).strip("-")[:40]
        return cache_dir() / f"kernels-{label}-{digest}.json"

    def proof(self, candidate: Candidate, of: str) -> Proof | None:
        """What was proved of these very sources `of` a dtype, or of a problem by its key; or None."""
        self._read()
        if candidate.fingerprint is None:
            return None
        found = self.proofs.get(_proof_key(candidate, of))
        return None if found is None else Proof(**found)

    def keep_proof(self, candidate: Candidate, of: str, proof: Proof) -> None:
        """Remember a proof, unless its sources cannot be distinguished or memory was short, which may pass."""
        if candidate.fingerprint is None or says_shortage(proof.reason):
            return
        self.proofs[_proof_key(candidate, of)] = asdict(proof)
        self._write()

    def choice(self, key: str, competitors: Sequence[Candidate]) -> Choice | None:
        """The choice among exactly these candidates, or None."""
        self._read()
        found = self.choices.get(key)
        if found is None or found.get("candidates") != _keys(competitors):
            return None
        choice = Choice.from_dict({**found["choice"], "how": "cached"})
        return None if choice.skipped() else choice

    def keep_choice(self, key: str, competitors: Sequence[Candidate], choice: Choice) -> None:
        """Remember a choice, unless a candidate's sources cannot be distinguished or one lacked memory to compete."""
        if choice.skipped() or any(candidate.fingerprint is None for candidate in competitors):
            return
        self.choices[key] = {"candidates": _keys(competitors), "choice": choice.to_dict()}
        self._write()

    def _read(self) -> None:
        if self.is_read:
            return
        self.is_read = True
        loaded = _load(self.path, self.device)
        if loaded is not None:
            self.proofs, self.choices = {**loaded["proofs"], **self.proofs}, {**loaded["choices"], **self.choices}

    def _write(self) -> None:
        """Whole or not at all, with what other processes wrote in the meantime."""
        loaded = _load(self.path, self.device)
        if loaded is not None:
            self.proofs, self.choices = {**loaded["proofs"], **self.proofs}, {**loaded["choices"], **self.choices}
        data = {
            "schema": SCHEMA,
            "identity": list(identity(self.device)),
            "proofs": self.proofs,
            "choices": self.choices,
        }
        try:
            write_cached(self.path, json.dumps(data, indent=1))
        except ConfigError as error:
            # Without a cache everything still works; it is measured again next time.
            _log.warning("the choice of kernels could not be kept: %s", error)


_caches: dict[str, ChoiceCache] = {}


def cache_of(device: str) -> ChoiceCache:
    """The cache of a device in this process, one per file."""
    fresh = ChoiceCache(device=device)
    return _caches.setdefault(str(fresh.path), fresh)


def forget() -> None:
    """Drop what this process remembers, so that the files are read again."""
    _caches.clear()


def _keys(candidates: Sequence[Candidate]) -> list[str]:
    return sorted(candidate.key for candidate in candidates)


def _proof_key(candidate: Candidate, of: str) -> str:
    return f"{candidate.op} {candidate.precision} {candidate.min_size} {of} {candidate.key}"


def _load(path: Path, device: str) -> dict[str, Any] | None:
    """The checked contents of a file; None, and a line in the log, where it is no use."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        _log.warning("%s could not be read (%s): kernels are measured again", path.name, error)
        return None
    try:
        return _checked(json.loads(text), device)
    except (ValueError, RecursionError, ConfigError) as error:  # also digits or brackets without end
        _log.warning("%s was ignored (%s): kernels are measured again", path.name, error)
        return None


def _checked(data: Any, device: str) -> dict[str, Any]:
    """Raise ConfigError unless every entry is what this module writes."""
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ConfigError("another schema")
    if data.get("identity") != list(identity(device)):
        raise ConfigError("of another machine or version")
    proofs, choices = data.get("proofs"), data.get("choices")
    if not isinstance(proofs, dict) or not isinstance(choices, dict):
        raise ConfigError("proofs or choices are missing")
    try:
        for proof in proofs.values():
            kept = Proof(**proof)
            if not isinstance(kept.reason, str) or not _is_figure(kept.sqnr_db):
                raise ConfigError("a proof whose reason is no text or whose dB are no number")
        for key, entry in choices.items():
            _check_entry(key, entry, torch.device(device).type)
    except (TypeError, KeyError, AttributeError, OverflowError) as error:
        raise ConfigError(f"an entry is damaged: {error}") from error
    return data


def _is_figure(value: object) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value))


def _check_entry(key: str, entry: Any, device_type: str) -> None:
    choice = Choice.from_dict(entry["choice"])
    figures = [figure for verdict in choice.verdicts for figure in (verdict.us, verdict.sqnr_db)]
    if not all(map(_is_figure, (choice.us, *figures))):
        raise ConfigError("a choice whose times or dB are no numbers")
    if not all(isinstance(text, str) for v in choice.verdicts for text in (v.name, v.precision, v.origin, v.reason)):
        raise ConfigError("a verdict whose names or reason are no text")
    if choice.kernel not in choice.ranking():
        raise ConfigError("a choice of a kernel that was rejected")
    # A file serves all devices of one kind, whatever their number.
    if choice.problem != key or choice.device.partition(":")[0] != device_type:
        raise ConfigError(f"a choice for {choice.problem!r} on {choice.device!r} in the place of {key!r}")
    competed = {candidate.rpartition("@")[0] for candidate in entry["candidates"]}
    unknown = set(choice.ranking()) - competed
    if unknown:
        raise ConfigError(f"a choice among kernels that did not compete: {', '.join(sorted(unknown))}")
