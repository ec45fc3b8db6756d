"""Puts the folder of examples, which is beside the pages, on the site."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File


def on_files(files: Any, config: Any) -> Any:
    """Add every example, and their page."""
    root = Path(config.config_file_path).parent
    for path in sorted((root / "examples").glob("*.*")):
        name = path.relative_to(root).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files
