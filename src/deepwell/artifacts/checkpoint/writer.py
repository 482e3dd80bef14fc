"""Writes one checkpoint, completely or not at all.

Why not torch.distributed.checkpoint's own writer: its planning runs collectives on every save, which a thread beside
training would need a second process group for and which hang when a rank dies; it takes the plain tensors of FP8
moments, different on each rank, for copies of one another; and it neither hashes nor syncs what it writes to
safetensors. The files are its format all the same: `HuggingFaceStorageReader` reads them.
"""

import hashlib
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import deepwell
from deepwell.artifacts.checkpoint.files import (
    FileRecord,
    remove_folder,
    rename_folder,
    sync_folder,
    write_file,
    write_whole,
)
from deepwell.artifacts.checkpoint.manifest import MARKER, SCHEMA, WRITER, folder_name, read_manifest
from deepwell.artifacts.checkpoint.pieces import Contents, Piece, contents_of
from deepwell.artifacts.checkpoint.pretrained_config import config_files
from deepwell.artifacts.checkpoint.staging import Staging
from deepwell.artifacts.checkpoint.state import TrainState
from deepwell.artifacts.checkpoint.team import Team, wait_for
from deepwell.artifacts.checkpoint.tensor_file import TensorSlot, dtype_name, header, in_file_order
from deepwell.errors import CheckpointError, ConfigError, NumericsError

_KINDS = ("model", "optimizer", "ranks")
# A folder that another machine renamed may be seen under neither name for a moment.
_RENAME_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A file to write: its header, and where its tensors' bytes lie among those that were copied."""

    name: str
    header: bytes
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteJob:
    """One rank's share of one save: everything that does not change while training goes on."""

    folder: Path
    step: int
    save_id: str
    team: Team
    files: tuple[File, ...] = ()
    tensors: tuple[dict[str, Any], ...] = ()
    contents: Contents | None = None
    documents: dict[str, bytes] = field(default_factory=dict)  # written by rank 0
    error: str = ""  # why this rank cannot take part

    @property
    def path(self) -> Path:
        return self.folder / folder_name(self.step)

    @property
    def temporary(self) -> Path:
        return self.folder / f".{folder_name(self.step)}.{self.save_id}.tmp"

    @property
    def failed(self) -> Path:
        """The file that says to a rank that comes late: rank 0 has given up."""
        return self.folder / f".{folder_name(self.step)}.{self.save_id}.failed"

    @property
    def replaced(self) -> Path:
        """Where an earlier checkpoint of the step is moved."""
        return self.folder / f".{folder_name(self.step)}.{self.save_id}.old"


def refused(meta: dict[str, Any], healthy: bool) -> str:
    """Why a state must not be saved; "" where it may."""
    if not healthy:
        return "the run is not healthy (non-finite numbers); the last good checkpoint stays"
    loss = meta.get("loss")
    if isinstance(loss, int | float) and not math.isfinite(loss):
        return f"the last loss is {loss}; the last good checkpoint stays"
    return ""


def prepare(folder: Path, state: TrainState, team: Team, save_id: str, staging: Staging) -> WriteJob:
    """Decide what this rank writes and begin to copy it to the host."""
    step = state.meta.get("step")
    folder_name(step)  # type: ignore[arg-type]  # raises for anything but a step
    contents = contents_of(state, team.rank)
    documents = {"state.json": _json_bytes(state.meta, "meta"), **config_files(state.model)}
    written = [p for p in contents.pieces if p.box.numel and (p.file == "ranks" or team.writes(p.unit))]
    places: dict[int, str] = {}
    files, ordered, begin = [], [], 0
    for kind in _KINDS:
        by_key = {piece.stored: piece for piece in written if piece.file == kind}
        slots = in_file_order(_slot(piece) for piece in by_key.values())
        if slots:
            name = f"{kind}-{team.rank:05d}.safetensors"
            end = begin + sum(slot.nbytes for slot in slots)
            files.append(File(name=name, header=header(slots), begin=begin, end=end))
            ordered += [by_key[slot.key] for slot in slots]
            places |= {id(by_key[slot.key]): name for slot in slots}
            begin = end
    # In the model's order; what no rank has a part of still has a name and a shape.
    listed = [p for p in contents.pieces if id(p) in places or (not math.prod(p.box.whole) and p.file != "ranks")]
    staging.copy([piece.tensor for piece in ordered], [piece.changes for piece in ordered])
    return WriteJob(
        folder=folder,
        step=int(state.meta["step"]),
        save_id=save_id,
        team=team,
        files=tuple(files),
        tensors=tuple(_entry(piece, places.get(id(piece), "")) for piece in listed),
        contents=contents,
        documents=documents,
    )


def failed_job(folder: Path, step: int, team: Team, save_id: str, error: str) -> WriteJob:
    """The job of a rank that cannot take part: it tells the others."""
    return WriteJob(folder=folder, step=step, save_id=save_id, team=team, error=error)


def run_job(job: WriteJob, staging: Staging, timeout_s: float) -> int:
    """Write a checkpoint together with the other ranks; returns its bytes. Raises CheckpointError if there is none."""
    done, has_reported = False, False
    try:
        job.temporary.mkdir(parents=True, exist_ok=True)
        staging.wait()
        report = _write_own(job, staging)
        if job.team.is_main:
            size = _commit(job, _reports(job, report, timeout_s))
        else:
            write_whole(job.temporary / f"report-{job.team.rank:05d}.json", _json_bytes(report, "report"))
            has_reported = True
            if job.error:
                raise CheckpointError(f"{job.path} was not saved: {job.error}")
            size = _await_commit(job, timeout_s)
        done = True
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise CheckpointError(f"{job.path} was not saved: {where}{error.strerror or error}") from error
    finally:
        if not done:
            _give_up(job, has_reported)
    return size


def _slot(piece: Piece) -> TensorSlot:
    offsets = None if piece.block or piece.file == "ranks" else piece.box.offsets
    return TensorSlot(key=piece.stored, dtype=piece.tensor.dtype, shape=tuple(piece.tensor.shape), offsets=offsets)


def _entry(piece: Piece, file: str) -> dict[str, Any]:
    box = piece.box
    part = [[file, list(box.offsets), list(box.sizes)]] if file else []
    entry: dict[str, Any] = {
        "dtype": dtype_name(piece.tensor.dtype, piece.stored),
        "shape": list(box.whole),
        "parts": part,
    }
    if piece.block:
        entry["block"] = piece.block
    return {"kind": piece.file, "name": piece.name, "key": piece.key, "entry": entry}


def _write_own(job: WriteJob, staging: Staging) -> dict[str, Any]:
    """Write this rank's files; what it reports about them."""
    if job.error or job.contents is None:
        return {"error": job.error}
    files = [
        write_file(job.temporary / file.name, (file.header, *staging.read(file.begin, file.end))) for file in job.files
    ]
    held = {name: getattr(job.contents, name) for name in ("tied", "values", "groups")}
    return {"error": "", "files": [asdict(record) for record in files], "tensors": list(job.tensors), **held}


def _reports(job: WriteJob, own: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
    """The reports of all ranks, in order. Raises CheckpointError for a rank that failed or is silent."""
    paths = {rank: job.temporary / f"report-{rank:05d}.json" for rank in range(1, job.team.world)}
    found = {0: own}

    def look() -> bool:
        for rank, path in paths.items():
            if rank not in found and path.exists():
                found[rank] = json.loads(path.read_bytes())
        return len(found) == job.team.world or any(report["error"] for report in found.values())

    is_complete = wait_for(look, timeout_s, job.team.in_a_hurry)
    for rank, report in sorted(found.items()):
        if report["error"]:
            by = f"rank {rank}: " if job.team.world > 1 else ""
            raise CheckpointError(f"{job.path} was not saved: {by}{report['error']}")
    if not is_complete:
        silent = sorted(set(paths) - set(found))
        raise CheckpointError(f"{job.path} was not saved: nothing from ranks {silent} within {timeout_s:g} s")
    return [found[rank] for rank in range(job.team.world)]


def _commit(job: WriteJob, reports: Sequence[dict[str, Any]]) -> int:
    """Write index, state and manifest, then the marker, and give the folder its name."""
    temporary = job.temporary
    files = [FileRecord.from_dict(item) for report in reports for item in report["files"]]
    documents = {**job.documents, "index.json": _json_bytes(_merge(job, reports), "index")}
    files += [write_file(temporary / name, [data]) for name, data in documents.items()]
    for path in temporary.glob("report-*.json"):
        path.unlink()
    manifest = {
        "schema": SCHEMA,
        "writer": WRITER,
        "step": job.step,
        "save_id": job.save_id,
        "world": job.team.world,
        "created": time.time(),
        "versions": {
            "deepwell": deepwell.__version__,
            "torch": str(torch.__version__),
            "python": sys.version.split()[0],
        },
        "files": [asdict(record) for record in files],
    }
    data = _json_bytes(manifest, "manifest")
    write_file(temporary / "manifest.json", [data])
    sync_folder(temporary)
    write_file(temporary / MARKER, [hashlib.sha256(data).hexdigest().encode()])
    sync_folder(temporary)
    # Where the step was saved before, that checkpoint is moved first; it counts until this one has its name.
    if job.path.exists():
        rename_folder(job.path, job.replaced)
    rename_folder(temporary, job.path)
    remove_folder(job.replaced)
    return sum(record.size for record in files) + len(data)


def _merge(job: WriteJob, reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The index of all ranks' tensors. Raises CheckpointError where parts are missing or do not fit."""
    model: dict[str, Any] = {}
    optimizer: dict[str, dict[str, Any]] = {}
    tied: dict[str, str] = {}
    values: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for report in reports:
        for item in report["tensors"]:
            if item["kind"] != "ranks":
                kind = model if item["kind"] == "model" else optimizer.setdefault(item["name"], {})
                _join(kind, item["key"] or item["name"], item["entry"], job)
        tied |= report["tied"]
        values |= report["values"]
        for number, group in enumerate(report["groups"]):
            if number == len(groups):
                groups.append({"names": [], "options": group["options"]})
            groups[number]["names"] = list(dict.fromkeys([*groups[number]["names"], *group["names"]]))
    entries = list(model.items())
    entries += [(f"{key} of {name}", entry) for name, states in optimizer.items() for key, entry in states.items()]
    for name, entry in entries:
        held, whole = sum(math.prod(sizes) for _, _, sizes in entry["parts"]), math.prod(entry["shape"])
        if held != whole:
            raise CheckpointError(f"{job.path} was not saved: ranks hold {held} of the {whole} elements of {name}")
    return {"model": model, "optimizer": optimizer, "tied": tied, "values": values, "groups": groups}


def _join(entries: dict[str, Any], name: str, entry: dict[str, Any], job: WriteJob) -> None:
    known = entries.setdefault(name, entry)
    if known is entry:
        return
    for fact in ("dtype", "shape", "block"):
        if known.get(fact) != entry.get(fact):
            raise CheckpointError(
                f"{job.path} was not saved: ranks differ on the {fact} of {name}: {known.get(fact)}, {entry.get(fact)}"
            )
    known["parts"] += entry["parts"]


def _await_commit(job: WriteJob, timeout_s: float) -> int:
    """Wait until rank 0 has given the checkpoint its name; returns this rank's bytes."""

    def is_decided() -> bool:
        return not job.temporary.exists() or job.failed.exists()

    def is_committed() -> bool:
        try:
            return read_manifest(job.path).get("save_id") == job.save_id
        except (CheckpointError, OSError):
            return False

    if not wait_for(is_decided, timeout_s, job.team.in_a_hurry):
        raise CheckpointError(f"{job.path} was not saved: nothing from rank 0 within {timeout_s:g} s")
    if job.failed.exists() or not wait_for(is_committed, _RENAME_S):
        raise CheckpointError(f"{job.path} was not saved: another rank failed")
    return sum(len(file.header) + file.end - file.begin for file in job.files)


def _give_up(job: WriteJob, has_reported: bool) -> None:
    """Leave nothing behind; a rank other than 0 frees what it wrote and tells rank 0 if it can."""
    try:
        if job.team.is_main:
            if job.team.world > 1:
                job.failed.touch()
            remove_folder(job.temporary)
            if job.replaced.exists() and not job.path.exists():
                rename_folder(job.replaced, job.path)
            return
        if job.failed.exists():
            remove_folder(job.temporary)  # which this rank has made, behind rank 0
            return
        for file in job.files:
            (job.temporary / file.name).unlink(missing_ok=True)
        if not has_reported and job.temporary.exists():
            report = job.temporary / f"report-{job.team.rank:05d}.json"
            write_whole(report, _json_bytes({"error": job.error or "its files could not be written"}, "report"))
    except OSError:
        return  # a silent rank is missed in time, a checkpoint that was moved is found all the same


def _json_bytes(value: Any, what: str) -> bytes:
    try:
        return json.dumps(value, indent=None).encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what} must be JSON: {error}") from error


def check_healthy(state: TrainState, healthy: bool) -> None:
    """Raise NumericsError for a state that must not be saved."""
    reason = refused(state.meta, healthy)
    if reason:
        raise NumericsError(f"not saved: {reason}")
