"""One sentence on what a failure does to training, for readers who ask why a few differing bits matter.

Of a known defect `issues.toml` says it (`harm`). Of a new one its mechanism does, since all failures of one mechanism
have the same consequence; of what raises or hangs, the operation that did not end. What no rule
explains, or the rule of a plugin, is told by the operation after which the state is another one.
"""

from __future__ import annotations

from shardproof.observe.record import LIVE
from shardproof.program import TAKES, WRITES
from shardproof.result import ALIKE, TWIN, Result
from shardproof.verdict import Verdict
from shardproof.wording.waits import are_apart

MECHANISMS = {
    "overflow_not_skipped": "Infinite or meaningless gradients stay in the optimizer's state for good.",
    "norms_differ": "Every rank scales its gradients by another factor, so that the model is no longer one model.",
    "norm_of_a_part": "Clipping is too weak or too strong, and so is every update that it touches.",
    "replicas_diverged": "Ranks go on with different values, and which of them a checkpoint keeps is chance.",
    "tie_split": "Two layers that are meant to share a weight train apart.",
    "bad_partition": "Elements are held twice or by nobody, and whatever is assembled from them is not the tensor.",
    "halves_of_a_part": "Whoever joins the halves gets a weight whose gate and projection are mixed up.",
    "empty_part_kept": "A resumed run starts those tensors again, and the others not.",
    "other_rank": "Ranks train the elements of other ranks, and their own are lost.",
    "counted_anew": "The moments that were loaded are thrown away by the first step after the load.",
    "counter_off": "Adam's bias correction, or the learning rate, is that of another step.",
    "hyperparameter": "Training goes on with another learning rate, weight decay or beta than was set.",
    "setting_changed": "What reads the group next (a schedule, a captured graph) finds another kind of value, or none.",
    "group_members": "Parameters are trained with the settings of another group.",
    "other_dtype": "Precision is lost, or memory is spent, where nobody asked for it.",
    "optimizer_not_loaded": "Every moment starts again at zero, and the learning rates are those of the build.",
    "narrowed_parts": "The smaller of what tensor-parallel ranks contribute to norms and biases is rounded away.",
    "narrowed": "Low bits are lost for good, while everything still has the dtype that was asked for.",
    "partly_narrowed": "Low bits of a part of the state are lost for good.",
    "no_gradient": "Those parameters are never trained.",
    "missing_contribution": "A part of the batch is never learned from.",
    "reduced_twice": "Updates are too large by the number of repetitions.",
    "skipped_again": "A step that nothing forbids is left out, and that batch is lost.",
    "stream_of_another_rank": "Dropout has another rank's masks: a resumed run is not the one that was saved.",
    "scale_of_a_part": "Ranks read one weight with different scales, so that they no longer train one model.",
    "quantised_twice": "Weights lose precision with each load, beside masters that are right.",
    "stepped_without_gradient": "Parameters that no batch reached go on moving by an old gradient.",
    "gradient_kept": "Each update contains the ones before it once more.",
    "narrowed_sum": "Small contributions are rounded away, the more of them the more ranks there are.",
    "scaled": "Updates are too large or too small by a constant factor.",
    "permuted": "The weights are scrambled.",
    "misplaced": "Rows of the weights are in each other's place.",
    "transposed": "The weights are scrambled.",
    "shifted": "Every element is the one that belongs some places further.",
    "wrong_coordinates": "Whoever reads it puts parts of the tensor in each other's place, or leaves holes.",
    "padding_counted": "The first elements of what follows padding are computed with other weights.",
    "from_neighbours": "Two parameters go on with pieces of each other.",
    "not_updated": "Those elements are never trained.",
    "not_finite": "The next step spreads them through the whole model.",
    "continued_from": "What was loaded is lost at the first step after the load.",
    "moment_continued_from": "Updates go on in the direction of a run that the load was to replace.",
    "weight_decay": "Weights shrink by another amount than was asked for.",
    "other_kernel": "Results differ in their last bits from run to run.",
    "torn_save": "A run that loads it goes on from a state that never was.",
    "unwritten_memory": "Training goes on from noise, which is another noise in every run.",
    "moved_by_a_factor": "Weights learn too fast or too slowly by a constant factor.",
    "part_of_a_step": "A part of the weights is trained by another rule than the rest.",
    "load_did_nothing": "The run goes on from its initialisation instead of from the file.",
    "permuted_parameters": "Parameters of equal shape go on with each other's values, and no shape check can notice.",
    "other_parameter": "A parameter goes on with the values of another one.",
    "other_role": "Adam takes its first moment for its second.",
    "initial_value": "That state starts again from its first value.",
    "remainder_as_value": "The fp32 weights are noise.",
    "stale_remainder": "The fp32 weights are joined from the halves of two different values.",
    "stale_value": "State goes back in time; where the copy wins, what was loaded or learned is lost.",
    "later_value": "The checkpoint mixes steps; a run that loads it goes on from a state that never was.",
    "load_without_effect": "The run starts from scratch and says that it resumed.",
    "kept_state_changed": "Going back to it goes back to another moment than the one that was kept.",
    "stale_copy_won": "What was loaded is lost at the first step.",
    "zeroed": "That state was dropped, or never filled in.",
    "loaded_unasked": "Finetuning starts with the moments of pretraining.",
    "boxes_lie": "Whoever reads it on another mesh puts them together wrongly.",
    "resolved_otherwise": "The run is not the one that was configured.",
    "marks": "Gradients are reduced, or norms counted, over the wrong ranks.",
    "warned": "It says itself that something is not as it should be.",
    "initialising_step": "The first real update is corrected as if it were a later one.",
    "not_saved": "A resumed run starts that state again.",
    "state_missing": "A later step or save works without it, or fails.",
    "state_invented": "It is stored, loaded and used as if it had been learned.",
    "wrong_shape": "Nothing that reads it can put the tensor together again.",
    "size_of_another": "The run ends there; of parameters of equal size, the same mistake would be silent.",
    "one_rank": "Ranks that must agree go different ways.",
}
"""Mechanism of `shardproof.diagnosis` → what it does to training; one for every built-in rule."""

_SAVE_RAISES = "The save raises, and the run ends there: whether its checkpoint is whole, nobody has said."

RAISES = {
    "save": _SAVE_RAISES,
    "load": "The checkpoint cannot be loaded, and the run cannot be resumed from it.",
    "load_model_only": "The weights cannot be loaded, and finetuning cannot begin.",
    "load_optimizer_only": "The optimizer's state cannot be loaded under other weights.",
    "load_schedule_only": "The learning-rate schedule cannot be loaded by itself.",
    "recall": "The run cannot go back to a state that it keeps in memory.",
    "save_kept": "What was kept in memory cannot be written.",
    "begin_save": _SAVE_RAISES,
    "finish_save": _SAVE_RAISES,
    "replace_params": "The model cannot be given other weights.",
    "build": "The run ends before its first step.",
}
"""Kind of operation → what an exception in it does to training."""

CHANGES = {
    "build": "Training starts from something else than was asked for.",
    "step": "From this step on the model is not the one that the same optimizer makes on a single process.",
    "overflow": "A step that had to be skipped leaves its trace in the state that training goes on with.",
    "save": "What is resumed from this checkpoint is not what was training when it was written.",
    "load": "The resumed run goes on from another state than the one that was saved.",
    "load_model_only": "Training starts from other weights than the checkpoint has.",
    "load_optimizer_only": "Training goes on with another optimizer state than the checkpoint has.",
    "load_schedule_only": "Training goes on at another learning rate than the schedule says.",
    "save_kept": "What is resumed from this checkpoint is not what was kept in memory for it.",
    "finish_save": "What is resumed from this checkpoint is not what was training when its save began.",
    "replace_params": "The next step starts from other weights than the model was given.",
    "recall": "Going back to a state that was kept in memory gives another one.",
    "compute_gradients": "The next update is made of other gradients.",
    "apply_gradients": "From this step on the model is not the one that the same optimizer makes on a single process.",
    "add_group": "Parameters that are trained from now on start from another state.",
    "reload_params": "The next step starts from other weights than the model holds.",
    "unfreeze": "Parameters that are trained from now on start from another state.",
}
"""Kind of operation → what a wrong state after it does to training."""

CHANGED_BY_SAVING = "Saving, which must only read, changes the state that training goes on with."

RAISES_ELSEWHERE = "The run ends there."
HANGS = "All ranks wait for each other until somebody, or a timeout, ends the job."
STANDS_STILL = "The job stands still until somebody, or a timeout, ends it."
WANDERS = "What training gives depends on timing, and no run can be compared with another."


WAYS_DIFFER = "Two ways that are to train the same model train different ones, and one of them at least is wrong."


def effect_of(result: Result) -> str:
    """What a failure does to training; empty where nothing can be said."""
    match result.verdict:
        case Verdict.NONDETERMINISTIC:
            return WANDERS
        case Verdict.MISMATCH | Verdict.CRASH | Verdict.HANG:
            silent = MECHANISMS.get(result.explanations[0].mechanism, "") if result.explanations else ""
            return " ".join(filter(None, [silent or _changed(result), _loud(result)]))
        case _:
            return ""


def _changed(result: Result) -> str:
    first = min((d.key.op for d in result.differences), default=None)
    if first is None:
        return ""
    if result.arms and all(arm.name.startswith(f"{ALIKE} ") for arm in result.arms if Verdict(arm.verdict).is_failure):
        return WAYS_DIFFER
    kind, arm = result.kind_of(first), result.headline_arm
    if arm is not None and arm.name == TWIN:
        kind = "step"
    live = any(d.key.where == LIVE for d in result.differences if d.key.op == first)
    return CHANGED_BY_SAVING if kind in (*TAKES, *WRITES) and live else CHANGES.get(kind, "")


def _loud(result: Result) -> str:
    error = result.error
    if error is None:
        return ""
    if result.verdict is Verdict.HANG or error.type == "deadline":
        return STANDS_STILL if are_apart(error) else HANGS
    kind = result.kind_of(error.op) or (result.failed_op.name if result.failed_op else "")
    return RAISES.get(kind, RAISES_ELSEWHERE)
