"""Diagnosis: from differences to the mechanism they match, with the evidence, as data.

A rule looks at one difference and says whether its mechanism produces exactly those bits. It does not guess from sizes:
"the value of b.weight is that of a.weight, in all 16 elements" is a finding, "the error is small" is none. Rules are
small, independent, and registered in `rules.engine`; what several differences have in common is put together there,
into explanations that a person can read and a program can count.
"""

from shardproof.diagnosis.explanation import Confidence, Context, Explanation, Finding, Rule
from shardproof.diagnosis.refusals import explain_refusal

__all__ = ["Confidence", "Context", "Explanation", "Finding", "Rule", "explain_refusal"]
