"""Diagnosis: from differences to the mechanism they match, with the evidence, as data.

A rule looks at one difference and says whether its mechanism produces exactly those bits. Rules are small,
independent, and registered in `engine`; what several differences have in common is put together there.
"""

from harness.diagnosis.engine import explain, register, rules
from harness.diagnosis.explanation import Confidence, Context, Explanation, Finding, Rule

__all__ = ["Confidence", "Context", "Explanation", "Finding", "Rule", "explain", "register", "rules"]
