"""Programs that measure this project's own speed. Run as scripts; `tests` import some of their parts."""
