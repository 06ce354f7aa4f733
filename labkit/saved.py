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


def pandas() -> Any:
    """The pandas module; LabkitError, with what to install, where it is missing."""
    try:
        import pandas as pd
    except ImportError as error:
        raise LabkitError("to_pandas needs pandas, which is not installed; run: pip install pandas") from error
    return pd
