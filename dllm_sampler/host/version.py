"""The version of this package: setuptools reads it without importing anything."""

__version__ = "0.1.0"
