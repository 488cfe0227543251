"""Reports: one model of a run, rendered as text, JSON, JUnit XML, a job summary and an HTML page.

Renderers compute nothing: what differs, why, and what it means was decided before.
"""
