"""The CSV of published runs, read strictly: what is malformed is an error that names line and column. Pure."""

import csv
import io
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from deepwell.errors import ConfigError
from deepwell.hardware.codec import packaged_json

_COLUMNS = packaged_json("deepwell.planner", "data", "published_words.json")["columns"]
COUNTS, NUMBERS, TEXTS = (tuple(_COLUMNS[name]) for name in ("counts", "numbers", "texts"))
OPTIONAL_NUMBERS, OPTIONAL_TEXTS = tuple(_COLUMNS["optional_numbers"]), tuple(_COLUMNS["optional_texts"])
NEEDED_COLUMNS = tuple(_COLUMNS["needed_columns"])
_NEEDED = ("source", "model", "gpu", "num_gpus")
TIERS = ("A", "B", "C")
# How programs write a cell that is not there. "none" is no such word: a run without recomputation says it.
_ABSENT = frozenset({"nan", "<na>", "n/a", "na", "null"})
_ABSENT_NUMBER = _ABSENT | {"none", "-", "?", "--"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One line of the file. A blank cell is absent from `counts` and `numbers`, and "" in `texts`."""

    line: int
    texts: Mapping[str, str]
    counts: Mapping[str, int]
    numbers: Mapping[str, float]

    def text(self, column: str) -> str:
        return self.texts.get(column, "")

    def count(self, column: str) -> int | None:
        return self.counts.get(column)

    def number(self, column: str) -> float | None:
        return self.numbers.get(column)

    @property
    def notes(self) -> str:
        return self.text("notes")


def read_records(path: str | Path) -> tuple[Record, ...]:
    """The rows of a CSV file with the columns of published_runs.csv. Raises ConfigError."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a UTF-8 text file ({error})") from error
    return parse_records(text, str(path))


def parse_records(text: str, name: str) -> tuple[Record, ...]:
    """The rows of a CSV text; `name` is what errors call it."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = next(reader, None)
        if not header or not any(cell.strip() for cell in header):
            raise ConfigError(f"{name}: the file is empty; its first line names the columns")
        columns = _check_header([cell.strip() for cell in header], name)
        return tuple(_records(reader, columns, name))
    except csv.Error as error:
        raise ConfigError(f"{name}, line {reader.line_num}: not CSV ({error})") from error


def _check_header(columns: list[str], name: str) -> list[str]:
    twice = sorted({column for column in columns if columns.count(column) > 1})
    if twice:
        raise ConfigError(f"{name}, line 1: column {twice[0]!r} is named twice")
    missing = [column for column in NEEDED_COLUMNS if column not in columns]
    if missing:
        raise ConfigError(
            f"{name}, line 1: columns missing: {', '.join(missing)}; a file of runs has those of published_runs.csv, "
            f"and these at least"
        )
    return columns


def _records(reader: Iterator[list[str]], columns: list[str], name: str) -> Iterator[Record]:
    for cells in reader:
        line = int(getattr(reader, "line_num", 0))
        if not any(cell.strip() for cell in cells):
            continue  # a blank line, or one of commas alone
        if len(cells) != len(columns):
            raise ConfigError(
                f"{name}, line {line}: {len(cells)} cells for {len(columns)} columns; is a comma or a quote missing?"
            )
        row = {column: _cell(column, cell) for column, cell in zip(columns, cells, strict=True)}
        where = f"{name}, line {line}"
        record = Record(
            line=line,
            texts={column: row[column] for column in (*TEXTS, *OPTIONAL_TEXTS) if column in row},
            counts={column: _count(row[column], where, column) for column in COUNTS if row.get(column)},
            numbers={column: _number(row[column], where, column) for column in NUMBERS if row.get(column)},
        )
        for column in OPTIONAL_NUMBERS:
            if row.get(column):
                _any_number(row[column], where, column)
        _check(record, where)
        yield record


def _cell(column: str, text: str) -> str:
    """The cell without its margins; "" where it says that there is nothing."""
    text = text.strip()
    is_number = column in COUNTS or column in NUMBERS or column in OPTIONAL_NUMBERS
    return "" if text.lower() in (_ABSENT_NUMBER if is_number else _ABSENT) else text


def _check(record: Record, where: str) -> None:
    for column in _NEEDED:
        if not record.text(column) and record.count(column) is None:
            raise ConfigError(f"{where}, column {column!r}: is blank; every row needs it")
    if record.text("tier")[:1] not in TIERS:
        raise ConfigError(f"{where}, column 'tier': got {record.text('tier')!r}; accepted: {', '.join(TIERS)}")
    if not record.text("status"):
        raise ConfigError(f"{where}, column 'status': is blank; accepted: ok, OOM, memory-only or what went wrong")


def _any_number(text: str, where: str, column: str) -> float:
    grouped = re.fullmatch(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?", text)  # 1,024 as spreadsheets write it
    try:
        return float(text.replace(",", "") if grouped else text)
    except ValueError:
        raise ConfigError(f"{where}, column {column!r}: {text!r} is no number") from None


def _number(text: str, where: str, column: str) -> float:
    value = _any_number(text, where, column)
    if not math.isfinite(value) or value <= 0:
        raise ConfigError(f"{where}, column {column!r}: {text!r} is no number above 0; leave an unknown cell blank")
    return value


def _count(text: str, where: str, column: str) -> int:
    value = _number(text, where, column)
    if value != int(value):
        raise ConfigError(f"{where}, column {column!r}: {text!r} is no whole number")
    return int(value)
