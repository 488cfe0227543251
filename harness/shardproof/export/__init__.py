"""Turns a failure into a standalone script that a maintainer can run, and into the text of an issue.

`case` says what has to be shown, `script` writes it in the library's own calls with a template of the system,
`trial` runs what was written in a clean interpreter, and `issue` writes the text. `docs/export.md` shows an example.
"""
