"""Apply every rule to the first failing operation and put what they find into ranked explanations.

Only the first operation that differs is explained: whatever differs later may follow from it, and would match other
mechanisms by chance. For example, after a load that left a master stale, the next step moves the parameter from the
wrong place; the rule about updates would explain that step, but the cause is the load. Of differences that look alike
(`ALIKE`) the first few are enough.

*Verifies* nothing.
*Does not verify*: that an explanation is the only one; later operations are looked at only if no rule explains anything
at the first. What follows from a mismatch is no evidence of its own: such an explanation is never more than possible,
and says which operation it leaves unexplained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from shardproof.diagnosis.explanation import CONFIDENCES, Context, Explanation, Finding, Rule
from shardproof.diagnosis.rules import BUILT_IN
from shardproof.diff import Difference

CLAUSES = 3
"""How many differences an explanation's text names; all that it was found for are in its evidence."""

ALIKE = 4
"""How many differences of one kind, of one role, live or in one checkpoint, are explained: what holds for them holds
for the others, and a hundred parameters would take the time of a hundred."""

CAUSE_FIRST = (
    "compute_param", "norm", "grad", "direction", "scaler", "hyperparameter", "scheduler", "step",
    "exp_avg", "exp_avg_sq", "momentum", "master", "param",
)  # fmt: skip
"""The order in which an optimizer step computes: a deviation of an earlier role explains those of later ones. Gradients
are those that the optimizer saw, which are clipped by the norm."""

_RULES: list[Rule] = list(BUILT_IN)


def register(rule: Rule) -> Rule:
    """Add a rule; among equally confident explanations, rules registered earlier come first."""
    _RULES.append(rule)
    return rule


def rules() -> tuple[Rule, ...]:
    """All rules, the built-in ones from specific to general, then registered ones."""
    return tuple(_RULES)


def explain(differences: Iterable[Difference], context: Context, own: Sequence[Rule] = ()) -> list[Explanation]:
    """The mechanisms that the differences match, best first; empty if no rule knows any.

    Args:
        own: rules of the system under test, after those that hold for all.

    Best is: most confident, then (for a step) closest to the cause, then explaining most of the differences that are
    as close, then the order of the rules.
    """
    failing = [d for d in differences if d.fails]
    indices = sorted({d.key.op for d in failing})
    for index in indices:
        found = _of_operation(_telling(d for d in failing if d.key.op == index), context, (*_RULES, *own))
        if found:
            return found if index == indices[0] else [_afterwards(e, indices[0], context) for e in found]
    return []


def _telling(differences: Iterable[Difference]) -> list[Difference]:
    """The first few of those that look alike."""
    seen: Counter[tuple[str, str, str]] = Counter()
    telling = []
    for difference in differences:
        looks = (difference.key.role, difference.key.where, difference.kind)
        seen[looks] += 1
        if seen[looks] <= ALIKE:
            telling.append(difference)
    return telling


def _afterwards(explanation: Explanation, first: int, context: Context) -> Explanation:
    """What explains a later operation only, while the first that differs stays unexplained."""
    text = f"Nothing explains {context.op_name(first)}, which differs first. {explanation.text}"
    return replace(explanation, confidence="possible", text=text)


def _of_operation(differences: Sequence[Difference], context: Context, rules: Sequence[Rule]) -> list[Explanation]:
    ranked: list[tuple[tuple[int, int, int, int], Explanation]] = []
    for priority, rule in enumerate(rules):
        matches = [(d, finding) for d in differences if (finding := rule.find(d, context)) is not None]
        if not matches:
            continue
        explanation = _explanation(rule, [finding for _, finding in matches])
        distances = [_distance_to_cause(d, context) for d, _ in matches]
        closeness = min(distances)
        rank = (CONFIDENCES.index(explanation.confidence), closeness, -distances.count(closeness), priority)
        ranked.append((rank, explanation))
    return [explanation for _, explanation in sorted(ranked, key=lambda item: item[0])]


def _distance_to_cause(difference: Difference, context: Context) -> int:
    if context.op_kind(difference.key.op) != "step" or difference.key.role not in CAUSE_FIRST:
        return 0
    return CAUSE_FIRST.index(difference.key.role)


def _explanation(rule: Rule, findings: Sequence[Finding]) -> Explanation:
    ordered = sorted(findings, key=lambda finding: CONFIDENCES.index(finding.confidence))
    clauses = list(dict.fromkeys(finding.clause for finding in ordered))
    text = f"{rule.lead}: {'; '.join(clauses[:CLAUSES])}"
    if len(clauses) > CLAUSES:
        text += "; and more"
    evidence = tuple(finding.evidence for finding in ordered)
    return Explanation(rule.mechanism, ordered[0].confidence, f"{text}.", evidence, rule.bug_ids)
