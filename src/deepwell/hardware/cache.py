"""Keeps what was measured on this machine: one small JSON file per device, driver and torch version.

The folder is $DEEPWELL_CACHE_DIR, else ~/.cache/deepwell. A file that is corrupt, of another schema or of another
device is ignored with a note; the next measurement writes it anew.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepwell.errors import ConfigError
from deepwell.files import write_whole
from deepwell.hardware.codec import decode, encode
from deepwell.hardware.parts import Curve, Gpu, Origin

SCHEMA = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """What was measured on one device, and under which versions; figures hold only where those agree."""

    device: str
    driver: str
    torch: str
    date: str
    copy_gb_per_s: float | None = None
    curves: tuple[Curve, ...] = ()
    unavailable: tuple[tuple[str, str], ...] = ()  # (format, reason) pairs
    complete: bool = True  # False where time ran out or the user stopped it

    @classmethod
    def for_device(cls, gpu: Gpu, **figures: Any) -> "Measurement":
        device, driver, torch = _identity(gpu)
        return cls(device=device, driver=driver, torch=torch, **figures)

    def applied_to(self, gpu: Gpu) -> Gpu:
        """`gpu` with these figures in front of those from tables."""
        kept = tuple(s for s in gpu.sources if s.figure != "copy_gb_per_s")
        text = f"measured here {self.date} with torch {self.torch}"
        if self.copy_gb_per_s is not None:
            gpu = dataclasses.replace(
                gpu,
                copy_gb_per_s=self.copy_gb_per_s,
                sources=(*kept, Origin("copy_gb_per_s", "measured", text)),
            )
        tables = tuple(c for c in gpu.curves if c.tier != "measured")
        return dataclasses.replace(gpu, curves=self.curves + tables, unavailable=self.unavailable)


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """The folder of Deepwell's caches. It need not exist."""
    environ = os.environ if environ is None else environ
    folder = environ.get("DEEPWELL_CACHE_DIR", "").strip()
    if folder:
        return Path(folder).expanduser()
    return Path(environ.get("HOME") or Path.home()) / ".cache" / "deepwell"


def package_version(name: str) -> str | None:
    """The version of an installed package, without importing it."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_version() -> str:
    return package_version("torch") or "none"


def measurement_path(gpu: Gpu, environ: Mapping[str, str] | None = None) -> Path:
    identity = _identity(gpu)
    digest = hashlib.sha256("\n".join(identity).encode()).hexdigest()[:16]
    label = "".join(c if c.isalnum() else "-" for c in gpu.name.lower()).strip("-")[:40]
    return cache_dir(environ) / f"measure-{label}-{digest}.json"


def read_measurement(gpu: Gpu, environ: Mapping[str, str] | None = None) -> tuple[Measurement | None, str]:
    """(the measurement of `gpu` or None, a note where a file was there and was no use)."""
    path = measurement_path(gpu, environ)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
            raise ConfigError("another schema")
        found = decode(Measurement, data, path.name)
    except FileNotFoundError:
        return None, ""
    except (OSError, UnicodeDecodeError) as error:
        return None, f"the measurements in {path.name} could not be read ({error}): measure again"
    except (json.JSONDecodeError, ConfigError) as error:
        return None, f"the measurements in {path.name} were ignored ({error}): run `deepwell probe --measure` again"
    if (found.device, found.driver, found.torch) != _identity(gpu):
        return None, f"the measurements in {path.name} are of another device or version and were ignored"
    return found, ""


def write_measurement(gpu: Gpu, measurement: Measurement, environ: Mapping[str, str] | None = None) -> Path:
    """Writes the file whole or not at all. Raises `ConfigError` where the folder cannot be written."""
    path = measurement_path(gpu, environ)
    write_cached(path, json.dumps({"schema": SCHEMA, **encode(measurement)}, indent=1))
    return path


def write_cached(path: Path, text: str) -> None:
    """Writes a file of the cache whole or not at all. Raises `ConfigError` where the folder cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise ConfigError(
            f"DEEPWELL_CACHE_DIR: {path.parent} cannot be written ({error.strerror}); set it to a folder that can"
        ) from error


def _identity(gpu: Gpu) -> tuple[str, str, str]:
    # One name covers CPUs with more or fewer cores, and GPUs in and out of MIG mode: those are different devices.
    detail = f", {gpu.num_sms} cores" if gpu.kind == "cpu" else ", MIG" if gpu.mig_enabled else ""
    return gpu.name + detail, gpu.driver or "none", torch_version()
