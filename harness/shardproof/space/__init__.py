"""The space of scenarios: axes, constraints with reasons, walks, and the plan of a run.

`files` reads space files, `constraints` says what is left out and why, `feasible` and `covering` compute which
combinations exist and cover them, `coverage` counts independently what was covered, `walk` turns a space into
scenarios, `cost` estimates seconds, `plan` puts everything together, `plan_text` prints it. No library is imported.
"""
