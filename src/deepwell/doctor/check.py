"""One finding of doctor."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail", "absent"]


@dataclass(frozen=True, slots=True)
class Check:
    """One finding: what was looked at, how it is, and what to do if it is not well."""

    name: str
    status: Status
    detail: str
    remedy: str = ""
