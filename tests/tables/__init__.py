"""Programs that make the tables and pictures of `docs/`. Run as `python -m tests.tables.NAME`."""
