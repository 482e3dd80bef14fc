"""Writes one checkpoint, completely or not at all.

Why not torch.distributed.checkpoint's own writer: its planning runs collectives on every save, which a thread beside
training would need a second process group for and which hang when a rank dies; it takes the plain tensors of FP8
moments, different on each rank, for copies of one another; and it neither hashes nor syncs what it writes to
safetensors. The files are its format all the same: `HuggingFaceStorageReader` reads them.
"""

import hashlib
import json
import math
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import deepwell
from deepwell.artifacts.checkpoint.manifest import MARKER, SCHEMA, WRITER, folder_name, read_manifest
from deepwell.artifacts.checkpoint.pieces import Piece, contents_of
from deepwell.artifacts.checkpoint.pretrained_config import config_files
from deepwell.artifacts.checkpoint.staging import Staging
from deepwell.artifacts.checkpoint.state import TrainState
from deepwell.artifacts.checkpoint.team import Team, wait_for
from deepwell.artifacts.tensor_file import TensorSlot, dtype_name, header, in_file_order
from deepwell.errors import CheckpointError, ConfigError
from deepwell.files import rename_synced, sync, write_file, write_whole

# A folder that another machine renamed may be seen under neither name for a moment.
_RENAME_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteJob:
    """One rank's share of one save: everything that does not change while training goes on."""

    folder: Path
    step: int
    save_id: str
    team: Team
    report: dict[str, Any]  # what the rank says of its tensors; an "error" where it cannot take part
    files: tuple[tuple[str, bytes, int, int], ...] = ()  # name, header, and which of the copied bytes are in it
    documents: dict[str, bytes] = field(default_factory=dict)  # written by rank 0

    @property
    def path(self) -> Path:
        return self.folder / folder_name(self.step)

    def beside(self, what: str) -> Path:
        """The checkpoint under construction (tmp), an earlier one of the step that is moved for it (old), or the file
        that says to a rank that comes late that rank 0 has given up (failed).
        """
        return self.folder / f".{folder_name(self.step)}.{self.save_id}.{what}"

    def own_report(self, rank: int) -> Path:
        return self.beside("tmp") / f"report-{rank:05d}.json"

    def not_saved(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path} was not saved: {why}")


def prepare(folder: Path, state: TrainState, team: Team, save_id: str, staging: Staging) -> WriteJob:
    """Decide what this rank writes and begin to copy it to the host."""
    step = state.meta.get("step")
    folder_name(step)  # raises for anything but a step
    pieces, facts = contents_of(state, team.rank)
    documents = {"state.json": _json_bytes(state.meta, "meta"), **config_files(state.model)}
    written = [p for p in pieces if p.box.numel and (p.file == "ranks" or team.writes(p.unit))]
    places: dict[int, str] = {}
    files, ordered, begin = [], [], 0
    for kind in ("model", "optimizer", "ranks"):
        by_key = {piece.stored: piece for piece in written if piece.file == kind}
        slots = in_file_order(
            TensorSlot(
                key=key,
                dtype=piece.tensor.dtype,
                shape=tuple(piece.tensor.shape),
                offsets=None if piece.block or kind == "ranks" else piece.box.offsets,
            )
            for key, piece in by_key.items()
        )
        if slots:
            name, end = f"{kind}-{team.rank:05d}.safetensors", begin + sum(slot.nbytes for slot in slots)
            files.append((name, header(slots), begin, end))
            ordered += [by_key[slot.key] for slot in slots]
            places |= {id(piece): name for piece in by_key.values()}
            begin = end
    # In the model's order; what no rank has a part of still has a name and a shape.
    listed = [p for p in pieces if id(p) in places or (not math.prod(p.box.whole) and p.file != "ranks")]
    staging.copy([piece.tensor for piece in ordered], [piece.changes for piece in ordered])
    tensors = [_entry(piece, places.get(id(piece), "")) for piece in listed]
    return WriteJob(
        folder=folder,
        step=int(state.meta["step"]),
        save_id=save_id,
        team=team,
        report={"error": "", "tensors": tensors, **facts},
        files=tuple(files),
        documents=documents,
    )


def failed_job(folder: Path, step: int, team: Team, save_id: str, error: str) -> WriteJob:
    """The job of a rank that cannot take part: it tells the others."""
    return WriteJob(folder=folder, step=step, save_id=save_id, team=team, report={"error": error})


def run_job(job: WriteJob, staging: Staging, timeout_s: float) -> int:
    """Write a checkpoint together with the other ranks; returns its bytes. Raises CheckpointError if there is none."""
    done, has_reported, temporary = False, False, job.beside("tmp")
    try:
        temporary.mkdir(parents=True, exist_ok=True)
        staging.wait()
        files = [write_file(temporary / name, (head, *staging.read(*span))) for name, head, *span in job.files]
        report = {**job.report, "files": files}
        if job.team.is_main:
            size = _commit(job, _reports(job, report, timeout_s))
        else:
            write_whole(job.own_report(job.team.rank), _json_bytes(report, "report"))
            has_reported = True
            if job.report["error"]:
                raise job.not_saved(job.report["error"])
            _await_commit(job, timeout_s)
            size = sum(file["size"] for file in files)
        done = True
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise job.not_saved(f"{where}{error.strerror or error}") from error
    finally:
        if not done:
            _give_up(job, has_reported)
    return size


def _entry(piece: Piece, file: str) -> dict[str, Any]:
    box = piece.box
    entry: dict[str, Any] = {
        "dtype": dtype_name(piece.tensor.dtype, piece.stored),
        "shape": list(box.whole),
        "parts": [[file, list(box.offsets), list(box.sizes)]] if file else [],
    }
    if piece.block:
        entry["block"] = piece.block
    return {"kind": piece.file, "name": piece.name, "key": piece.key, "entry": entry}


def _reports(job: WriteJob, own: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
    """The reports of all ranks, in order. Raises CheckpointError for a rank that failed or is silent."""
    found = {0: own}

    def look() -> bool:
        for rank in range(1, job.team.world):
            if rank not in found and job.own_report(rank).exists():
                found[rank] = json.loads(job.own_report(rank).read_bytes())
        return len(found) == job.team.world or any(report["error"] for report in found.values())

    is_complete = wait_for(look, timeout_s, job.team.in_a_hurry)
    for rank, report in sorted(found.items()):
        if report["error"]:
            raise job.not_saved((f"rank {rank}: " if job.team.world > 1 else "") + report["error"])
    if not is_complete:
        silent = [rank for rank in range(job.team.world) if rank not in found]
        raise job.not_saved(f"nothing from ranks {silent} within {timeout_s:g} s")
    return [found[rank] for rank in range(job.team.world)]


def _commit(job: WriteJob, reports: Sequence[dict[str, Any]]) -> int:
    """Write index, state and manifest, then the marker, and give the folder its name."""
    temporary, replaced = job.beside("tmp"), job.beside("old")
    documents = {**job.documents, "index.json": _json_bytes(_merge(job, reports), "index")}
    files = [record for report in reports for record in report["files"]]
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
        "files": files,
    }
    data = _json_bytes(manifest, "manifest")
    write_file(temporary / "manifest.json", [data])
    sync(temporary)
    write_file(temporary / MARKER, [hashlib.sha256(data).hexdigest().encode()])
    sync(temporary)
    # Where the step was saved before, that checkpoint is moved first; it counts until this one has its name.
    if job.path.exists():
        rename_synced(job.path, replaced)
    rename_synced(temporary, job.path)
    shutil.rmtree(replaced, ignore_errors=True)
    return sum(record["size"] for record in files) + len(data)


def _merge(job: WriteJob, reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The index of all ranks' tensors. Raises CheckpointError where parts are missing or do not fit."""
    index: dict[str, Any] = {"model": {}, "optimizer": {}, "tied": {}, "values": {}, "groups": []}
    entries: dict[tuple[str, str], dict[str, Any]] = {}
    for report in reports:
        for item in report["tensors"]:
            kind, name, key, entry = (item[fact] for fact in ("kind", "name", "key", "entry"))
            if kind == "ranks":
                continue
            known = entries.setdefault((name, key), entry)
            if known is entry:
                (index["optimizer"].setdefault(name, {}) if key else index["model"])[key or name] = entry
                continue
            for fact in ("dtype", "shape", "block"):
                if known.get(fact) != entry.get(fact):
                    raise job.not_saved(
                        f"ranks differ on the {fact} of {key or name}: {known.get(fact)}, {entry.get(fact)}"
                    )
            known["parts"] += entry["parts"]
        index["tied"] |= report["tied"]
        index["values"] |= report["values"]
        for number, group in enumerate(report["groups"]):
            if number == len(index["groups"]):
                index["groups"].append({"names": [], "options": group["options"]})
            known = index["groups"][number]
            known["names"] = list(dict.fromkeys([*known["names"], *group["names"]]))
    for (name, key), entry in entries.items():
        held, whole = sum(math.prod(sizes) for _, _, sizes in entry["parts"]), math.prod(entry["shape"])
        if held != whole:
            raise job.not_saved(f"ranks hold {held} of the {whole} elements of {f'{key} of {name}' if key else name}")
    return index


def _await_commit(job: WriteJob, timeout_s: float) -> None:
    """Wait until rank 0 has given the checkpoint its name."""

    def is_decided() -> bool:
        return not job.beside("tmp").exists() or job.beside("failed").exists()

    def is_committed() -> bool:
        try:
            return read_manifest(job.path).get("save_id") == job.save_id
        except (CheckpointError, OSError):
            return False

    if not wait_for(is_decided, timeout_s, job.team.in_a_hurry):
        raise job.not_saved(f"nothing from rank 0 within {timeout_s:g} s")
    if job.beside("failed").exists() or not wait_for(is_committed, _RENAME_S):
        raise job.not_saved("another rank failed")


def _give_up(job: WriteJob, has_reported: bool) -> None:
    """Leave nothing behind; a rank other than 0 frees what it wrote and tells rank 0 if it can."""
    temporary, failed = job.beside("tmp"), job.beside("failed")
    try:
        if job.team.is_main:
            if job.team.world > 1:
                failed.touch()
            shutil.rmtree(temporary, ignore_errors=True)
            if job.beside("old").exists() and not job.path.exists():
                rename_synced(job.beside("old"), job.path)
        elif failed.exists():
            shutil.rmtree(temporary, ignore_errors=True)  # which this rank has made, behind rank 0
        else:
            for name, *_ in job.files:
                (temporary / name).unlink(missing_ok=True)
            if not has_reported and temporary.exists():
                report = {"error": job.report["error"] or "its files could not be written"}
                write_whole(job.own_report(job.team.rank), _json_bytes(report, "report"))
    except OSError:
        return  # a silent rank is missed in time, a checkpoint that was moved is found all the same


def _json_bytes(value: Any, what: str) -> bytes:
    try:
        return json.dumps(value).encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what} must be JSON: {error}") from error
