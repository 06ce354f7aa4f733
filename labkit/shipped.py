"""What comes with labkit itself: prompts, and small trained models with their drafts."""

import os
from pathlib import Path


def data_folder() -> Path:
    """`data/` of the repository, or its copy inside an installed package."""
    here = Path(__file__).parent
    return next((path for path in (here.parent / "data", here / "_data") if (path / "prompts").exists()), here)


def comes_with_labkit(name: str | os.PathLike[str]) -> Path | None:
    """The folder of "tiny", "tiny/medusa" and the like; None for any other name."""
    parts = os.fspath(name).split("/")
    if not 1 <= len(parts) <= 2 or not all(part.replace("-", "").replace("_", "").isalnum() for part in parts):
        return None
    folder = data_folder().joinpath(*parts)
    return folder if (folder / "config.json").is_file() else None


def models() -> list[str]:
    """The models that come with labkit."""
    return sorted(path.parent.name for path in data_folder().glob("*/config.json"))
