"""Results in one file: JSON that says what it is, written whole or not at all, and read with clear errors."""

import gzip
import json
import os
import tempfile
import zlib
from pathlib import Path
from typing import Any

from labkit.errors import LabkitError


def write_result(path: Any, kind: str, version: int, content: dict[str, Any]) -> Path:
    """Write `content` to `path`, compressed if the name ends in .gz; nobody ever sees half of it."""
    path = Path(path)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise LabkitError(f"{str(path)!r} cannot be written; give the name of a file in a folder that exists")
    data = json.dumps({"labkit": kind, "version": version, **content}, default=repr).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    handle, part = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(part, 0o644)
        os.replace(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
    return path


def read_result(path: Any, kind: str, version: int) -> dict[str, Any]:
    """What `write_result` wrote; LabkitError for a missing, truncated or foreign file, and for another version."""
    path, again = Path(path), f"save the {kind} again"
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        found = json.loads(data)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        if isinstance(error, FileNotFoundError | IsADirectoryError | PermissionError):
            raise LabkitError(
                f"{str(path)!r} cannot be read ({error.strerror}); give a file that save wrote"
            ) from error
        raise LabkitError(f"{str(path)!r} is truncated or no labkit {kind} ({error}); {again}") from error
    got = found.get("labkit") if isinstance(found, dict) else None
    if got != kind:
        raise LabkitError(f"{str(path)!r} holds {got or 'something else'}; needed is a labkit {kind}")
    if found.get("version") != version:
        raise LabkitError(
            f"{str(path)!r} is version {found.get('version')!r} of a {kind}, and this labkit reads version {version}; "
            f"{again} with this labkit, or open it with the one that wrote it"
        )
    return found


def append_row(file: Path, row: dict[str, Any]) -> None:
    """Add a line of JSON to a file, at once."""
    try:
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        raise LabkitError(f"{str(file)!r} cannot be written ({error.strerror}); make its folder first") from error


def read_rows(file: Path, kind: str, version: int, mend: bool = False) -> dict[str, dict[str, Any]]:
    """The rows by key, the latest of each. A last line cut short by a dying process is left out; mend: and cut off."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise LabkitError(f"{str(file)!r} cannot be read ({error.strerror}); give the name of a JSONL file") from error
    whole = data[: data.rfind(b"\n") + 1]
    found = {}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise LabkitError(f"line {number} of {str(file)!r} is not JSON ({error}); give another path") from error
        if not isinstance(row, dict) or row.get("labkit") != kind:
            raise LabkitError(f"line {number} of {str(file)!r} is no row of a {kind}; give another path")
        if row.get("version") != version:
            raise LabkitError(
                f"line {number} of {str(file)!r} is of version {row.get('version')!r}, and this labkit writes "
                f"version {version}; give another path"
            )
        found[row["key"]] = row
    if mend and len(whole) < len(data):
        os.truncate(file, len(whole))
    return found


def pandas() -> Any:
    """The pandas module; LabkitError, with what to install, where it is missing."""
    try:
        import pandas as pd
    except ImportError as error:
        raise LabkitError("to_pandas needs pandas, which is not installed; run: pip install pandas") from error
    return pd
