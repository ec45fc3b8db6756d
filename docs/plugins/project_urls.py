"""Takes the repository's address for the site from pyproject.toml."""

import tomllib
from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    """Link to the repository if the project names one."""
    project = Path(config.config_file_path).with_name("pyproject.toml")
    urls = tomllib.loads(project.read_text())["project"].get("urls", {})
    config.repo_url = urls.get("Repository")
    config.repo_name = config.site_name
    return config
