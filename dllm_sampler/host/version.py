"""The version of this package, which setuptools reads without importing the package."""

__version__ = "0.1.0"
