"""Whose an error is: that of the code in its innermost frame, but for what the emulation refuses or passes on."""

from __future__ import annotations

import importlib.util
import pickle
from pathlib import Path
from traceback import FrameSummary, extract_tb

import pytest
import shardproof
import torch
from shardproof import ownership
from shardproof.emulation import cuda
from shardproof.ownership import (
    asked_of_device,
    folders_of,
    hand_on,
    is_ours,
    is_planted,
    of_users_file,
    planted,
    refused,
)
from shardproof.trainer import Unsupported

from tests.unit import lent_library

HERE = Path(shardproof.__file__).parent
LIBRARY = "/overlays/lib-1/site-packages/lib/optimizer.py"
RANK = str(HERE / "systems" / "some" / "rank" / "__init__.py")
FAULT = str(HERE / "faults" / "boundary.py")
DEVICE, FUSED, KERNELS = (str(HERE / "emulation" / f"{name}.py") for name in ("functions", "fused", "kernels"))
PASSED_ON = ownership.__file__
FOLDERS = folders_of("shardproof.systems.torch_fsdp2")


def frames(*files: str) -> list[FrameSummary]:
    return [FrameSummary(file, 1, "hand_on" if file == PASSED_ON else "f", lookup_line=False) for file in files]


@pytest.mark.parametrize(
    ("files", "ours"),
    [
        ((LIBRARY,), False),
        ((RANK, LIBRARY), False),
        ((LIBRARY, RANK), True),
        ((LIBRARY, DEVICE, PASSED_ON), False),
        ((LIBRARY, DEVICE), True),
        ((LIBRARY, DEVICE, DEVICE, PASSED_ON), False),
        ((RANK, DEVICE, PASSED_ON), True),
        ((LIBRARY, FUSED), True),
        ((LIBRARY, FUSED, KERNELS, DEVICE, PASSED_ON), True),
        ((LIBRARY, DEVICE, PASSED_ON, LIBRARY), False),
        ((FAULT,), True),
        ((RANK, FAULT), True),
        ((), False),
    ],
)
def test_the_innermost_frame_owns_an_error_unless_the_device_passed_the_call_on(
    files: tuple[str, ...], ours: bool
) -> None:
    assert is_ours(RuntimeError("no"), frames(*files), FOLDERS) is ours


@pytest.mark.parametrize(
    ("files", "ours"),
    [
        ((LIBRARY, DEVICE), False),
        ((LIBRARY, FUSED), False),
        ((LIBRARY, FUSED, KERNELS, DEVICE), False),
        ((RANK, FUSED), True),
        ((FUSED,), False),
    ],
)
def test_a_refusal_of_the_emulation_is_its_callers_also_after_it_was_pickled(
    files: tuple[str, ...], ours: bool
) -> None:
    error = pickle.loads(pickle.dumps(refused(RuntimeError("two devices"))))
    assert is_ours(error, frames(*files), FOLDERS) is ours


def test_what_a_fault_raises_on_purpose_is_not_ours_and_what_a_library_makes_of_it_is_not_planted() -> None:
    error = pickle.loads(pickle.dumps(planted(RuntimeError("as planted"))))
    assert not is_ours(error, frames(RANK, FAULT), FOLDERS)
    assert is_planted(error)
    assert not is_planted(RuntimeError("as planted"))


def test_files_of_a_plugins_package_are_ours_and_a_module_alone_is_not() -> None:
    (plugin,) = set(folders_of("tests.conformance.torch_zero")) - set(folders_of("json.decoder"))
    assert is_ours(KeyError("x"), frames(LIBRARY, f"{plugin}rank.py"), folders_of("tests.conformance.torch_zero"))
    assert not is_ours(KeyError("x"), frames(LIBRARY, f"{plugin}rank.py"), folders_of("json.decoder"))


def test_what_a_shipped_trainer_raises_is_its_own_where_shardproof_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed = HERE / "scenarios"  # where a wheel has what stands at the top of the source tree
    monkeypatch.setattr(ownership, "SHIPPED", installed)
    assert not is_ours(Unsupported("no"), frames(RANK, str(installed / "trainers" / "optimizers.py")), FOLDERS)
    assert is_ours(KeyError("x"), frames(str(installed / "trainers" / "optimizers.py"), RANK), FOLDERS)


def seen(error: BaseException) -> bool:
    return is_ours(error, extract_tb(error.__traceback__), FOLDERS)


def test_what_a_library_does_wrongly_on_the_emulated_device_is_not_ours() -> None:
    for wrong in (lent_library.adds_across_devices, lent_library.adds_shapes_that_do_not_fit):
        with cuda.emulated(), pytest.raises(RuntimeError) as caught:
            wrong()
        assert not seen(caught.value)


def test_a_defect_of_the_emulation_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise AttributeError("side")

    broken.__code__ = broken.__code__.replace(co_filename=DEVICE)
    monkeypatch.setattr("shardproof.emulation.functions._side_of_inputs", broken)
    with cuda.emulated(), pytest.raises(AttributeError) as caught:
        lent_library.adds_across_devices()
    assert seen(caught.value)


def test_handing_on_changes_nothing() -> None:
    assert hand_on(torch.add, torch.ones(1), torch.ones(1), alpha=2).item() == 3


def test_what_the_emulated_device_lacks_is_named_by_the_place_that_asks_for_it() -> None:
    cuda_file = "/venv/lib/python3.11/site-packages/torch/cuda/memory.py"
    assert asked_of_device(frames(RANK, LIBRARY, cuda_file, cuda_file)) == "lib/optimizer.py, f"
    assert asked_of_device(frames(RANK, cuda_file, LIBRARY)) == ""
    assert asked_of_device([]) == ""


BROKEN = {
    "mine.py": "import helper_of_mine\n",
    "helper_of_mine.py": "def found():\n    return undefined\n\n\nfound()\n",
    "calls.py": "import torch\n\ntorch.empty(-1)\n",
    "spells.py": "import spelt\n",
    "spelt.py": "def (:\n",
    "lacks.py": "import nobody_has_this\n",
    "theirs.py": "import broken_library\n",
    "site-packages/broken_library.py": "raise ValueError('no')\n",
}


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("mine.py", "NameError in helper_of_mine.py, line 2: name 'undefined' is not defined"),
        ("calls.py", "RuntimeError in calls.py, line 3: Trying to create tensor with negative dimension"),
        ("spells.py", "SyntaxError in spelt.py, line 1: invalid syntax"),
        ("lacks.py", "ModuleNotFoundError in lacks.py, line 1: No module named 'nobody_has_this'"),
        ("theirs.py", ""),
    ],
)
def test_an_error_of_a_users_module_is_told_with_its_place(
    file: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in BROKEN.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    spec = importlib.util.spec_from_file_location("of_a_user", tmp_path / file)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(Exception, match=r".") as caught:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    caught.value.__traceback__ = caught.value.__traceback__.tb_next  # type: ignore[union-attr]
    first, _, shown = of_users_file(caught.value).partition("\n")
    assert first.startswith(f"{file} cannot be imported: {told}" if told else "")
    assert bool(first) == bool(told)
    assert "shardproof/" not in shown
