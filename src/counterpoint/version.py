"""The version of the package, as pyproject.toml says it."""

VERSION = "0.1.0"
