"""Say the version of the package, as pyproject.toml does."""

VERSION = "0.1.0"
